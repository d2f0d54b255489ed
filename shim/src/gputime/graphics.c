/* graphics.c - a process that uses a graphics API on a shared GPU, with CUDA or without.
 *
 * OpenGL, EGL, Vulkan and VDPAU allocate inside the driver, past every function that can be hooked. What they take is counted when
 * NVML is read, and charged then; it is never refused. So the process is reported as one whose limit is not enforced in full, from
 * the first of:
 *     an allocation of a 3D object on a channel, which passes through our ioctl (capture.c): exact, also without CUDA. CUDA
 *     needs none: gVisor's nvproxy forbids their classes to containers without the graphics capability, and CUDA runs there
 *     a call that shares something with a graphics API, which is passed on: what is shared was allocated there
 * It stays reported until it ends: what it drew may stay allocated. Contexts that CUDA makes for it are in context.c.
 */
#include "hooks/hook.h"
#include "memory/memory.h"

void graphics_seen(void)
{
    if (grant_ready() == GRANT_NONE)
        return;
    state_set(WIRE_GRAPHICS, true);
    state_announce();
    warn(WARN_GRAPHICS, "this process uses a graphics API on a shared GPU: its memory is charged after it was allocated, and never refused");
}

#define SHARES(name, params, ...)                                                                                              \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        CUresult rc = tangram.driver.name(__VA_ARGS__);                                                                        \
        if (rc == CUDA_SUCCESS)                                                                                                \
            graphics_seen();                                                                                                   \
        return rc;                                                                                                             \
    }

SHARES(cuGLRegisterBufferObject, (unsigned int buffer), buffer)
SHARES(cuGraphicsGLRegisterBuffer, (CUgraphicsResource * resource, unsigned int buffer, unsigned int flags), resource, buffer,
       flags)
SHARES(cuGraphicsGLRegisterImage,
       (CUgraphicsResource * resource, unsigned int image, unsigned int target, unsigned int flags), resource, image, target,
       flags)
SHARES(cuGraphicsEGLRegisterImage, (CUgraphicsResource * resource, void *image, unsigned int flags), resource, image, flags)
SHARES(cuEGLStreamConsumerConnect, (void *connection, void *stream), connection, stream)
SHARES(cuEGLStreamConsumerConnectWithFlags, (void *connection, void *stream, unsigned int flags), connection, stream, flags)
SHARES(cuEGLStreamProducerConnect, (void *connection, void *stream, int width, int height), connection, stream, width, height)
SHARES(cuGraphicsVDPAURegisterVideoSurface, (CUgraphicsResource * resource, uint32_t surface, unsigned int flags), resource,
       surface, flags)
SHARES(cuGraphicsVDPAURegisterOutputSurface, (CUgraphicsResource * resource, uint32_t surface, unsigned int flags), resource,
       surface, flags)
