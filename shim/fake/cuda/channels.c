/* channels.c - the kernel driver's objects behind a context, as the real libcuda makes them through libc's ioctl.
 *
 * One client a process; a device, a subdevice and, for each context, a compute group of eight channels; with the first context
 * of a device also three copy groups of four. A process without the kernel's double (kernel/) has none of this, and nothing
 * else changes.
 */
#include "internal.h"
#include "nvos.h"

#include <errno.h>
#include <unistd.h>

enum { CLIENT_BASE = 0xc1d00000, CLIENT_PIDS = 0xffc00, DEVICE_BASE = 0x5c000000, COMPUTE_CHANNELS = 8, COPY_GROUPS = 3, COPY_CHANNELS = 4 };

/* The kernel's double finds the slot in the low bits. The next process in that slot has another name, so that a list of channels ends
 * with its process: on the real driver the descriptor ensures that. */
static uint32_t client_handle(void)
{
    return CLIENT_BASE | ((uint32_t)getpid() << 10 & CLIENT_PIDS) | cuda.client.slot;
}

static bool make(uint32_t parent, uint32_t handle, uint32_t object_class, const void *parameters, uint32_t bytes)
{
    struct longer_alloc {
        struct NVOS64 form;
        char more[FAKE_ALLOC_MORE];
    } made = {.form = {.hRoot = client_handle(), .hObjectParent = parent, .hObjectNew = handle, .hClass = object_class, .pAllocParms = (uintptr_t)parameters, .paramsSize = bytes}};
    const bool longer = fault_of_page(cuda.client.page, FAULT_ALLOC_FORM);
    const int saved = errno;
    const int rc = ioctl(cuda.client.page_fd, longer ? _IOWR(NV_IOCTL_MAGIC, NV_ESC_RM_ALLOC, struct longer_alloc) : _IOWR(NV_IOCTL_MAGIC, NV_ESC_RM_ALLOC, struct NVOS64), &made);
    errno = saved;
    return rc == 0 && made.form.status == NV_OK;
}

static bool make_group(uint32_t device, uint32_t handle, uint32_t engine, uint32_t channels)
{
    const struct NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS parameters = {.engineType = engine};
    bool good = make(device, handle, KEPLER_CHANNEL_GROUP_A, &parameters, sizeof parameters);
    for (uint32_t i = 0; good && i < channels; i++)
        good = make(handle, handle + 1 + i, HOPPER_CHANNEL_GPFIFO_A, NULL, 0);
    return good;
}

static bool make_device(int device)
{
    struct device *of = &cuda.device[device];
    if (of->kernel_device != 0)
        return true;
    if (!cuda.kernel_client)
        cuda.kernel_client = make(client_handle(), client_handle(), NV01_ROOT_CLIENT, NULL, 0);
    const uint32_t handle = DEVICE_BASE | (uint32_t)device << 16;
    const uint32_t parameters[14] = {of->unit}; /* 56 bytes, the device's number first */
    bool good = cuda.kernel_client && make(client_handle(), handle, NV01_DEVICE_0, parameters, sizeof parameters) &&
                make(handle, handle + 1, NV20_SUBDEVICE_0, NULL, 0);
    for (uint32_t i = 0; good && i < COPY_GROUPS; i++)
        good = make_group(handle, handle + 0x100 + i * 0x10, NV2080_ENGINE_TYPE_COPY0 + 2 + i, COPY_CHANNELS);
    of->kernel_device = good ? handle : 0;
    return good;
}

uint32_t channels_new(int device)
{
    SCOPED tables = locked(&cuda.lock);
    CHECK(make_device(device), 0);
    const uint32_t of = cuda.device[device].kernel_device, group = of + 0x1000 + (cuda.kernel_groups++ & 0xff) * 0x10;
    return make_group(of, group, NV2080_ENGINE_TYPE_GR0, COMPUTE_CHANNELS) ? group : 0;
}

void channels_free(int device, uint32_t group)
{
    struct NVOS00 gone = {.hRoot = client_handle(), .hObjectParent = cuda.device[device].kernel_device, .hObjectOld = group};
    const int saved = errno;
    if (group != 0 && ioctl(cuda.client.page_fd, _IOWR(NV_IOCTL_MAGIC, NV_ESC_RM_FREE, struct NVOS00), &gone) != 0)
        gone.status = NV_OK; /* nothing was there: the double is not loaded any more */
    errno = saved;
}
