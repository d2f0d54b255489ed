/* capture.c - the library's view of the kernel driver: which channels this process computes on, so that they can be suspended.
 *
 * The driver library reaches the kernel through libc's ioctl, so every allocation and free of a channel passes here. What
 * passes is done first and read afterwards; nothing is changed, nothing is held back, and the answer is the kernel's own. The
 * book is sent to the arbiter with the descriptor, when something changed and a hook comes by that may take a moment.
 *
 * While the arbiter is away nobody would resume what it suspended: then the process enables its own channels.
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

struct seat { /* one client on one device */
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
    if ((added.klass & 0xff) == RM_GRAPHICS_LOW)
        graphics_seen();
    if (!objects_follow(added.klass))
        return;
    pthread_mutex_lock(&capture_->lock);
    bool known = objects_add(&capture_->book, added);
    pthread_mutex_unlock(&capture_->lock);
    if (!known) {
        state_set(WIRE_UNLISTED_CHANNELS, true);
        warn(WARN_NO_CHANNELS, "no memory to follow GPU channels: this process cannot be suspended");
    } else if ((added.klass & 0xff) == RM_CHANNEL_LOW) {
        atomic_store_explicit(&capture_->changed, true, memory_order_release);
        turn_start();
    }
}

static void saw_free(struct object gone)
{
    pthread_mutex_lock(&capture_->lock);
    bool ran = objects_remove(&capture_->book, gone.client, gone.handle);
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
static size_t seats(struct seat seat[CAPTURE_SEATS])
{
    size_t count = 0;
    for (size_t at = 0; at < capture_->book.count && count < CAPTURE_SEATS; at++) {
        const struct object *device = &capture_->book.object[at];
        if (device->klass != RM_DEVICE)
            continue;
        struct capture_channels *to = &seat[count].channels;
        size_t computes = objects_channels(&capture_->book, device->client, device->handle, ENGINE_COMPUTE, to->compute);
        size_t copies = objects_channels(&capture_->book, device->client, device->handle, ENGINE_COPY, to->copy);
        const struct object *subdevice = objects_subdevice(&capture_->book, device->client, device->handle);
        if (subdevice == NULL || computes == 0)
            continue;
        to->client = device->client;
        to->subdevice = subdevice->handle;
        to->computes = computes > RM_CHANNELS ? RM_CHANNELS : (uint32_t)computes;
        to->copies = copies > RM_CHANNELS ? RM_CHANNELS : (uint32_t)copies;
        to->unlisted = computes > RM_CHANNELS;
        seat[count++].fd = subdevice->fd;
    }
    return count;
}

static bool find_uuid(struct seat *seat)
{
    struct rm_gid gid = {.flags = RM_GID_BINARY, .bytes = sizeof gid.data};
    const struct capture_channels *of = &seat->channels;
    if (control(seat->fd, of->client, of->subdevice, RM_COMMAND_GET_GID, &gid, sizeof gid) != RM_OK || gid.bytes != 16)
        return false;
    memcpy(seat->channels.uuid, gid.data, sizeof seat->channels.uuid);
    return true;
}

static bool is_seat(const struct seat *seat, struct capture_reported reported)
{
    return seat->channels.client == reported.client && seat->channels.subdevice == reported.subdevice;
}

/* One thread at a time. Who is no longer there is told of first: its handles may be somebody else's soon. */
static bool report(struct seat *seat, size_t count)
{
    for (size_t i = 0; i < capture_->tolds; i++) {
        size_t at = 0;
        while (at < count && !is_seat(&seat[at], capture_->reported[i]))
            at++;
        struct capture_channels gone = {.client = capture_->reported[i].client, .subdevice = capture_->reported[i].subdevice};
        memcpy(gone.uuid, capture_->reported[i].uuid, sizeof gone.uuid);
        if (at == count && !turn_channels(&gone, -1))
            return false;
    }
    capture_->tolds = 0;
    const bool fresh = !atomic_load(&capture_->ever);
    for (size_t at = 0; at < count; at++) {
        struct capture_channels *of = &seat[at].channels;
        of->fresh = fresh;
        if (!find_uuid(&seat[at])) {
            state_set(WIRE_NO_UUID, true);
            warn(WARN_NO_UUID, "the GPU driver does not say which GPU a channel is on: this process cannot be suspended");
            continue;
        }
        if (gpu_of_uuid(of->uuid) == NULL) /* not shared */
            continue;
        if (!turn_channels(of, seat[at].fd))
            return false;
        atomic_store(&capture_->ever, true);
        struct capture_reported *reported = &capture_->reported[capture_->tolds++];
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
    struct seat *seat = calloc(CAPTURE_SEATS, sizeof *seat);
    if (seat != NULL && atomic_exchange(&capture_->changed, false)) {
        pthread_mutex_lock(&capture_->lock);
        size_t count = seats(seat);
        pthread_mutex_unlock(&capture_->lock);
        if (!report(seat, count))
            atomic_store(&capture_->changed, true);
    }
    free(seat);
    pthread_mutex_unlock(&capture_->reporting);
    quiet_end(quiet);
}

void capture_arbiter_is_new(void)
{
    pthread_mutex_lock(&capture_->reporting);
    capture_->tolds = 0;
    pthread_mutex_unlock(&capture_->reporting);
    atomic_store(&capture_->changed, true);
    capture_report();
}

static void enable(const struct seat *seat, const uint32_t *channel, uint32_t channels)
{
    struct rm_disable list = {.disable = 0, .channels = channels};
    for (uint32_t i = 0; i < channels; i++) {
        list.client[i] = seat->channels.client;
        list.channel[i] = channel[i];
    }
    if (channels > 0)
        control(seat->fd, seat->channels.client, seat->channels.subdevice, RM_COMMAND_DISABLE_CHANNELS, &list, sizeof list);
}

void capture_enable_own(void)
{
    struct seat *seat = calloc(CAPTURE_SEATS, sizeof *seat);
    if (seat == NULL)
        return;
    pthread_mutex_lock(&capture_->lock);
    size_t count = seats(seat);
    pthread_mutex_unlock(&capture_->lock);
    for (size_t at = 0; at < count; at++) {
        enable(&seat[at], seat[at].channels.compute, seat[at].channels.computes);
        enable(&seat[at], seat[at].channels.copy, seat[at].channels.copies);
    }
    free(seat);
}

/* What the parent's threads were changing is left, not freed. */
void capture_forget_all(void)
{
    capture_->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    capture_->reporting = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    capture_->book = (struct objects){0};
    capture_->tolds = 0;
    atomic_store(&capture_->ever, false);
    atomic_store(&capture_->changed, false);
}
