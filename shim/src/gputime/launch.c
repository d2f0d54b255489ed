/* launch.c - the functions that put work into a stream, and those that only query or wait for it. activity.c reports it.
 *
 * Functions that wait and may free memory as well are hooked in pools.c, launches of graphs in graph.c.
 */
#include "hooks/hook.h"
#include "gputime/launching.h"
#include "memory/memory.h"
#include "tangram.h"

#define INTO_STREAM(name, ptds, stream, params, ...)                                                                           \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        activity_other(stream, ptds);                                                                                          \
        return tangram.driver.name(__VA_ARGS__);                                                                               \
    }
#define BOTH(name, stream, params, ...)                                                                                        \
    INTO_STREAM(name, 0, stream, params, __VA_ARGS__)                                                                          \
    INTO_STREAM(name##_ptsz, 1, stream, params, __VA_ARGS__)

/* A kernel may make the driver grow the context's stacks. */
#define LAUNCHES(name, ptds, stream, params, ...)                                                                              \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        if (kernel_refused(function))                                                                                           \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
        activity_launch(stream, ptds);                                                                                         \
        return tangram.driver.name(__VA_ARGS__);                                                                               \
    }
#define LAUNCHES_BOTH(name, stream, params, ...)                                                                               \
    LAUNCHES(name, 0, stream, params, __VA_ARGS__)                                                                             \
    LAUNCHES(name##_ptsz, 1, stream, params, __VA_ARGS__)

#define LAUNCH_PARAMS                                                                                                          \
    (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz, \
     unsigned int shared, CUstream stream, void **parameters, void **extra)
#define COOPERATIVE_PARAMS                                                                                                     \
    (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz, \
     unsigned int shared, CUstream stream, void **parameters)

LAUNCHES_BOTH(cuLaunchKernel, stream, LAUNCH_PARAMS, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra)
LAUNCHES_BOTH(cuLaunchCooperativeKernel, stream, COOPERATIVE_PARAMS, function, gx, gy, gz, bx, by, bz, shared, stream, parameters)
LAUNCHES_BOTH(cuLaunchKernelEx, how == NULL ? NULL : how->hStream, (const CUlaunchConfig *how, CUfunction function, void **parameters, void **extra),
     how, function, parameters, extra)

/* The oldest forms go to the default stream, or have no per-thread twin. */
LAUNCHES(cuLaunch, 0, NULL, (CUfunction function), function)
LAUNCHES(cuLaunchGrid, 0, NULL, (CUfunction function, int width, int height), function, width, height)
LAUNCHES(cuLaunchGridAsync, 0, stream, (CUfunction function, int width, int height, CUstream stream), function, width, height, stream)

EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int devices, unsigned int flags)
{
    NEEDS(cuLaunchCooperativeKernelMultiDevice);
    for (unsigned int at = 0; list != NULL && at < devices; at++)
        if (kernel_refused(list[at].function))
            return CUDA_ERROR_OUT_OF_MEMORY;
    for (unsigned int at = 0; list != NULL && at < devices; at++)
        activity_launch(list[at].hStream, 0);
    return tangram.driver.cuLaunchCooperativeKernelMultiDevice(list, devices, flags);
}

/* Copies that may be between two GPUs: elastic/across.c. */
#define COPIES(name, ptds, peer)                                                                                               \
    EXPORT CUresult name(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)                                      \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        activity_other(stream, ptds);                                                                                          \
        if (UNLIKELY(atomic_load_explicit(&tangram.hot.several_gpus, memory_order_relaxed)) && HAS(peer)) {                    \
            const struct across across = across_look(to, from, stream);                                                        \
            if (across.how == ACROSS_PEER)                                                                                     \
                return tangram.driver.peer(to, across.to, from, across.from, bytes, stream);                                   \
        }                                                                                                                      \
        return tangram.driver.name(to, from, bytes, stream);                                                                   \
    }
#define COPIES_BOTH(name)                                                                                                      \
    COPIES(name, 0, cuMemcpyPeerAsync)                                                                                         \
    COPIES(name##_ptsz, 1, cuMemcpyPeerAsync_ptsz)

COPIES_BOTH(cuMemcpyAsync)
BOTH(cuMemcpyHtoDAsync_v2, stream, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream), to, from, bytes, stream)
BOTH(cuMemcpyDtoHAsync_v2, stream, (void *to, CUdeviceptr from, size_t bytes, CUstream stream), to, from, bytes, stream)
COPIES_BOTH(cuMemcpyDtoDAsync_v2)
BOTH(cuMemsetD8Async, stream, (CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream), to, value, bytes, stream)
BOTH(cuMemsetD16Async, stream, (CUdeviceptr to, unsigned short value, size_t count, CUstream stream), to, value, count, stream)
BOTH(cuMemsetD32Async, stream, (CUdeviceptr to, unsigned int value, size_t count, CUstream stream), to, value, count, stream)

#define REQUESTS_STREAM(name, ptds)                                                                                            \
    EXPORT CUresult name(CUstream stream)                                                                                      \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct activity_before before = activity_sync_begins(stream, ptds);                                                    \
        CUresult rc = tangram.driver.name(stream);                                                                             \
        if (work_ended(rc))                                                                                                    \
            activity_synced(before);                                                                                     \
        return rc;                                                                                                             \
    }
REQUESTS_STREAM(cuStreamQuery, 0)
REQUESTS_STREAM(cuStreamQuery_ptsz, 1)

#define WAITS(name, params, ...)                                                                                               \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        CUresult rc = tangram.driver.name(__VA_ARGS__);                                                                        \
        if (work_ended(rc))                                                                                                    \
            activity_something_synced();                                                                                       \
        return rc;                                                                                                             \
    }
EXPORT CUresult cuStreamDestroy(CUstream stream)
{
    NEEDS(cuStreamDestroy);
    activity_stream_ends(stream);
    return tangram.driver.cuStreamDestroy(stream);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
    NEEDS(cuStreamDestroy_v2);
    activity_stream_ends(stream);
    return tangram.driver.cuStreamDestroy_v2(stream);
}

/* Work that waits for another process's event waits for work that the library cannot see. */
EXPORT CUresult cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle handle)
{
    NEEDS(cuIpcOpenEventHandle);
    activity_waits_for_others();
    return tangram.driver.cuIpcOpenEventHandle(event, handle);
}

WAITS(cuEventQuery, (CUevent event), event)

EXPORT int tangram_hint(uint64_t microseconds)
{
    warm_up();
    return activity_announce(WIRE_HINT, microseconds) ? 0 : -1;
}

EXPORT int tangram_begin(void)
{
    warm_up();
    return activity_announce(WIRE_BEGIN_SECTION, 0) ? 0 : -1;
}

EXPORT int tangram_end(void)
{
    return activity_announce(WIRE_END_SECTION, 0) ? 0 : -1;
}

EXPORT int tangram_yield_begin(void)
{
    return activity_announce(WIRE_YIELD, 0) ? 0 : -1;
}

EXPORT int tangram_yield_end(void)
{
    return activity_announce(WIRE_END_YIELD, 0) ? 0 : -1;
}
