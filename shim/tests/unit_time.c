/* unit_time.c - the book of channels and the ioctl hook, against a double of the kernel driver that checks every byte.
 *
 * Compiled with the library's own sources, so that the sanitizers see them. No driver, no arbiter, no thread but those of a test:
 * the arbiter's end of the connection is read here. */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../src/process.h"

#undef NDEBUG

enum { COMPUTE = RM_ENGINE_COMPUTE_FIRST, COPY = 11, CHANNEL = 0xc86f, CLIENT = 0xc1d00001, NVML = 0xc1d00002, DEVICE = 0x5c000000 };
enum { CONTEXT = 0x5c001000 }; /* its group; channels follow */

static const uint8_t uuids[2][16] = {{1, 2, 3}, {0xaa, 0xbb, 0xcc}};
static int peer = -1, device_fd = -1;

/* The kernel driver's side. */
static struct {
    _Atomic unsigned calls, enables, disables;
    uint32_t status; /* of what comes next */
    int rc, error;
    struct rm_disable last[2]; /* enables, by engine: the compute list is sent first */
    struct rm_control last_control;
} kernel;

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

static int kernel_ioctl(int fd, unsigned long request, ...)
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
enum form { LONG, SHORT, LONG_WRAPPED, SHORT_WRAPPED, FORMS };

static int wrapped(uint32_t escape, void *argument, uint32_t bytes)
{
    struct rm_xfer xfer = {escape, bytes, (uintptr_t)argument};
    return ioctl(device_fd, RM_REQUEST(RM_ESCAPE_XFER, struct rm_xfer), &xfer);
}

static void make_as(enum form form, uint32_t client, uint32_t parent, uint32_t handle, uint32_t klass, uint32_t engine)
{
    const uint32_t *parameters = malloc(16); /* exactly the head that is read */
    assert(parameters != NULL);
    memcpy((void *)(uintptr_t)parameters, &(struct rm_group_parameters){.engine = engine}, 16);
    if (form == LONG || form == LONG_WRAPPED) {
        struct rm_alloc in = {client, parent, handle, klass, (uintptr_t)parameters, 0, 16, 0, 0xffff, 0};
        assert((form == LONG ? ioctl(device_fd, RM_REQUEST(RM_ESCAPE_ALLOC, struct rm_alloc), &in) : wrapped(RM_ESCAPE_ALLOC, &in, sizeof in)) == 0);
        assert(in.client == client && in.parent == parent && in.handle == handle && in.klass == klass && in.status == kernel.status);
    } else {
        struct rm_alloc_short in = {client, parent, handle, klass, (uintptr_t)parameters, 16, 0xffff};
        assert((form == SHORT ? ioctl(device_fd, RM_REQUEST(RM_ESCAPE_ALLOC, struct rm_alloc_short), &in) : wrapped(RM_ESCAPE_ALLOC, &in, sizeof in)) == 0);
        assert(in.client == client && in.parent == parent && in.handle == handle && in.klass == klass && in.status == kernel.status);
    }
    free((void *)(uintptr_t)parameters);
}

static void make(uint32_t client, uint32_t parent, uint32_t handle, uint32_t klass, uint32_t engine)
{
    make_as(LONG, client, parent, handle, klass, engine);
}

static void drop(uint32_t client, uint32_t handle)
{
    struct rm_free in = {client, 0, handle, 0xffff};
    assert(ioctl(device_fd, RM_REQUEST(RM_ESCAPE_FREE, struct rm_free), &in) == 0 && in.status == kernel.status);
}

static void make_device(uint32_t client, uint32_t device)
{
    make(client, client, device, RM_DEVICE, 0);
    make(client, device, device + 1, RM_SUBDEVICE, 0);
}

static void make_group(uint32_t client, uint32_t device, uint32_t group, uint32_t engine, uint32_t channels)
{
    make(client, device, group, RM_GROUP, engine);
    for (uint32_t i = 0; i < channels; i++)
        make(client, group, group + 1 + i, CHANNEL, 0);
}

/* The arbiter's side. */

struct told {
    bool any;
    int fd; /* -1: none came */
    struct wire_channels channels;
};

static struct told next_told(void)
{
    struct told told = {.fd = -1};
    struct {
        struct wire_header header;
        struct wire_channels channels;
    } packet;
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {&packet, sizeof packet};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t got = recvmsg(peer, &message, MSG_DONTWAIT);
    if (got < 0)
        return told;
    assert(got == (ssize_t)sizeof packet && packet.header.magic == WIRE_MAGIC && packet.header.type == WIRE_CHANNELS);
    struct cmsghdr *passed = CMSG_FIRSTHDR(&message);
    if (passed != NULL)
        memcpy(&told.fd, CMSG_DATA(passed), sizeof(int));
    told.any = true;
    told.channels = packet.channels;
    return told;
}

static bool same_file(int a, int b)
{
    struct stat one, other;
    return fstat(a, &one) == 0 && fstat(b, &other) == 0 && one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

static int order(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

/* What was told next is exactly this. */
static void expect(uint32_t client, uint32_t subdevice, const uint32_t *compute, uint32_t computes, const uint32_t *copy, uint32_t copies)
{
    struct told told = next_told();
    struct wire_channels wanted = {.card = 0, .client = client, .subdevice = subdevice, .computes = computes, .copies = copies};
    for (uint32_t i = 0; i < computes; i++)
        wanted.compute[i] = compute[i];
    for (uint32_t i = 0; i < copies; i++)
        wanted.copy[i] = copy[i];
    assert(told.any);
    qsort(told.channels.compute, told.channels.computes, sizeof(uint32_t), order);
    qsort(told.channels.copy, told.channels.copies, sizeof(uint32_t), order);
    assert(memcmp(&told.channels, &wanted, sizeof wanted) == 0);
    if (computes > 0) {
        assert(told.fd >= 0 && same_file(told.fd, device_fd));
        close(told.fd);
    } else
        assert(told.fd == -1);
}

static void expect_silence(void)
{
    capture_tell();
    assert(!next_told().any);
}

static void fresh(void)
{
    while (next_told().any)
        continue;
    objects_clear(&tangram.capture.book);
    capture_forget_all();
    memset(&kernel, 0, sizeof kernel);
}

static uint32_t *range(uint32_t first, uint32_t count)
{
    static uint32_t number[4][2 * RM_CHANNELS];
    static unsigned turn;
    uint32_t *to = number[turn++ % 4];
    for (uint32_t i = 0; i < count; i++)
        to[i] = first + i;
    return to;
}

/* The tests. */

static void channels_are_learnt_from_every_form_of_the_allocation(void)
{
    for (enum form form = LONG; form < FORMS; form++) {
        fresh();
        make_as(form, CLIENT, CLIENT, CLIENT, RM_CLIENT, 0);
        make_as(form, CLIENT, CLIENT, DEVICE, RM_DEVICE, 0);
        make_as(form, CLIENT, DEVICE, DEVICE + 1, RM_SUBDEVICE, 0);
        make_as(form, CLIENT, DEVICE, CONTEXT, RM_GROUP, COMPUTE);
        expect_silence(); /* a group without channels is nothing yet */
        for (uint32_t i = 0; i < 8; i++)
            make_as(form, CLIENT, CONTEXT, CONTEXT + 1 + i, CHANNEL, 0);
        capture_tell();
        expect(CLIENT, DEVICE + 1, range(CONTEXT + 1, 8), 8, NULL, 0);
        expect_silence();
    }
}

static void copy_channels_are_told_apart_and_contexts_added_up(void)
{
    fresh();
    make_device(CLIENT, DEVICE);
    make_group(CLIENT, DEVICE, CONTEXT, COMPUTE, 8);
    make_group(CLIENT, DEVICE, 0x5c000100, COPY, 4);
    capture_tell();
    expect(CLIENT, DEVICE + 1, range(CONTEXT + 1, 8), 8, range(0x5c000101, 4), 4);
    make_group(CLIENT, DEVICE, CONTEXT + 0x10, COMPUTE, 8); /* a second context */
    capture_tell();
    uint32_t both[16];
    memcpy(both, range(CONTEXT + 1, 8), 32);
    memcpy(both + 8, range(CONTEXT + 0x11, 8), 32);
    expect(CLIENT, DEVICE + 1, both, 16, range(0x5c000101, 4), 4);
}

static void what_is_freed_is_told_at_once_and_with_all_under_it(void)
{
    fresh();
    make(CLIENT, CLIENT, CLIENT, RM_CLIENT, 0);
    make_device(CLIENT, DEVICE);
    make_group(CLIENT, DEVICE, CONTEXT, COMPUTE, 8);
    make_group(CLIENT, DEVICE, CONTEXT + 0x10, COMPUTE, 8);
    capture_tell();
    assert(next_told().channels.computes == 16);
    drop(CLIENT, CONTEXT + 0x18); /* one channel */
    assert(next_told().channels.computes == 15);
    drop(CLIENT, CONTEXT + 0x10); /* a group: its channels go with it */
    expect(CLIENT, DEVICE + 1, range(CONTEXT + 1, 8), 8, NULL, 0);
    drop(CLIENT, 0x77777777); /* nothing of ours */
    expect_silence();
    kernel.status = 0x21;
    drop(CLIENT, CONTEXT); /* refused by the driver: it is still there */
    kernel.status = RM_OK;
    expect_silence();
    drop(CLIENT, DEVICE);
    expect(CLIENT, DEVICE + 1, NULL, 0, NULL, 0);
    assert(tangram.capture.book.count == 0);
    make_device(CLIENT, DEVICE); /* the same numbers once more */
    make_group(CLIENT, DEVICE, CONTEXT, COMPUTE, 2);
    capture_tell();
    expect(CLIENT, DEVICE + 1, range(CONTEXT + 1, 2), 2, NULL, 0);
    drop(CLIENT, CLIENT); /* the client: everything */
    expect(CLIENT, DEVICE + 1, NULL, 0, NULL, 0);
    assert(tangram.capture.book.count == 0);
}

static void clients_that_do_not_compute_are_left_alone(void)
{
    fresh();
    make_device(NVML, DEVICE); /* NVML comes first, with the same handles */
    make_device(CLIENT, DEVICE);
    make_group(CLIENT, DEVICE, CONTEXT, COMPUTE, 8);
    capture_tell();
    expect(CLIENT, DEVICE + 1, range(CONTEXT + 1, 8), 8, NULL, 0);
    drop(NVML, NVML);
    expect_silence();
    make_group(CLIENT, DEVICE, 0x5c000100, COPY, 4);
    drop(NVML, CONTEXT + 1); /* another client's handle of the same number */
    capture_tell();
    expect(CLIENT, DEVICE + 1, range(CONTEXT + 1, 8), 8, range(0x5c000101, 4), 4);
}

static void a_card_that_is_not_shared_is_not_told_of(void)
{
    fresh();
    make_device(CLIENT, DEVICE | 1 << 16); /* the double says that this is the other card */
    make_group(CLIENT, DEVICE | 1 << 16, CONTEXT, COMPUTE, 8);
    expect_silence();
}

static void more_channels_than_a_list_holds_are_said_to_be_more(void)
{
    fresh();
    make_device(CLIENT, DEVICE);
    make_group(CLIENT, DEVICE, CONTEXT, COMPUTE, RM_CHANNELS);
    capture_tell();
    expect(CLIENT, DEVICE + 1, range(CONTEXT + 1, RM_CHANNELS), RM_CHANNELS, NULL, 0);
    make(CLIENT, CONTEXT, CONTEXT + 1 + RM_CHANNELS, CHANNEL, 0);
    capture_tell();
    struct told told = next_told();
    assert(told.any && told.channels.computes == RM_CHANNELS && (told.channels.flags & WIRE_UNLISTED) != 0);
    close(told.fd);
    drop(CLIENT, CONTEXT + 1 + RM_CHANNELS);
    told = next_told();
    assert(told.any && told.channels.computes == RM_CHANNELS && told.channels.flags == 0);
    close(told.fd);
}

static void what_is_no_allocation_is_passed_on_unread(void)
{
    fresh();
    unsigned char *odd = malloc(40); /* a form of another size: a read past it is seen by ASan */
    assert(odd != NULL);
    memset(odd, 0xa5, 40);
    assert(ioctl(device_fd, 0xc0000000ul | 40ul << 16 | RM_TYPE << 8 | RM_ESCAPE_ALLOC, odd) == 0);
    assert(ioctl(device_fd, 0xc0000000ul | 8ul << 16 | RM_TYPE << 8 | RM_ESCAPE_FREE, odd) == 0);
    assert(ioctl(device_fd, 0xc0000000ul | 8ul << 16 | RM_TYPE << 8 | RM_ESCAPE_XFER, odd) == 0);
    free(odd);
    struct rm_xfer empty = {RM_ESCAPE_ALLOC, sizeof(struct rm_alloc), 0};
    assert(ioctl(device_fd, RM_REQUEST(RM_ESCAPE_XFER, struct rm_xfer), &empty) == 0);
    assert(ioctl(device_fd, RM_REQUEST(RM_ESCAPE_ALLOC, struct rm_alloc), NULL) == 0);
    struct rm_alloc other = {CLIENT, DEVICE, CONTEXT, CHANNEL, 0, 0, 0, 0, 0, 0};
    assert(ioctl(device_fd, 0xc0000000ul | 48ul << 16 | 'T' << 8 | RM_ESCAPE_ALLOC, &other) == 0); /* another driver's */
    kernel.status = 0x51;
    make(CLIENT, CLIENT, DEVICE, RM_DEVICE, 0); /* refused by the driver */
    assert(tangram.capture.book.count == 0);
    kernel.status = RM_OK;
    struct rm_alloc group = {CLIENT, DEVICE, CONTEXT, RM_GROUP, 0, 0, 0, 0, 0, 0}; /* without parameters */
    assert(ioctl(device_fd, RM_REQUEST(RM_ESCAPE_ALLOC, struct rm_alloc), &group) == 0);
    make(CLIENT, CONTEXT, CONTEXT + 1, CHANNEL, 0);
    expect_silence();
}

static void errno_and_the_answer_are_the_kernels_own(void)
{
    fresh();
    errno = ENOENT;
    make_device(CLIENT, DEVICE);
    make_group(CLIENT, DEVICE, CONTEXT, COMPUTE, 8);
    drop(CLIENT, CONTEXT); /* tells the arbiter, or tries to */
    assert(errno == ENOENT);
    kernel.rc = -1;
    kernel.error = EINTR;
    struct rm_alloc in = {CLIENT, DEVICE, CONTEXT, RM_GROUP, 0, 0, 0, 0, 0, 0};
    size_t count = tangram.capture.book.count;
    assert(ioctl(device_fd, RM_REQUEST(RM_ESCAPE_ALLOC, struct rm_alloc), &in) == -1 && errno == EINTR);
    kernel.rc = 7;
    assert(ioctl(device_fd, RM_REQUEST(RM_ESCAPE_CONTROL, struct rm_control), &in) == 7);
    assert(tangram.capture.book.count == count);
}

static void its_own_channels_are_enabled_with_exactly_these_bytes(void)
{
    fresh();
    make_device(CLIENT, DEVICE);
    make_device(NVML, DEVICE);
    make_group(CLIENT, DEVICE, CONTEXT, COMPUTE, 8);
    make_group(CLIENT, DEVICE, 0x5c000100, COPY, 4);
    capture_enable_own();
    assert(kernel.enables == 2);
    qsort(kernel.last[0].channel, kernel.last[0].channels, sizeof(uint32_t), order);
    qsort(kernel.last[1].channel, kernel.last[1].channels, sizeof(uint32_t), order);
    assert(kernel.last[0].channels == 8 && memcmp(kernel.last[0].channel, range(CONTEXT + 1, 8), 32) == 0);
    assert(kernel.last[1].channels == 4 && memcmp(kernel.last[1].channel, range(0x5c000101, 4), 16) == 0);
    assert(kernel.last_control.client == CLIENT && kernel.last_control.object == DEVICE + 1);
}

static void a_new_arbiter_is_told_everything(void)
{
    fresh();
    make_device(CLIENT, DEVICE);
    make_group(CLIENT, DEVICE, CONTEXT, COMPUTE, 8);
    int kept = tangram.turn.fd;
    tangram.turn.fd = -1; /* the arbiter is away */
    capture_tell();
    tangram.turn.fd = kept;
    capture_arbiter_is_new();
    expect(CLIENT, DEVICE + 1, range(CONTEXT + 1, 8), 8, NULL, 0);
    capture_arbiter_is_new();
    expect(CLIENT, DEVICE + 1, range(CONTEXT + 1, 8), 8, NULL, 0);
}

static void a_forked_child_has_none_of_its_parents_channels(void)
{
    fresh();
    forks_watch();
    make_device(CLIENT, DEVICE);
    make_group(CLIENT, DEVICE, CONTEXT, COMPUTE, 8);
    pid_t child = fork();
    assert(child >= 0);
    if (child == 0) {
        bool good = tangram.capture.book.count == 0 && tangram.turn.fd == -1;
        capture_enable_own();
        good = good && kernel.enables == 0;
        tangram.turn.threaded = true; /* no arbiter here */
        make_device(CLIENT, DEVICE);
        make_group(CLIENT, DEVICE, CONTEXT, COMPUTE, 3);
        capture_enable_own();
        _exit(good && kernel.enables == 1 && kernel.last[0].channels == 3 ? 0 : 1);
    }
    int status;
    assert(waitpid(child, &status, 0) == child && status == 0);
    assert(tangram.turn.fd >= 0);
    capture_tell();
    expect(CLIENT, DEVICE + 1, range(CONTEXT + 1, 8), 8, NULL, 0);
}

/* What was told of work since this was asked last. */
static void count_activity(unsigned *works, unsigned *idles)
{
    struct {
        struct wire_header header;
        struct wire_activity_said said;
    } packet;
    *works = *idles = 0;
    while (recv(peer, &packet, sizeof packet, MSG_DONTWAIT) == (ssize_t)sizeof packet) {
        *works += packet.said.what == WIRE_WORK;
        *idles += packet.said.what == WIRE_IDLE;
    }
}

static uint64_t us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static void launch_and_wait(CUstream stream)
{
    activity_launch(stream, 0);
    struct activity_before before = activity_sync_begins(stream, 0);
    activity_stream_synced(before);
}

/* A launch and a wait, as fast as it goes: who is latency-critical says all of it, the others at most once a millisecond. */
static void idleness_is_told_once_a_millisecond(bool urgent)
{
    fresh();
    activity_forget();
    activity_watch();
    atomic_store(&tangram.turn.urgent, urgent);
    CUstream stream = (CUstream)0x1000;
    unsigned works = 0, idles = 0, all_works = 0, all_idles = 0, rounds = 0;
    uint64_t began = us();
    while (us() - began < 50000) {
        launch_and_wait(stream);
        rounds++;
        count_activity(&works, &idles);
        all_works += works;
        all_idles += idles;
    }
    uint64_t took_ms = (us() - began) / 1000;
    if (urgent)
        assert(all_works == rounds && all_idles == rounds);
    else
        assert(all_idles >= 2 && all_idles <= took_ms + 1 && all_works <= took_ms + 2);
    if (!urgent && atomic_load(&tangram.activity.told)) { /* what the thread of turn.c does */
        while (us() - tangram.activity.idle_told_us < 1000)
            continue;
        assert(activity_tell_later() && !activity_is_told());
        count_activity(&works, &idles);
        assert(works == 0 && idles == 1);
    }
    assert(!activity_tell_later());
    activity_launch(stream, 0); /* and work after that is told at once */
    count_activity(&works, &idles);
    assert(works == 1 && idles == 0);
    activity_forget();
}

static void idleness_that_ended_is_not_told_later(void)
{
    fresh();
    activity_forget();
    activity_watch();
    atomic_store(&tangram.turn.urgent, false);
    CUstream stream = (CUstream)0x1000;
    unsigned works, idles;
    launch_and_wait(stream);
    launch_and_wait(stream); /* within the millisecond, mostly */
    activity_launch(stream, 0);
    while (us() - tangram.activity.idle_told_us < 1000)
        continue;
    count_activity(&works, &idles);
    activity_tell_later();
    count_activity(&works, &idles);
    assert(idles == 0 && activity_is_told());
    activity_forget();
}

/* Against a slow version: parents in an array; what has lost an ancestor is gone. Handles and parents are garbage often. */
enum { HANDLES = 40, CLIENTS = 3 };
static uint32_t parent_of[CLIENTS][HANDLES]; /* 0 = not there */

static void slow_remove(unsigned client, uint32_t handle)
{
    parent_of[client][handle] = 0;
    for (uint32_t i = 1; i < HANDLES; i++)
        if (parent_of[client][i] == handle)
            slow_remove(client, i);
}

static void the_book_agrees_with_a_slow_one_also_on_garbage(void)
{
    static const uint32_t klass[] = {RM_DEVICE, RM_SUBDEVICE, RM_GROUP, CHANNEL, 0xc56f};
    struct objects book = {0};
    unsigned seed = 7;
    for (unsigned step = 0; step < 200000; step++) {
        unsigned client = (unsigned)rand_r(&seed) % CLIENTS;
        uint32_t handle = 1 + (uint32_t)rand_r(&seed) % (HANDLES - 1), name = 0xc1000000 + client;
        if (rand_r(&seed) % 3 != 0) {
            uint32_t parent = 1 + (uint32_t)rand_r(&seed) % (HANDLES - 1); /* also itself, a later one, or none there is */
            assert(objects_add(&book, (struct object){name, handle, parent, klass[rand_r(&seed) % 5], (uint32_t)rand_r(&seed) % 14, 3}));
            parent_of[client][handle] = parent;
        } else if (rand_r(&seed) % 50 == 0) {
            objects_remove(&book, name, name);
            memset(parent_of[client], 0, sizeof parent_of[client]);
        } else {
            objects_remove(&book, name, handle);
            slow_remove(client, handle);
        }
        size_t there = 0;
        for (client = 0; client < CLIENTS; client++)
            for (handle = 1; handle < HANDLES; handle++) {
                bool is = objects_find(&book, 0xc1000000 + client, handle) != NULL;
                assert(is == (parent_of[client][handle] != 0));
                there += is;
            }
        assert(there == book.count);
        uint32_t channel[RM_CHANNELS];
        objects_channels(&book, name, handle, ENGINE_COMPUTE, channel);
    }
    objects_clear(&book);
}

static void *make_and_drop(void *number)
{
    uint32_t client = CLIENT + 0x100 + (uint32_t)(uintptr_t)number;
    for (unsigned round = 0; round < 300; round++) {
        make(client, client, client, RM_CLIENT, 0);
        make_device(client, DEVICE);
        make_group(client, DEVICE, CONTEXT, COMPUTE, 4);
        capture_tell();
        if (round % 3 == 0)
            capture_enable_own();
        drop(client, round % 2 ? client : DEVICE);
        if (round % 2 == 0)
            drop(client, client);
    }
    return NULL;
}

static void *read_all(void *stop)
{
    while (!atomic_load((_Atomic bool *)stop)) {
        struct told told = next_told();
        if (told.fd >= 0)
            close(told.fd);
    }
    return NULL;
}

static void threads_do_not_disturb_each_other(void)
{
    fresh();
    enum { THREADS = 4 };
    pthread_t thread[THREADS], reader;
    _Atomic bool stop = false;
    assert(pthread_create(&reader, NULL, read_all, &stop) == 0);
    for (uintptr_t i = 0; i < THREADS; i++)
        assert(pthread_create(&thread[i], NULL, make_and_drop, (void *)i) == 0);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    atomic_store(&stop, true);
    pthread_join(reader, NULL);
    assert(tangram.capture.book.count == 0);
}

static double ns_each(int (*call)(int, unsigned long, ...), unsigned long request, void *argument)
{
    enum { CALLS = 200000 };
    struct timespec began, ended;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &began);
    for (unsigned i = 0; i < CALLS; i++)
        call(device_fd, request, argument);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ended);
    return ((double)(ended.tv_sec - began.tv_sec) * 1e9 + (double)(ended.tv_nsec - began.tv_nsec)) / CALLS;
}

/* The least of several: whatever else runs on the machine only adds. */
static void an_ordinary_call_costs_less_than_100_ns(void)
{
    fresh();
    kernel.rc = 1; /* at once */
    struct rm_control control = {.client = CLIENT};
    const unsigned long request[2] = {RM_REQUEST(RM_ESCAPE_CONTROL, struct rm_control), 0x5401 /* TCGETS */};
    for (unsigned r = 0; r < 2; r++) {
        double least = 1e9;
        for (unsigned i = 0; i < 7; i++) {
            double with = ns_each(ioctl, request[r], &control), without = ns_each(kernel_ioctl, request[r], &control);
            least = with - without < least ? with - without : least;
        }
        printf("ioctl %#lx: %.1f ns more\n", request[r], least);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
        assert(least < 100);
#endif
    }
}

static void set_up(void)
{
    int pair[2];
    assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    peer = pair[0];
    tangram.turn.fd = pair[1];
    tangram.turn.threaded = true; /* this file is the arbiter, and nobody keeps the connection */
    device_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    assert(device_fd >= 0);
    tangram.grant.cards = 1;
    memcpy(tangram.grant.card[0].uuid, uuids[0], 16);
    atomic_store(&tangram.grant.state, GRANT_GOOD);
    atomic_store(&tangram.capture.next, kernel_ioctl);
}

int main(void)
{
    set_up();
    channels_are_learnt_from_every_form_of_the_allocation();
    copy_channels_are_told_apart_and_contexts_added_up();
    what_is_freed_is_told_at_once_and_with_all_under_it();
    clients_that_do_not_compute_are_left_alone();
    a_card_that_is_not_shared_is_not_told_of();
    more_channels_than_a_list_holds_are_said_to_be_more();
    what_is_no_allocation_is_passed_on_unread();
    errno_and_the_answer_are_the_kernels_own();
    its_own_channels_are_enabled_with_exactly_these_bytes();
    a_new_arbiter_is_told_everything();
    a_forked_child_has_none_of_its_parents_channels();
    idleness_is_told_once_a_millisecond(false);
    idleness_is_told_once_a_millisecond(true);
    idleness_that_ended_is_not_told_later();
    the_book_agrees_with_a_slow_one_also_on_garbage();
    threads_do_not_disturb_each_other();
    an_ordinary_call_costs_less_than_100_ns();
    puts("ok");
    return 0;
}
