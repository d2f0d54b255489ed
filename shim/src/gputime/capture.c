/* capture.c - the library's view of the kernel driver: which channels this process computes on, so that they can be suspended.
 *
 * The driver library reaches the kernel through libc's ioctl, so every allocation and free of a channel passes here. A
 * call goes to the kernel first and is read afterwards; nothing is changed or delayed, and the answer is the kernel's own. The
 * list of channels is sent to the arbiter with the descriptor, at the next hook that may take a moment.
 *
 * While the arbiter is away, no one else would resume what it suspended: the process then enables its own channels.
 */

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <dlfcn.h>

#include "gputime/forms.h"
#include "process.h"

typedef int (*ioctl_function)(int fd, unsigned long request, ...);
static struct capture *const capture_ = &tangram.capture;

struct channel_group { /* the channels of one client on one GPU, and the descriptor that reaches them */
    int fd;
    struct capture_channels channels;
};

static ioctl_function find_next(void)
{
    void *found = real_dlsym(RTLD_NEXT, "ioctl");
    ioctl_function function;
    memcpy(&function, &found, sizeof function);
    atomic_store_explicit(&capture_->next, function, memory_order_release);
    return function;
}

static int next_ioctl(int fd, unsigned long request, void *argument)
{
    ioctl_function function = atomic_load_explicit(&capture_->next, memory_order_acquire);
    if (UNLIKELY(function == NULL) && (function = find_next()) == NULL)
        return (int)syscall(SYS_ioctl, fd, request, argument);
    return function(fd, request, argument);
}

static void saw_alloc(struct object added)
{
    if ((added.object_class & 0xff) == RM_GRAPHICS_LOW)
        graphics_seen();
    if (!objects_follow(added.object_class))
        return;
    pthread_mutex_lock(&capture_->lock);
    bool known = objects_add(&capture_->objects, added);
    pthread_mutex_unlock(&capture_->lock);
    if (!known) {
        state_set(WIRE_UNLISTED_CHANNELS, true);
        warn(WARN_NO_CHANNELS, "no memory to follow GPU channels: this process cannot be suspended");
    } else if ((added.object_class & 0xff) == RM_CHANNEL_LOW) {
        atomic_store_explicit(&capture_->changed, true, memory_order_release);
        time_link_start();
    }
}

static void saw_free(struct object gone)
{
    pthread_mutex_lock(&capture_->lock);
    bool ran = objects_remove(&capture_->objects, gone.client, gone.handle);
    pthread_mutex_unlock(&capture_->lock);
    if (ran) {
        atomic_store_explicit(&capture_->changed, true, memory_order_release);
        capture_report(); /* a handle that is gone makes the whole list fail */
    }
}

EXPORT int ioctl(int fd, unsigned long request, ...)
{
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    int rc = next_ioctl(fd, request, argument);
    if (rc < 0 || !form_concerns(request))
        return rc;
    struct quiet quiet = quiet_begin();
    if (grant_ready() == GRANT_GOOD) {
        const struct form form = form_read(fd, request, argument);
        if (form.kind == FORM_ALLOC)
            saw_alloc(form.object);
        else if (form.kind == FORM_FREE)
            saw_free(form.object);
    }
    quiet_end(quiet);
    return rc;
}

static uint32_t control(int fd, uint32_t client, uint32_t object, uint32_t command, void *parameters, uint32_t bytes)
{
    struct rm_control call = {
        .client = client, .object = object, .command = command, .parameters = (uintptr_t)parameters, .parameters_bytes = bytes};
    int saved = errno;
    int rc = next_ioctl(fd, RM_REQUEST(RM_ESCAPE_CONTROL, struct rm_control), &call);
    errno = saved;
    return rc == 0 ? call.status : UINT32_MAX;
}

/* Locked. Where the process has compute channels; a client of NVML has a subdevice and none. */
static size_t list_groups(struct channel_group groups[CAPTURE_GROUPS])
{
    size_t count = 0;
    for (size_t at = 0; at < capture_->objects.count && count < CAPTURE_GROUPS; at++) {
        const struct object *device = &capture_->objects.object[at];
        if (device->object_class != RM_DEVICE)
            continue;
        struct capture_channels *to = &groups[count].channels;
        size_t computes = objects_channels(&capture_->objects, device->client, device->handle, ENGINE_COMPUTE, to->compute);
        size_t copies = objects_channels(&capture_->objects, device->client, device->handle, ENGINE_COPY, to->copy);
        const struct object *subdevice = objects_subdevice(&capture_->objects, device->client, device->handle);
        if (subdevice == NULL || computes == 0)
            continue;
        to->client = device->client;
        to->subdevice = subdevice->handle;
        to->computes = computes > RM_CHANNELS ? RM_CHANNELS : (uint32_t)computes;
        to->copies = copies > RM_CHANNELS ? RM_CHANNELS : (uint32_t)copies;
        to->unlisted = computes > RM_CHANNELS;
        groups[count++].fd = subdevice->fd;
    }
    return count;
}

static bool find_uuid(struct channel_group *group)
{
    struct rm_gid gid = {.flags = RM_GID_BINARY, .bytes = sizeof gid.data};
    const struct capture_channels *of = &group->channels;
    if (control(group->fd, of->client, of->subdevice, RM_COMMAND_GET_GID, &gid, sizeof gid) != RM_OK || gid.bytes != 16)
        return false;
    memcpy(group->channels.uuid, gid.data, sizeof group->channels.uuid);
    return true;
}

static bool is_group(const struct channel_group *group, struct capture_reported reported)
{
    return group->channels.client == reported.client && group->channels.subdevice == reported.subdevice;
}

/* One thread at a time. Groups that have ended are reported first: their handles may be another's soon. */
static bool report(struct channel_group *groups, size_t count)
{
    for (size_t i = 0; i < capture_->reported_count; i++) {
        size_t at = 0;
        while (at < count && !is_group(&groups[at], capture_->reported[i]))
            at++;
        struct capture_channels gone = {.client = capture_->reported[i].client, .subdevice = capture_->reported[i].subdevice};
        memcpy(gone.uuid, capture_->reported[i].uuid, sizeof gone.uuid);
        if (at == count && !time_link_channels(&gone, -1))
            return false;
    }
    capture_->reported_count = 0;
    const bool fresh = !atomic_load(&capture_->ever);
    for (size_t at = 0; at < count; at++) {
        struct capture_channels *of = &groups[at].channels;
        of->fresh = fresh;
        if (!find_uuid(&groups[at])) {
            state_set(WIRE_NO_UUID, true);
            warn(WARN_NO_UUID, "the GPU driver does not report which GPU a channel is on: this process cannot be suspended");
            continue;
        }
        if (gpu_of_uuid(of->uuid) == NULL) /* not shared */
            continue;
        if (!time_link_channels(of, groups[at].fd))
            return false;
        atomic_store(&capture_->ever, true);
        struct capture_reported *reported = &capture_->reported[capture_->reported_count++];
        *reported = (struct capture_reported){.client = of->client, .subdevice = of->subdevice};
        memcpy(reported->uuid, of->uuid, sizeof reported->uuid);
    }
    return true;
}

static bool is_too_early(void)
{
    return atomic_load(&tangram.contexts.making) > 0 && !atomic_load(&tangram.contexts.one_made);
}

void capture_report(void)
{
    if (is_too_early())
        return;
    if (!atomic_load_explicit(&capture_->changed, memory_order_acquire))
        return;
    struct quiet quiet = quiet_begin();
    if (pthread_mutex_trylock(&capture_->reporting) != 0) {
        quiet_end(quiet);
        return;
    }
    struct channel_group *groups = calloc(CAPTURE_GROUPS, sizeof *groups);
    if (groups != NULL && atomic_exchange(&capture_->changed, false)) {
        pthread_mutex_lock(&capture_->lock);
        size_t count = list_groups(groups);
        pthread_mutex_unlock(&capture_->lock);
        if (!report(groups, count))
            atomic_store(&capture_->changed, true);
    }
    free(groups);
    pthread_mutex_unlock(&capture_->reporting);
    quiet_end(quiet);
}

void capture_arbiter_is_new(void)
{
    pthread_mutex_lock(&capture_->reporting);
    capture_->reported_count = 0;
    pthread_mutex_unlock(&capture_->reporting);
    atomic_store(&capture_->changed, true);
    capture_report();
}

static void enable(const struct channel_group *group, const uint32_t *channel, uint32_t channels)
{
    struct rm_disable list = {.disable = 0, .channels = channels};
    for (uint32_t i = 0; i < channels; i++) {
        list.client[i] = group->channels.client;
        list.channel[i] = channel[i];
    }
    if (channels > 0)
        control(group->fd, group->channels.client, group->channels.subdevice, RM_COMMAND_DISABLE_CHANNELS, &list, sizeof list);
}

void capture_enable_own(void)
{
    struct channel_group *groups = calloc(CAPTURE_GROUPS, sizeof *groups);
    if (groups == NULL)
        return;
    pthread_mutex_lock(&capture_->lock);
    size_t count = list_groups(groups);
    pthread_mutex_unlock(&capture_->lock);
    for (size_t at = 0; at < count; at++) {
        enable(&groups[at], groups[at].channels.compute, groups[at].channels.computes);
        enable(&groups[at], groups[at].channels.copy, groups[at].channels.copies);
    }
    free(groups);
}

/* What the parent's threads were changing is left, not freed. */
void capture_forget_all(void)
{
    capture_->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    capture_->reporting = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    capture_->objects = (struct objects){0};
    capture_->reported_count = 0;
    atomic_store(&capture_->ever, false);
    atomic_store(&capture_->changed, false);
}
