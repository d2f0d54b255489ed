/* channels.c - the kernel driver's objects behind a context, as the real libcuda makes them through libc's ioctl.
 *
 * One client a process; a device, a subdevice and, for each context, a compute group of eight channels; with the first context
 * of a device also three copy groups of four. A process without the kernel's double (kernel/) has none of this, and nothing
 * else changes.
 */
#include "internal.h"

#include <errno.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "rm.h"

enum { CLIENT_BASE = 0xc1d00000, DEVICE_BASE = 0x5c000000, COMPUTE_CHANNELS = 8, COPY_GROUPS = 3, COPY_CHANNELS = 4, HOPPER_CHANNEL = 0xc86f };

static uint32_t client_handle(void)
{
    return CLIENT_BASE | cuda.client.slot;
}

static bool make(uint32_t parent, uint32_t handle, uint32_t klass, const void *parameters, uint32_t bytes)
{
    struct longer_alloc {
        struct rm_alloc form;
        char more[FAKE_ALLOC_MORE];
    } made = {.form = {.client = client_handle(), .parent = parent, .handle = handle, .klass = klass, .parameters = (uintptr_t)parameters, .parameters_bytes = bytes}};
    const bool longer = fault_of_page(cuda.client.page, FAULT_ALLOC_FORM);
    const int saved = errno;
    const int rc = ioctl(cuda.client.page_fd, longer ? RM_REQUEST(RM_ESCAPE_ALLOC, struct longer_alloc) : RM_REQUEST(RM_ESCAPE_ALLOC, struct rm_alloc), &made);
    errno = saved;
    return rc == 0 && made.form.status == RM_OK;
}

static bool make_group(uint32_t device, uint32_t handle, uint32_t engine, uint32_t channels)
{
    const struct rm_group_parameters parameters = {.engine = engine};
    bool good = make(device, handle, RM_GROUP, &parameters, sizeof parameters);
    for (uint32_t i = 0; good && i < channels; i++)
        good = make(handle, handle + 1 + i, HOPPER_CHANNEL, NULL, 0);
    return good;
}

static bool make_device(int device)
{
    struct device *of = &cuda.device[device];
    if (of->kernel_device != 0)
        return true;
    if (!cuda.kernel_client)
        cuda.kernel_client = make(client_handle(), client_handle(), RM_CLIENT, NULL, 0);
    const uint32_t handle = DEVICE_BASE | (uint32_t)device << 16;
    const uint32_t parameters[14] = {of->unit}; /* 56 bytes, the device's number first */
    bool good = cuda.kernel_client && make(client_handle(), handle, RM_DEVICE, parameters, sizeof parameters) &&
                make(handle, handle + 1, RM_SUBDEVICE, NULL, 0);
    for (uint32_t i = 0; good && i < COPY_GROUPS; i++)
        good = make_group(handle, handle + 0x100 + i * 0x10, RM_ENGINE_COPY_FIRST + 2 + i, COPY_CHANNELS);
    of->kernel_device = good ? handle : 0;
    return good;
}

uint32_t channels_new(int device)
{
    uint32_t group = 0;
    lock();
    if (make_device(device)) {
        group = cuda.device[device].kernel_device + 0x1000 + (cuda.kernel_groups++ & 0xff) * 0x10;
        if (!make_group(cuda.device[device].kernel_device, group, RM_ENGINE_COMPUTE_FIRST, COMPUTE_CHANNELS))
            group = 0;
    }
    unlock();
    return group;
}

void channels_free(int device, uint32_t group)
{
    struct rm_free gone = {.client = client_handle(), .parent = cuda.device[device].kernel_device, .handle = group};
    const int saved = errno;
    if (group != 0 && ioctl(cuda.client.page_fd, RM_REQUEST(RM_ESCAPE_FREE, struct rm_free), &gone) != 0)
        gone.status = RM_OK; /* nothing was there: the double is not loaded any more */
    errno = saved;
}
