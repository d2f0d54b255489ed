/* double.c - see double.h */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "double.h"

#undef NDEBUG

static const uint8_t uuids[2][16] = {{1, 2, 3}, {0xaa, 0xbb, 0xcc}};
int peer = -1, device_fd = -1;

/* The kernel driver's side. */
struct kernel kernel;

static uint32_t answer_control(struct rm_control *in)
{
    if (in->command == RM_COMMAND_GET_GID) {
        struct rm_gid *gid = (struct rm_gid *)(uintptr_t)in->parameters;
        assert(in->parameters_bytes == sizeof *gid && in->flags == 0);
        assert(gid->index == 0 && gid->flags == RM_GID_BINARY && gid->bytes == RM_GID_BYTES);
        memcpy(gid->data, uuids[in->object >> 16 & 1], 16);
        gid->bytes = 16;
    } else if (in->command == RM_COMMAND_DISABLE_CHANNELS) {
        struct rm_disable *list = (struct rm_disable *)(uintptr_t)in->parameters;
        assert(in->parameters_bytes == sizeof *list && in->flags == 0);
        assert(list->disable == 0); /* the library itself only ever enables */
        assert(list->channels >= 1 && list->channels <= RM_CHANNELS && list->only_scheduling == 0 && list->rewind == 0);
        assert(list->preempt_event == 0);
        for (uint32_t i = 0; i < RM_CHANNELS; i++)
            assert(i < list->channels ? list->client[i] == in->client : list->client[i] == 0 && list->channel[i] == 0);
        static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
        pthread_mutex_lock(&one);
        kernel.last[atomic_fetch_add(&kernel.enables, 1) % 2] = *list;
        kernel.last_control = *in;
        pthread_mutex_unlock(&one);
    }
    return RM_OK;
}

int kernel_ioctl(int fd, unsigned long request, ...)
{
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    (void)fd;
    atomic_fetch_add_explicit(&kernel.calls, 1, memory_order_relaxed);
    if (kernel.rc != 0) {
        errno = kernel.error;
        return kernel.rc;
    }
    unsigned escape = rm_escape(request), bytes = rm_size(request);
    if (rm_type(request) != RM_TYPE || argument == NULL)
        return 0;
    if (escape == RM_ESCAPE_XFER && bytes == sizeof(struct rm_xfer)) {
        const struct rm_xfer *wrapped = argument;
        escape = wrapped->escape;
        bytes = wrapped->bytes;
        argument = (void *)(uintptr_t)wrapped->argument;
        if (argument == NULL)
            return 0;
    }
    if (escape == RM_ESCAPE_ALLOC && bytes == sizeof(struct rm_alloc))
        ((struct rm_alloc *)argument)->status = kernel.status;
    else if (escape == RM_ESCAPE_ALLOC && bytes == sizeof(struct rm_alloc_short))
        ((struct rm_alloc_short *)argument)->status = kernel.status;
    else if (escape == RM_ESCAPE_FREE && bytes == sizeof(struct rm_free))
        ((struct rm_free *)argument)->status = kernel.status;
    else if (escape == RM_ESCAPE_CONTROL && bytes == sizeof(struct rm_control))
        ((struct rm_control *)argument)->status = answer_control(argument);
    return 0;
}

/* The program's side. */
int wrapped(uint32_t escape, void *argument, uint32_t bytes)
{
    struct rm_xfer xfer = {escape, bytes, (uintptr_t)argument};
    return ioctl(device_fd, RM_REQUEST(RM_ESCAPE_XFER, struct rm_xfer), &xfer);
}

void make_as(enum form form, uint32_t client, uint32_t parent, uint32_t handle, uint32_t object_class, uint32_t engine)
{
    const uint32_t *parameters = malloc(16); /* exactly the head that is read */
    assert(parameters != NULL);
    memcpy((void *)(uintptr_t)parameters, &(struct rm_group_parameters){.engine = engine}, 16);
    if (form == LONG || form == LONG_WRAPPED) {
        struct rm_alloc in = {client, parent, handle, object_class, (uintptr_t)parameters, 0, 16, 0, 0xffff, 0};
        assert((form == LONG ? ioctl(device_fd, RM_REQUEST(RM_ESCAPE_ALLOC, struct rm_alloc), &in) : wrapped(RM_ESCAPE_ALLOC, &in, sizeof in)) == 0);
        assert(in.client == client && in.parent == parent && in.handle == handle && in.object_class == object_class && in.status == kernel.status);
    } else {
        struct rm_alloc_short in = {client, parent, handle, object_class, (uintptr_t)parameters, 16, 0xffff};
        assert((form == SHORT ? ioctl(device_fd, RM_REQUEST(RM_ESCAPE_ALLOC, struct rm_alloc_short), &in) : wrapped(RM_ESCAPE_ALLOC, &in, sizeof in)) == 0);
        assert(in.client == client && in.parent == parent && in.handle == handle && in.object_class == object_class && in.status == kernel.status);
    }
    free((void *)(uintptr_t)parameters);
}

void make(uint32_t client, uint32_t parent, uint32_t handle, uint32_t object_class, uint32_t engine)
{
    make_as(LONG, client, parent, handle, object_class, engine);
}

void drop(uint32_t client, uint32_t handle)
{
    struct rm_free in = {client, 0, handle, 0xffff};
    assert(ioctl(device_fd, RM_REQUEST(RM_ESCAPE_FREE, struct rm_free), &in) == 0 && in.status == kernel.status);
}

void make_device(uint32_t client, uint32_t device)
{
    make(client, client, device, RM_DEVICE, 0);
    make(client, device, device + 1, RM_SUBDEVICE, 0);
}

void make_group(uint32_t client, uint32_t device, uint32_t group, uint32_t engine, uint32_t channels)
{
    make(client, device, group, RM_GROUP, engine);
    for (uint32_t i = 0; i < channels; i++)
        make(client, group, group + 1 + i, CHANNEL, 0);
}

/* The arbiter's side. */
struct reported next_reported(void)
{
    struct reported reported = {.fd = -1};
    struct {
        struct wire_header header;
        struct wire_channels channels;
    } packet;
    union {
        struct cmsghdr align;
        char buffer[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {&packet, sizeof packet};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t got = recvmsg(peer, &message, MSG_DONTWAIT);
    if (got < 0)
        return reported;
    assert(got == (ssize_t)sizeof packet && packet.header.magic == WIRE_MAGIC && packet.header.type == WIRE_CHANNELS);
    struct cmsghdr *passed = CMSG_FIRSTHDR(&message);
    if (passed != NULL)
        memcpy(&reported.fd, CMSG_DATA(passed), sizeof(int));
    reported.any = true;
    reported.channels = packet.channels;
    reported.fresh = (reported.channels.flags & WIRE_FRESH) != 0;
    reported.channels.flags &= ~(uint32_t)WIRE_FRESH;
    return reported;
}

static bool same_file(int a, int b)
{
    struct stat one, other;
    return fstat(a, &one) == 0 && fstat(b, &other) == 0 && one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

int order(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

/* The next report is exactly this. */
void expect(uint32_t client, uint32_t subdevice, const uint32_t *compute, uint32_t computes, const uint32_t *copy, uint32_t copies)
{
    struct reported reported = next_reported();
    struct wire_channels wanted = {.gpu = 0, .client = client, .subdevice = subdevice, .computes = computes, .copies = copies};
    for (uint32_t i = 0; i < computes; i++)
        wanted.compute[i] = compute[i];
    for (uint32_t i = 0; i < copies; i++)
        wanted.copy[i] = copy[i];
    assert(reported.any);
    qsort(reported.channels.compute, reported.channels.computes, sizeof(uint32_t), order);
    qsort(reported.channels.copy, reported.channels.copies, sizeof(uint32_t), order);
    assert(memcmp(&reported.channels, &wanted, sizeof wanted) == 0);
    if (computes > 0) {
        assert(reported.fd >= 0 && same_file(reported.fd, device_fd));
        close(reported.fd);
    } else
        assert(reported.fd == -1);
}

void expect_silence(void)
{
    capture_report();
    assert(!next_reported().any);
}

void fresh(void)
{
    while (next_reported().any)
        continue;
    objects_clear(&tangram.capture.objects);
    capture_forget_all();
    memset(&kernel, 0, sizeof kernel);
}

uint32_t *range(uint32_t first, uint32_t count)
{
    static uint32_t number[4][2 * RM_CHANNELS];
    static unsigned next;
    uint32_t *to = number[next++ % 4];
    for (uint32_t i = 0; i < count; i++)
        to[i] = first + i;
    return to;
}

void set_up(void)
{
    int pair[2];
    assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    peer = pair[0];
    struct stat there;
    assert(fstat(pair[1], &there) == 0);
    tangram.time_link.end = (struct wire_end){.fd = pair[1], .pid = getpid(), .device = there.st_dev, .inode = there.st_ino};
    tangram.time_link.stage = LINK_CONNECTED;
    tangram.link.threaded = true; /* this file is the arbiter, and no helper keeps the connection */
    device_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    assert(device_fd >= 0);
    tangram.grant.gpus = 1;
    memcpy(tangram.grant.gpu[0].uuid, uuids[0], 16);
    atomic_store(&tangram.grant.state, GRANT_GOOD);
    atomic_store(&tangram.capture.next, kernel_ioctl);
}

void forget_driver(void)
{
#define HOOK(name, base, since, ptds, params) tangram.driver.name = missing_##name;
#define REAL(name, params) tangram.driver.name = missing_##name;
#include "../src/hooks/hooks.def"
}
