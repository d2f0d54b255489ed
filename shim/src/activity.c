/* activity.c - when this process has work for the GPU, and when it has none.
 *
 * Work begins with the first launch, asynchronous copy or fill after idleness: the arbiter is told before the call, so that who
 * is in the way can be suspended meanwhile. Work has ended when a synchronising call returned and no stream has anything left;
 * streams that were not waited for are asked. Every launch counts up its stream's number, which is a full barrier: a launch
 * either sees that the arbiter believes us idle and tells it, or is seen by the one who is about to say so.
 *
 * Nothing is asked while the calling thread or the stream captures: that would end the capture. Work that nobody waits for is
 * found by the thread of turn.c, which looks while we are told to work and nothing is launched.
 */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "hook.h"
#include "memory.h"
#include "tangram.h"

enum { IDLE_GAP_US = 1000 }; /* specified */

static struct activity *const activity_ = &tangram.activity;

/* Per-thread default streams differ from thread to thread, and only their own thread can ask them: an odd key, unlike any handle.
 * The legacy default stream has two names. */
static _Thread_local uint64_t thread_anchor __attribute__((tls_model("initial-exec"))); /* no __tls_get_addr: musl keeps it elsewhere */
#define LEGACY ((uintptr_t)1)

static uintptr_t key_of(CUstream stream, int ptds)
{
    uintptr_t key = (uintptr_t)stream;
    if (key > 2)
        return key;
    return key == 2 || (key == 0 && ptds) ? (uintptr_t)&thread_anchor | 1 : LEGACY;
}

static bool is_of_a_thread(uintptr_t key)
{
    return (key & 1) != 0 && key != LEGACY;
}

static struct activity_stream *place(uintptr_t key, unsigned probe)
{
    unsigned at = (unsigned)((key * UINT64_C(0x9e3779b97f4a7c15)) >> 56) + probe;
    return &activity_->stream[at % ACTIVITY_STREAMS];
}

/* NULL: it has none. */
static struct activity_stream *find(uintptr_t key)
{
    for (unsigned probe = 0; probe < ACTIVITY_PROBES; probe++)
        if (atomic_load_explicit(&place(key, probe)->key, memory_order_relaxed) == key)
            return place(key, probe);
    return NULL;
}

static struct activity_stream *claim(uintptr_t key)
{
    for (unsigned probe = 0; probe < ACTIVITY_PROBES; probe++) {
        struct activity_stream *of = place(key, probe);
        uintptr_t none = 0;
        if (!atomic_compare_exchange_strong(&of->key, &none, key) && none != key)
            continue;
        size_t at = (size_t)(of - activity_->stream);
        atomic_fetch_or(&activity_->used[at / 64], UINT64_C(1) << at % 64);
        return of;
    }
    return &activity_->crowded;
}

static struct activity_stream *stream_of(uintptr_t key)
{
    struct activity_stream *of = place(key, 0);
    if (atomic_load_explicit(&of->key, memory_order_relaxed) == key)
        return of;
    of = find(key);
    return of != NULL ? of : claim(key);
}

#define EACH_STREAM(of)                                                                                                        \
    for (unsigned word_ = 0; word_ < ACTIVITY_STREAMS / 64; word_++)                                                           \
        for (uint64_t bits_ = atomic_load_explicit(&activity_->used[word_], memory_order_relaxed);                             \
             bits_ != 0 && ((of) = &activity_->stream[word_ * 64 + (unsigned)__builtin_ctzll(bits_)], true); bits_ &= bits_ - 1)

static bool is_clean(struct activity_stream *of)
{
    return atomic_load(&of->launches) == atomic_load(&of->clean);
}

static void tell_work(void)
{
    int saved = errno;
    pthread_mutex_lock(&activity_->telling);
    if (!atomic_load(&activity_->told)) {
        atomic_store(&activity_->told, true);
        turn_activity(WIRE_WORK, 0);
    }
    pthread_mutex_unlock(&activity_->telling);
    capture_tell(); /* a context that was made since the last time has its channels by now */
    errno = saved;
}

/* What waits here is counted and not yet the driver's: a stream that has nothing left says nothing of it. */
static void wait_at_gate(uintptr_t key)
{
    atomic_fetch_add(&activity_->waiting, 1);
    turn_wait_for_gate();
    atomic_fetch_add(&stream_of(key)->launches, 1); /* the first count may have been taken for done meanwhile */
    atomic_fetch_sub(&activity_->waiting, 1);
}

void activity_launch(CUstream stream, int ptds)
{
    if (!atomic_load_explicit(&activity_->watched, memory_order_relaxed))
        return;
    atomic_fetch_add(&stream_of(key_of(stream, ptds))->launches, 1);
    if (UNLIKELY(!atomic_load_explicit(&activity_->told, memory_order_relaxed)))
        tell_work();
    if (UNLIKELY(turn_gated(&tangram.turn)))
        wait_at_gate(key_of(stream, ptds));
}

static void clean_up_to(struct activity_stream *of, uint64_t launches)
{
    uint64_t clean = atomic_load(&of->clean);
    while (clean < launches && !atomic_compare_exchange_weak(&of->clean, &clean, launches))
        continue;
}

static bool is_capturing(CUstream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return tangram.driver.cuStreamIsCapturing == NULL || tangram.driver.cuStreamIsCapturing(stream, &status) != CUDA_SUCCESS ||
           status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* Has the stream nothing left? */
static bool stream_done(struct activity_stream *of)
{
    uint64_t launches = atomic_load(&of->launches);
    if (launches == atomic_load(&of->clean))
        return true;
    uintptr_t key = atomic_load(&of->key);
    if (is_of_a_thread(key) && key != key_of(NULL, 1))
        return false;
    CUstream stream = is_of_a_thread(key) ? (CUstream)2 : (CUstream)key;
    if (key == 0 || is_capturing(stream) || tangram.driver.cuStreamQuery(stream) != CUDA_SUCCESS)
        return false;
    clean_up_to(of, launches);
    return true;
}

/* In the calling thread's context. Capturing elsewhere does not mind a question that is asked in relaxed mode. */
static bool all_done(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    bool exchanged = tangram.driver.cuThreadExchangeStreamCaptureMode != NULL &&
                     tangram.driver.cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS;
    struct activity_stream *of;
    bool done = is_clean(&activity_->crowded);
    EACH_STREAM(of)
        done = done && stream_done(of);
    if (exchanged)
        tangram.driver.cuThreadExchangeStreamCaptureMode(&mode);
    return done;
}

static bool all_clean(void)
{
    struct activity_stream *of;
    bool clean = is_clean(&activity_->crowded);
    EACH_STREAM(of)
        clean = clean && is_clean(of);
    return clean;
}

static uint64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* A process that waits after every small kernel would tell of work and idleness thousands of times a second, which costs the
 * arbiter processor time. Who is not latency-critical tells IDLE once in IDLE_GAP_US; else the thread of turn.c tells it then,
 * if it is still true. Held: telling. */
static bool too_soon(void)
{
    uint64_t now = now_us();
    if (turn_is_urgent() || now - activity_->idle_told_us >= IDLE_GAP_US) {
        activity_->idle_told_us = now;
        atomic_store(&activity_->idle_later, false);
        return false;
    }
    atomic_store(&activity_->idle_later, true);
    return true;
}

/* All streams were done a moment ago. `told` falls before the last look, so that a launch in between is seen by one of us. */
static void tell_idle(void)
{
    pthread_mutex_lock(&activity_->telling);
    if (atomic_load(&activity_->told) && atomic_load(&activity_->waiting) == 0 && !too_soon()) {
        atomic_store(&activity_->told, false);
        if (all_clean())
            turn_activity(WIRE_IDLE, 0);
        else
            atomic_store(&activity_->told, true);
    }
    pthread_mutex_unlock(&activity_->telling);
}

bool activity_tell_later(void)
{
    if (!atomic_exchange(&activity_->idle_later, false))
        return false;
    if (all_clean())
        tell_idle();
    return true;
}

void activity_something_synced(void)
{
    if (!atomic_load_explicit(&activity_->told, memory_order_relaxed))
        return;
    int saved = errno;
    if (all_done())
        tell_idle();
    errno = saved;
}

struct activity_before activity_sync_begins(CUstream stream, int ptds)
{
    if (!atomic_load_explicit(&activity_->told, memory_order_relaxed))
        return (struct activity_before){0};
    struct activity_stream *of = find(key_of(stream, ptds));
    return of == NULL ? (struct activity_before){0} : (struct activity_before){of, atomic_load(&of->launches)};
}

void activity_stream_synced(struct activity_before before)
{
    if (before.of != NULL)
        clean_up_to(before.of, before.launches);
    activity_something_synced();
}

void activity_context_synced(void)
{
    if (contexts_list(NULL, 0) == 1) /* else the crowd may be another's */
        clean_up_to(&activity_->crowded, atomic_load(&activity_->crowded.launches));
    activity_something_synced();
}

static void end_stream(struct activity_stream *of)
{
    clean_up_to(of, atomic_load(&of->launches));
    atomic_store(&of->key, 0);
}

void activity_stream_ends(CUstream stream)
{
    struct activity_stream *of = (uintptr_t)stream > 2 ? find((uintptr_t)stream) : NULL;
    if (of != NULL)
        end_stream(of);
}

void activity_streams_end(void)
{
    struct activity_stream *of;
    EACH_STREAM(of)
        end_stream(of);
    clean_up_to(&activity_->crowded, atomic_load(&activity_->crowded.launches));
    activity_something_synced();
}

bool activity_is_told(void)
{
    return atomic_load(&activity_->told);
}

/* From our own thread, which has no context: any of ours will do for a stream's handle, and each is asked for its default stream. */
static bool contexts_done(void)
{
    struct activity_stream *of, *legacy = find(LEGACY);
    uint64_t launches = legacy == NULL ? 0 : atomic_load(&legacy->launches);
    CUcontext context[16], popped;
    size_t count = contexts_list(context, sizeof context / sizeof *context);
    bool done = count > 0 && is_clean(&activity_->crowded);
    for (size_t c = 0; c < count && done; c++) {
        if (tangram.driver.cuCtxPushCurrent_v2 == NULL || tangram.driver.cuCtxPushCurrent_v2(context[c]) != CUDA_SUCCESS)
            return false;
        done = !is_capturing((CUstream)LEGACY) && tangram.driver.cuStreamQuery((CUstream)LEGACY) == CUDA_SUCCESS;
        if (c == 0)
            EACH_STREAM(of)
                done = done && (of == legacy || stream_done(of));
        tangram.driver.cuCtxPopCurrent_v2(&popped);
    }
    if (done && legacy != NULL)
        clean_up_to(legacy, launches);
    return done;
}

void activity_look(void)
{
    struct activity_stream *of;
    if (!atomic_load(&activity_->told))
        return;
    uint64_t launches = 0;
    EACH_STREAM(of)
        launches += atomic_load(&of->launches);
    bool quiet = launches == activity_->looked_at;
    activity_->looked_at = launches;
    if (!quiet) /* who launches will also wait, mostly */
        return;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (tangram.driver.cuThreadExchangeStreamCaptureMode != NULL)
        tangram.driver.cuThreadExchangeStreamCaptureMode(&mode); /* this thread is ours: it stays so */
    if (contexts_done())
        tell_idle();
}

void activity_arbiter_is_new(void)
{
    pthread_mutex_lock(&activity_->telling);
    if (atomic_load(&activity_->told))
        turn_activity(WIRE_WORK, 0);
    pthread_mutex_unlock(&activity_->telling);
}

void activity_watch(void)
{
    atomic_store(&activity_->watched, true);
}

void activity_forget(void)
{
    memset(activity_, 0, sizeof *activity_);
    activity_->telling = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

/* The hooks. */

#define INTO_STREAM(name, ptds, stream, params, ...)                                                                           \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        activity_launch(stream, ptds);                                                                                         \
        return tangram.driver.name(__VA_ARGS__);                                                                               \
    }
#define BOTH(name, stream, params, ...)                                                                                        \
    INTO_STREAM(name, 0, stream, params, __VA_ARGS__)                                                                          \
    INTO_STREAM(name##_ptsz, 1, stream, params, __VA_ARGS__)

#define LAUNCH_PARAMS                                                                                                          \
    (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz, \
     unsigned int shared, CUstream stream, void **parameters, void **extra)
#define COOPERATIVE_PARAMS                                                                                                     \
    (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz, \
     unsigned int shared, CUstream stream, void **parameters)

BOTH(cuLaunchKernel, stream, LAUNCH_PARAMS, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra)
BOTH(cuLaunchCooperativeKernel, stream, COOPERATIVE_PARAMS, function, gx, gy, gz, bx, by, bz, shared, stream, parameters)
BOTH(cuLaunchKernelEx, how == NULL ? NULL : how->hStream, (const CUlaunchConfig *how, CUfunction function, void **parameters, void **extra),
     how, function, parameters, extra)

BOTH(cuMemcpyAsync, stream, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), to, from, bytes, stream)
BOTH(cuMemcpyHtoDAsync_v2, stream, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream), to, from, bytes, stream)
BOTH(cuMemcpyDtoHAsync_v2, stream, (void *to, CUdeviceptr from, size_t bytes, CUstream stream), to, from, bytes, stream)
BOTH(cuMemcpyDtoDAsync_v2, stream, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), to, from, bytes, stream)
BOTH(cuMemsetD8Async, stream, (CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream), to, value, bytes, stream)
BOTH(cuMemsetD16Async, stream, (CUdeviceptr to, unsigned short value, size_t count, CUstream stream), to, value, count, stream)
BOTH(cuMemsetD32Async, stream, (CUdeviceptr to, unsigned int value, size_t count, CUstream stream), to, value, count, stream)

#define ASKS_STREAM(name, ptds)                                                                                                \
    EXPORT CUresult name(CUstream stream)                                                                                      \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct activity_before before = activity_sync_begins(stream, ptds);                                                    \
        CUresult rc = tangram.driver.name(stream);                                                                             \
        if (rc == CUDA_SUCCESS)                                                                                                \
            activity_stream_synced(before);                                                                      \
        return rc;                                                                                                             \
    }
ASKS_STREAM(cuStreamQuery, 0)
ASKS_STREAM(cuStreamQuery_ptsz, 1)

#define WAITS(name, params, ...)                                                                                               \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        CUresult rc = tangram.driver.name(__VA_ARGS__);                                                                        \
        if (rc == CUDA_SUCCESS)                                                                                                \
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

WAITS(cuEventQuery, (CUevent event), event)
WAITS(cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t bytes), to, from, bytes)
WAITS(cuMemcpyDtoH_v2_ptds, (void *to, CUdeviceptr from, size_t bytes), to, from, bytes)

EXPORT int tangram_hint(uint64_t microseconds)
{
    warm_up();
    return turn_activity(WIRE_HINT, microseconds) ? 0 : -1;
}

EXPORT int tangram_begin(void)
{
    warm_up();
    return turn_activity(WIRE_BEGIN_SECTION, 0) ? 0 : -1;
}

EXPORT int tangram_end(void)
{
    return turn_activity(WIRE_END_SECTION, 0) ? 0 : -1;
}

EXPORT int tangram_yield_begin(void)
{
    return turn_activity(WIRE_YIELD, 0) ? 0 : -1;
}

EXPORT int tangram_yield_end(void)
{
    return turn_activity(WIRE_END_YIELD, 0) ? 0 : -1;
}
