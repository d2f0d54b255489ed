/* trial.c - the program whose GPU work is suspended to see whether the driver does it: tangram-trial SOCKET [FOLDER].
 *
 * It counts on the GPU and switches nothing itself: python -m arbiter.gputime.suspend_trial starts it, is sent its channels with their descriptor, as
 * an arbiter is, and suspends them from outside. Then it requests the count, byte by byte. The first GPU that CUDA shows is tried.
 * With TANGRAM_TRIAL_CHECK_MIB in the environment it first copies so much to the GPU and back, and compares: a GPU that does not keep it is faulty.
 * The driver's libraries are loaded from FOLDER, by path: the folder may be a host's, with another libc beside them.
 *
 *   sends      channels CLIENT SUBDEVICE CHANNEL...      once, with the descriptor, when the count moves; else  cannot WHY or faulty WHY
 *   answers    a packet of any bytes with the count in decimal
 *   ends       when the other side hangs up: the kernel stops, even if it was not resumed, as a process's channels end with it
 */
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../src/gputime/forms.h"

enum { START_MS = 5000, KERNEL_US = 30000000, PACKET = 2048, MOST_CHECK_MIB = 1024 };

/* One thread counts until `stop`, which stands behind the count, is not 0, or the time is over. Real PTX, for every driver since
 * 535; the fake driver reads the comment. The fence keeps what was counted before a suspend from arriving after it. */
static const char code[] =
    "//fake trial us=param1 counter=param0\n"
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry trial(.param .u64 at, .param .u32 limit)\n{\n"
    "  .reg .pred %p<3>;\n  .reg .b32 %r<4>;\n  .reg .b64 %d<6>;\n"
    "  ld.param.u64 %d0, [at];\n  cvta.to.global.u64 %d0, %d0;\n"
    "  ld.param.u32 %r0, [limit];\n  cvt.u64.u32 %d1, %r0;\n  mul.lo.u64 %d1, %d1, 1000;\n"
    "  mov.u64 %d2, %globaltimer;\n  add.u64 %d1, %d1, %d2;\n  mov.u32 %r1, 0;\n"
    "again:\n"
    "  add.u32 %r1, %r1, 1;\n  st.volatile.global.u32 [%d0], %r1;\n  membar.sys;\n"
    "  ld.volatile.global.u32 %r2, [%d0+4];\n  setp.ne.u32 %p0, %r2, 0;\n  @%p0 bra done;\n"
    "  mov.u64 %d3, %globaltimer;\n  setp.lt.u64 %p1, %d3, %d1;\n  @%p1 bra again;\n"
    "done:\n  ret;\n}\n";

static struct objects objects;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards `objects` */
static bool forgot;                                      /* an object could not be remembered */

/* The driver library calls this one, as the program stands before libc where names are looked up. */
__attribute__((visibility("default"))) int ioctl(int fd, unsigned long request, ...)
{
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    int (*next)(int, unsigned long, ...);
    void *found = dlsym(RTLD_NEXT, "ioctl");
    memcpy(&next, &found, sizeof next);
    int rc = found != NULL ? next(fd, request, argument) : (int)syscall(SYS_ioctl, fd, request, argument);
    int saved = errno;
    const struct form form = rc < 0 ? (struct form){0} : form_read(fd, request, argument);
    pthread_mutex_lock(&lock);
    if (form.kind == FORM_ALLOC && objects_follow(form.object.object_class))
        forgot |= !objects_add(&objects, form.object);
    else if (form.kind == FORM_FREE)
        objects_remove(&objects, form.object.client, form.object.handle);
    pthread_mutex_unlock(&lock);
    errno = saved;
    return rc;
}

/* With `fd` too, unless it is -1. */
static void send_line(int sock, const char *line, int fd)
{
    union {
        struct cmsghdr header;
        char buffer[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec part = {.iov_base = (void *)(uintptr_t)line, .iov_len = strlen(line)};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        control.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    }
    if (sendmsg(sock, &message, MSG_NOSIGNAL) < 0)
        _exit(1);
}

_Noreturn static void cannot(int sock, const char *what, int code_of)
{
    char line[256];
    snprintf(line, sizeof line, code_of ? "cannot %s failed with CUDA error %d" : "cannot %s", what, code_of);
    send_line(sock, line, -1);
    _exit(1);
}

static void *library;

/* A function of the driver library, put where `at` points: each call below has its own type. */
static void find(int sock, const char *name, void *at, size_t bytes)
{
    void *found = dlsym(library, name);
    if (found == NULL)
        cannot(sock, "the driver library lacks a function that the trial needs", 0);
    memcpy(at, &found, bytes);
}

#define CALL(name, types, ...)                                                                                                     \
    do {                                                                                                                           \
        int(*call_) types;                                                                                                         \
        find(sock, name, &call_, sizeof call_);                                                                                    \
        int code_ = call_(__VA_ARGS__);                                                                                            \
        if (code_ != 0)                                                                                                            \
            cannot(sock, name, code_);                                                                                             \
    } while (0)

/* A copy that fails is the GPU's fault; memory that cannot be allocated is not: others may have it. */
#define COPY(name, types, ...)                                                                                                     \
    do {                                                                                                                           \
        int(*call_) types;                                                                                                         \
        find(sock, name, &call_, sizeof call_);                                                                                    \
        int code_ = call_(__VA_ARGS__);                                                                                            \
        if (code_ != 0)                                                                                                            \
            faulty(sock, name " failed with CUDA error", (size_t)code_);                                                           \
    } while (0)

_Noreturn static void faulty(int sock, const char *what, size_t number)
{
    char line[256];
    snprintf(line, sizeof line, "faulty %s %zu", what, number);
    send_line(sock, line, -1);
    _exit(1);
}

/* Two patterns, so that each bit is 0 once and 1 once; each word differs from its neighbours. */
static void check_memory(int sock, size_t bytes)
{
    uint64_t at;
    size_t words = bytes / sizeof(uint32_t);
    uint32_t *sent = malloc(bytes), *back = malloc(bytes);
    if (sent == NULL || back == NULL)
        cannot(sock, "the host has no memory for the self-test", 0);
    CALL("cuMemAlloc_v2", (uint64_t *, size_t), &at, bytes);
    for (uint32_t flip = 0; flip < 2; flip++) {
        for (size_t i = 0; i < words; i++)
            sent[i] = ((uint32_t)i * 2654435761U) ^ (0U - flip);
        memset(back, 0, bytes);
        COPY("cuMemcpyHtoD_v2", (uint64_t, const void *, size_t), at, sent, bytes);
        COPY("cuMemcpyDtoH_v2", (void *, uint64_t, size_t), back, at, bytes);
        for (size_t i = 0; i < words; i++)
            if (back[i] != sent[i])
                faulty(sock, "memory does not keep what is copied to it: first at byte", i * sizeof(uint32_t));
    }
    COPY("cuMemFree_v2", (uint64_t), at);
    free(sent);
    free(back);
}

static size_t bytes_to_check(void)
{
    const char *text = getenv("TANGRAM_TRIAL_CHECK_MIB");
    unsigned long mib = text != NULL ? strtoul(text, NULL, 10) : 0;
    return mib > MOST_CHECK_MIB ? (size_t)MOST_CHECK_MIB << 20 : (size_t)mib << 20;
}

static volatile uint32_t *count_on_gpu(int sock)
{
    int device;
    void *context, *module, *function, *host;
    uint64_t at;
    uint32_t limit = KERNEL_US;
    void *parameters[] = {&at, &limit};
    CALL("cuInit", (unsigned), 0);
    CALL("cuDeviceGet", (int *, int), &device, 0);
    CALL("cuCtxCreate_v2", (void **, unsigned, int), &context, 0, device);
    if (bytes_to_check() > 0)
        check_memory(sock, bytes_to_check());
    CALL("cuMemHostAlloc", (void **, size_t, unsigned), &host, 2 * sizeof(uint32_t), 2); /* mapped for the GPU */
    memset(host, 0, 2 * sizeof(uint32_t));
    CALL("cuMemHostGetDevicePointer_v2", (uint64_t *, void *, unsigned), &at, host, 0);
    CALL("cuModuleLoadData", (void **, const void *), &module, code);
    CALL("cuModuleGetFunction", (void **, void *, const char *), &function, module, "trial");
    CALL("cuLaunchKernel",
         (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **),
         function, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL);
    return host;
}

/* The compute channels of the one context, as they would be reported to an arbiter. */
static void send_channels(int sock)
{
    pthread_mutex_lock(&lock);
    for (size_t at = 0; at < objects.count; at++) {
        const struct object *device = &objects.object[at];
        uint32_t channel[RM_CHANNELS];
        if (device->object_class != RM_DEVICE)
            continue;
        size_t count = objects_channels(&objects, device->client, device->handle, ENGINE_COMPUTE, channel);
        const struct object *subdevice = objects_subdevice(&objects, device->client, device->handle);
        if (subdevice == NULL || count == 0)
            continue;
        if (count > RM_CHANNELS || forgot)
            break;
        char line[PACKET];
        int used = snprintf(line, sizeof line, "channels %" PRIu32 " %" PRIu32, device->client, subdevice->handle);
        for (size_t i = 0; i < count; i++)
            used += snprintf(line + used, sizeof line - (size_t)used, " %" PRIu32, channel[i]);
        send_line(sock, line, subdevice->fd);
        pthread_mutex_unlock(&lock);
        return;
    }
    pthread_mutex_unlock(&lock);
    cannot(sock, "no compute channels were seen, so no layout of this driver's RM_ALLOC is known", 0);
}

static void wait_for_count(int sock, const volatile uint32_t *count)
{
    for (int waited = 0; *count == 0; waited++) {
        if (waited == START_MS)
            cannot(sock, "the kernel does not begin to count", 0);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

static void *load(const char *folder, const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s%s%s", folder != NULL ? folder : "", folder != NULL ? "/" : "", name);
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

int main(int argc, char **argv)
{
    int sock = argc == 2 || argc == 3 ? atoi(argv[1]) : -1;
    if (sock <= 2) {
        fprintf(stderr, "tangram-trial: usage: tangram-trial SOCKET [FOLDER] (SOCKET is an open descriptor: see arbiter/gputime/suspend_trial.py)\n");
        return 2;
    }
    const char *folder = argc == 3 ? argv[2] : NULL;
    if (folder != NULL) /* the driver requests its compiler by name, and is answered with what is loaded already */
        load(folder, "libnvidia-ptxjitcompiler.so.1");
    library = load(folder, "libcuda.so.1");
    if (library == NULL) {
        char line[512];
        snprintf(line, sizeof line, "cannot the driver library cannot be loaded: %s", dlerror());
        send_line(sock, line, -1);
        return 1;
    }
    volatile uint32_t *count = count_on_gpu(sock);
    wait_for_count(sock, count);
    send_channels(sock);
    char requested[16], line[16];
    while (recv(sock, requested, sizeof requested, 0) > 0) {
        snprintf(line, sizeof line, "%" PRIu32, count[0]);
        send_line(sock, line, -1);
    }
    count[1] = 1;
    _exit(0);
}
