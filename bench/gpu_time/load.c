/* load.c - a container's program: keeps the GPU busy for stated times and prints how long its requests took.
 *
 * One line in, one line of JSON out; run.py drives it. Words may stand in JSON brackets.
 *   calibrate                                        {"per_us": steps of the kernel in a microsecond}
 *   lc N PERIOD_US LAUNCHES KERNEL_US PER_US HINT_US {"us": [...], "at_us": [...]}   N requests, each announced HINT_US ahead,
 *                                                    0 = not; what they took, and when they began by CLOCK_MONOTONIC
 *   start KERNEL_US PER_US [TOGETHER]                {"ok": 1}         kernels back to back from now on; TOGETHER = 1: cooperative ones
 *   count                                            {"done": n, "ended_at_s": when the last of them ended, "at_s": now}
 *   stop                                             the same
 *   check SECONDS KERNEL_US PER_US                   {"kernels": n, "wrong": m}   sums compared with what they must be
 *   section | end                                    {"sent": 0 or -1}  tangram_begin, tangram_end
 *   copy MIB                                         {"ok": 1}         copies to and from the GPU at once from now on; count and stop count pairs
 *   carry SECONDS MIB                                {"rounds": n, "wrong": m}    so much to the GPU and, at once, that of the round before
 *                                                    back; rounds in which the first word of a page was not as sent
 *   moves N PERIOD_US KIB KERNEL_US PER_US HINT_US   the same: so much in, a kernel, so much out
 *
 * The kernel fills the GPU and counts steps, not a clock: time in which it is suspended does not count. Each thread steps a
 * generator x = a x + c in a register and adds it up in shared memory, so that both are lost if a suspend loses anything.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "load_driver.h"

enum { PAGE = 4096, THREADS = 256, BLOCKS_PER_SM = 8, QUEUED = 4, SPIN_US = 60, A = 1664525, C = 1013904223 };

static void *function, *context;
static unsigned blocks, together; /* of a kernel; of a cooperative one, all of whose blocks must fit at once */
static uint64_t out;
static atomic_bool busy;
static struct {
    pthread_mutex_t lock;
    unsigned long count;
    double ended_at_us;
} done = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_t worker;
static struct {
    uint32_t us, per_us;
    bool together;
} work;

static void need(int rc, const char *what)
{
    if (rc != 0) {
        fprintf(stderr, "load: %s answered %d\n", what, rc);
        exit(1);
    }
}

static void take(void *library, const char *name, void *slot)
{
    void *at = dlsym(library, name);
    if (at == NULL && library != RTLD_DEFAULT)
        need(-1, name);
    memcpy(slot, &at, sizeof at);
}

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

/* The last microseconds without sleep, so that the processor is awake. */
static void sleep_until(double at_us)
{
    double sleep_us = at_us - now_us() - SPIN_US;
    if (sleep_us > 0) {
        struct timespec pause = {(time_t)(sleep_us / 1e6), (long)(sleep_us * 1e3) % 1000000000};
        nanosleep(&pause, NULL);
    }
    while (now_us() < at_us)
        continue;
}

static void run(uint32_t us, uint32_t per_us)
{
    void *parameters[] = {&us, &per_us, &out};
    need(launch(function, blocks, 1, 1, THREADS, 1, 1, 0, NULL, parameters, NULL), "cuLaunchKernel");
}

static void run_together(uint32_t us, uint32_t per_us)
{
    void *parameters[] = {&us, &per_us, &out};
    need(launch_together(function, together, 1, 1, THREADS, 1, 1, 0, NULL, parameters), "cuLaunchCooperativeKernel");
}

static void start_up(void)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), *module;
    int sms = 0, threads = 0;
    if (cuda == NULL)
        need(-1, dlerror());
    take(cuda, "cuInit", &init);
    take(cuda, "cuDevicePrimaryCtxSetFlags_v2", &flags);
    take(cuda, "cuDevicePrimaryCtxRetain", &retain);
    take(cuda, "cuCtxSetCurrent", &use);
    take(cuda, "cuModuleLoadData", &load);
    take(cuda, "cuModuleGetFunction", &get_function);
    take(cuda, "cuDeviceGetAttribute", &attribute);
    take(cuda, "cuMemAlloc_v2", &allocate);
    take(cuda, "cuMemcpyDtoH_v2", &fetch);
    take(cuda, "cuMemHostAlloc", &host_allocate);
    take(cuda, "cuStreamCreate", &stream_create);
    take(cuda, "cuMemcpyHtoDAsync_v2", &copy_in);
    take(cuda, "cuMemcpyDtoHAsync_v2", &copy_out);
    take(cuda, "cuEventCreate", &event_create);
    take(cuda, "cuEventRecord", &event_record);
    take(cuda, "cuEventSynchronize", &event_wait);
    take(cuda, "cuStreamSynchronize", &stream_wait);
    take(cuda, "cuLaunchKernel", &launch);
    take(cuda, "cuLaunchCooperativeKernel", &launch_together);
    take(RTLD_DEFAULT, "tangram_hint", &hint);
    take(RTLD_DEFAULT, "tangram_begin", &begin);
    take(RTLD_DEFAULT, "tangram_end", &end);
    need(init(0), "cuInit");
    flags(0, 1); /* waits spin */
    need(retain(&context, 0), "cuDevicePrimaryCtxRetain");
    need(use(context), "cuCtxSetCurrent");
    need(load(&module, ptx), "cuModuleLoadData");
    need(get_function(&function, module, "spin"), "cuModuleGetFunction");
    need(attribute(&sms, 16, 0), "cuDeviceGetAttribute");
    need(attribute(&threads, 39, 0), "cuDeviceGetAttribute"); /* of a multiprocessor at once */
    blocks = (unsigned)(sms > 0 ? sms : 1) * BLOCKS_PER_SM;
    together = threads / THREADS < BLOCKS_PER_SM ? blocks / BLOCKS_PER_SM * (unsigned)(threads / THREADS) : blocks;
    need(allocate(&out, (size_t)blocks * THREADS * 8), "cuMemAlloc");
    run(1, 1);
    need(stream_wait(NULL), "cuStreamSynchronize");
}

static void calibrate(void)
{
    double took = 0;
    for (int round = 0; round < 3; round++) { /* the first ones wake the clocks */
        double began = now_us();
        run(20000, 20);
        need(stream_wait(NULL), "cuStreamSynchronize");
        took = now_us() - began;
    }
    printf("{\"per_us\": %.0f}\n", 20 * 20000 / took < 1 ? 1 : 20 * 20000 / took);
}

/* Memory on both sides, once for a program. */
static struct {
    size_t bytes;
    uint64_t in, out; /* on the GPU */
    void *from, *to;  /* pinned */
} buffers;

static void grow_buffers(size_t bytes)
{
    if (bytes <= buffers.bytes)
        return;
    need(allocate(&buffers.in, bytes), "cuMemAlloc");
    need(allocate(&buffers.out, bytes), "cuMemAlloc");
    need(host_allocate(&buffers.from, bytes, 0), "cuMemHostAlloc");
    need(host_allocate(&buffers.to, bytes, 0), "cuMemHostAlloc");
    memset(buffers.from, 1, bytes);
    buffers.bytes = bytes;
}

static void one_request(const double *given, bool moves)
{
    size_t bytes = moves ? (size_t)given[2] * 1024 : 0;
    if (moves)
        need(copy_in(buffers.in, buffers.from, bytes, NULL), "cuMemcpyHtoDAsync");
    for (int one = 0; one < (moves ? 1 : (int)given[2]); one++)
        run((uint32_t)given[3], (uint32_t)given[4]);
    if (moves)
        need(copy_out(buffers.to, buffers.out, bytes, NULL), "cuMemcpyDtoHAsync");
    need(stream_wait(NULL), "cuStreamSynchronize");
}

static void list(const double *numbers, int count)
{
    for (int i = 0; i < count; i++)
        printf("%s%.1f", i == 0 ? "" : ", ", numbers[i]);
}

static void requests(const double *given, bool moves)
{
    int count = (int)given[0];
    if (moves)
        grow_buffers((size_t)given[2] * 1024);
    double period = given[1], ahead = given[5], at = now_us() + 20000;
    double *took = calloc((size_t)count + 1, sizeof *took), *begins = calloc((size_t)count + 1, sizeof *begins);
    for (int i = 0; i < count; i++, at += period) {
        if (ahead > 0 && hint != NULL) {
            sleep_until(at - ahead);
            hint((uint64_t)ahead);
        }
        sleep_until(at);
        begins[i] = now_us();
        one_request(given, moves);
        took[i] = now_us() - begins[i];
        if (ahead > 0 && end != NULL)
            end();
        if (now_us() > at + period) /* late: the next one comes a period from now */
            at = now_us();
    }
    printf("{\"us\": [");
    list(took, count);
    printf("], \"at_us\": [");
    list(begins, count);
    printf("]}\n");
    free(took);
    free(begins);
}

static void have_done(unsigned long count)
{
    pthread_mutex_lock(&done.lock);
    done.count += count;
    done.ended_at_us = now_us();
    pthread_mutex_unlock(&done.lock);
}

static void *keep_busy(void *unused)
{
    void *events[QUEUED];
    need(use(context), "cuCtxSetCurrent");
    for (int i = 0; i < QUEUED; i++)
        need(event_create(&events[i], 3), "cuEventCreate"); /* a wait sleeps; no timing */
    unsigned long queued = 0, ended = 0;
    while (atomic_load(&busy) || ended < queued) {
        for (; atomic_load(&busy) && queued < ended + QUEUED; queued++) {
            (work.together ? run_together : run)(work.us, work.per_us);
            need(event_record(events[queued % QUEUED], NULL), "cuEventRecord");
        }
        if (ended < queued) {
            need(event_wait(events[ended++ % QUEUED]), "cuEventSynchronize");
            have_done(1);
        }
    }
    return unused;
}

static void *keep_copying(void *unused)
{
    void *streams[2];
    need(use(context), "cuCtxSetCurrent");
    for (int i = 0; i < 2; i++)
        need(stream_create(&streams[i], 1), "cuStreamCreate");
    while (atomic_load(&busy)) { /* both directions at once, two of each queued */
        for (int i = 0; i < 2; i++) {
            need(copy_in(buffers.in, buffers.from, buffers.bytes, streams[0]), "cuMemcpyHtoDAsync");
            need(copy_out(buffers.to, buffers.out, buffers.bytes, streams[1]), "cuMemcpyDtoHAsync");
        }
        for (int i = 0; i < 2; i++)
            need(stream_wait(streams[i]), "cuStreamSynchronize");
        have_done(2);
    }
    return unused;
}

static void begin_work(void *(*loop)(void *))
{
    atomic_store(&busy, true);
    have_done(0);
    need(pthread_create(&worker, NULL, loop, NULL), "pthread_create");
    printf("{\"ok\": 1}\n");
}

static void report(void)
{
    pthread_mutex_lock(&done.lock);
    printf("{\"done\": %lu, \"ended_at_s\": %.6f, \"at_s\": %.6f}\n", done.count, done.ended_at_us / 1e6, now_us() / 1e6);
    pthread_mutex_unlock(&done.lock);
}

/* (x, sum) after n steps from (x0, 0) are affine in x0: x = p x0 + q, sum = r x0 + s. Doubling, modulo 2^32. */
struct steps {
    uint32_t p, q, r, s;
};

static struct steps then(struct steps one, struct steps next)
{
    return (struct steps){next.p * one.p, next.p * one.q + next.q, one.r + next.r * one.p, one.s + next.r * one.q + next.s};
}

static struct steps after(uint32_t n)
{
    struct steps all = {1, 0, 0, 0}, power = {A, C, A, C};
    for (; n > 0; n >>= 1, power = then(power, power))
        if (n & 1)
            all = then(all, power);
    return all;
}

static void check(double seconds, uint32_t us, uint32_t per_us)
{
    size_t count = (size_t)blocks * THREADS;
    uint32_t(*seen)[2] = malloc(count * 8);
    unsigned long kernels = 0, wrong = 0;
    for (double until = now_us() + seconds * 1e6; now_us() < until; kernels++) {
        uint32_t mine = us + (uint32_t)kernels; /* never twice the same answer */
        struct steps must = after(mine * per_us);
        run(mine, per_us);
        need(fetch(seen, out, count * 8), "cuMemcpyDtoH");
        size_t bad = 0;
        for (uint32_t i = 0; i < count; i++)
            bad += seen[i][0] != must.p * i + must.q || seen[i][1] != must.r * i + must.s;
        wrong += bad > 0;
    }
    printf("{\"kernels\": %lu, \"wrong\": %lu}\n", kernels, wrong);
    free(seen);
}

/* The first word of each page identifies the round and the page. */
static bool is_of(uint64_t *words, size_t bytes, uint64_t round, bool make)
{
    bool right = true;
    for (size_t at = 0; at < bytes / 8; at += PAGE / 8) {
        uint64_t must = round << 32 | at;
        if (make)
            words[at] = must;
        right = right && words[at] == must;
    }
    return right;
}

static void carry(double seconds, size_t bytes)
{
    unsigned long rounds = 0, wrong = 0;
    void *streams[2];
    grow_buffers(bytes);
    for (int i = 0; i < 2; i++)
        need(stream_create(&streams[i], 1), "cuStreamCreate");
    for (double until = now_us() + seconds * 1e6; now_us() < until || rounds < 2; rounds++) {
        uint64_t there = rounds % 2 ? buffers.out : buffers.in, before = rounds % 2 ? buffers.in : buffers.out;
        is_of(buffers.from, bytes, rounds, true);
        need(copy_in(there, buffers.from, bytes, streams[0]), "cuMemcpyHtoDAsync");
        if (rounds > 0)
            need(copy_out(buffers.to, before, bytes, streams[1]), "cuMemcpyDtoHAsync");
        for (int i = 0; i < 2; i++)
            need(stream_wait(streams[i]), "cuStreamSynchronize");
        wrong += rounds > 0 && !is_of(buffers.to, bytes, rounds - 1, false);
    }
    printf("{\"rounds\": %lu, \"wrong\": %lu}\n", rounds, wrong);
}

static void obey(const char *word, const double *given)
{
    if (strcmp(word, "calibrate") == 0)
        calibrate();
    else if (strcmp(word, "lc") == 0)
        requests(given, false);
    else if (strcmp(word, "moves") == 0)
        requests(given, true);
    else if (strcmp(word, "start") == 0) {
        work.us = (uint32_t)given[0], work.per_us = (uint32_t)given[1], work.together = given[2] != 0;
        begin_work(keep_busy);
    } else if (strcmp(word, "copy") == 0) {
        grow_buffers((size_t)given[0] << 20);
        begin_work(keep_copying);
    } else if (strcmp(word, "count") == 0)
        report();
    else if (strcmp(word, "stop") == 0) {
        atomic_store(&busy, false);
        pthread_join(worker, NULL);
        report();
    } else if (strcmp(word, "check") == 0)
        check(given[0], (uint32_t)given[1], (uint32_t)given[2]);
    else if (strcmp(word, "carry") == 0)
        carry(given[0], (size_t)given[1] << 20);
    else if (strcmp(word, "section") == 0)
        printf("{\"sent\": %d}\n", begin == NULL ? -1 : begin());
    else if (strcmp(word, "end") == 0)
        printf("{\"sent\": %d}\n", end == NULL ? -1 : end());
    else
        need(-1, word);
    fflush(stdout);
}

int main(void)
{
    char line[256];
    start_up();
    puts("{\"ready\": true}");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) != NULL) {
        double given[8] = {0};
        char *rest = line, *word = strtok_r(line, "[]\", \n", &rest), *next;
        for (int i = 0; i < 8 && (next = strtok_r(NULL, "[]\", \n", &rest)) != NULL; i++)
            given[i] = atof(next);
        if (word != NULL)
            obey(word, given);
    }
    return 0;
}
