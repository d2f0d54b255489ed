/* channels.h - this process's own GPU channels, read from its ioctls, and switched. Layouts: shim/src/gputime/rm.h and forms.h.
 *
 * Link with -Xlinker -export-dynamic: the driver library must call the ioctl below instead of libc's.
 */
#ifndef CHANNELS_H
#define CHANNELS_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST_OBJECTS = 128, MOST_CHANNELS = 16, RM_ALLOC = 0x2b, RM_CONTROL = 0x2a, RM_TSG = 0xa06c, RM_SUBDEVICE = 0x2080, RM_DISABLE = 0x2080110b };

struct rm_alloc {
    uint32_t client, parent, handle, object_class;
    uint64_t parameters, rights;
    uint32_t bytes, flags, status, pad;
};
struct rm_control {
    uint32_t client, object, command, flags;
    uint64_t parameters;
    uint32_t bytes, status;
};
struct rm_disable {
    uint8_t disable, pad1[3];
    uint32_t channels;
    uint8_t only, rewind, pad2[6];
    uint64_t event;
    uint32_t client[64], channel[64];
};

struct channel_group {
    int fd;
    uint32_t client, handle, engine, channels, channel[MOST_CHANNELS];
};
struct subdevice {
    uint32_t client, handle;
};
static struct channel_group group[MOST_OBJECTS];
static struct subdevice subdevice[MOST_OBJECTS];
static int groups, subdevices;

static void follow(int fd, const struct rm_alloc *made)
{
    if (made->object_class == RM_TSG && groups < MOST_OBJECTS) {
        struct channel_group *one = &group[groups++];
        memset(one, 0, sizeof *one);
        one->fd = fd;
        one->client = made->client;
        one->handle = made->handle;
        one->engine = made->parameters ? ((const uint32_t *)(uintptr_t)made->parameters)[3] : 99;
    } else if (made->object_class == RM_SUBDEVICE && subdevices < MOST_OBJECTS) {
        subdevice[subdevices].client = made->client;
        subdevice[subdevices++].handle = made->handle;
    } else if ((made->object_class & 0xff) == 0x6f && made->object_class > 0xa000) {
        for (int i = 0; i < groups; i++)
            if (group[i].client == made->client && group[i].handle == made->parent && group[i].channels < MOST_CHANNELS)
                group[i].channel[group[i].channels++] = made->handle;
    }
}

#ifdef __cplusplus
extern "C"
#endif
int ioctl(int fd, unsigned long request, ...)
{
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    int rc = (int)syscall(SYS_ioctl, fd, request, argument);
    if (rc >= 0 && (request >> 8 & 0xff) == 'F' && (request & 0xff) == RM_ALLOC && ((const struct rm_alloc *)argument)->status == 0)
        follow(fd, (const struct rm_alloc *)argument);
    return rc;
}

/* The compute channels, or all others. Returns the last status that was not 0. */
static uint32_t switch_channels(bool disable, bool copies)
{
    uint32_t status = 0;
    for (int i = 0; i < groups; i++) {
        bool compute = group[i].engine >= 1 && group[i].engine <= 8;
        if (compute == copies)
            continue;
        struct rm_disable list;
        memset(&list, 0, sizeof list);
        list.disable = disable;
        for (uint32_t k = 0; k < group[i].channels; k++) {
            list.client[list.channels] = group[i].client;
            list.channel[list.channels++] = group[i].channel[k];
        }
        for (int s = 0; s < subdevices; s++)
            if (subdevice[s].client == group[i].client) {
                struct rm_control call = {group[i].client, subdevice[s].handle, RM_DISABLE, 0, (uintptr_t)&list, sizeof list, 0};
                if (syscall(SYS_ioctl, group[i].fd, _IOWR('F', RM_CONTROL, struct rm_control), &call) != 0 || call.status)
                    status = call.status ? call.status : 0xffff;
                break;
            }
    }
    return status;
}

#endif
