/* activity.c - when this process has work for the GPU, and when it has none.
 *
 * Work begins with the first launch, asynchronous copy or fill after idleness: the arbiter is told before the call, so that who
 * is in the way can be suspended meanwhile. Work has ended when a synchronising call returned and no stream has anything left;
 * streams that were not waited for are asked. Every launch counts up its stream's number, which is a full barrier: a launch
 * either sees that the arbiter believes us idle and tells it, or is seen by the one who is about to say so.
 *
 * Each context has a default stream of its own, and a context may lie on another card: what is known of one says nothing of another.
 * Nothing is asked while the calling thread or the stream captures: that would end the capture. Work that nobody waits for is
 * found by the thread of turn.c, which looks while we are told to work and nothing is launched.
 */
#include <string.h>

#include "hook.h"
#include "launching.h"
#include "memory.h"

enum {
    IDLE_GAP_US = 1000,  /* specified */
    CONTEXTS_ASKED = 128 /* guessed; a process with more is idle when it waited for all it launched */
};

static struct activity *const activity_ = &tangram.activity;

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
    struct quiet quiet = quiet_begin();
    turn_meet();
    pthread_mutex_lock(&activity_->telling);
    if (!atomic_load(&tangram.hot.told)) {
        atomic_store(&tangram.hot.told, true);
        turn_activity(WIRE_WORK, 0);
    }
    pthread_mutex_unlock(&activity_->telling);
    capture_tell(); /* a context that was made since the last time has its channels by now */
    quiet_end(quiet);
}

/* What waits here is counted and not yet the driver's: a stream that has nothing left says nothing of it. */
static void wait_at_gate(struct stream_name name)
{
    struct quiet quiet = quiet_begin();
    atomic_fetch_add(&activity_->waiting, 1);
    turn_wait_for_gate();
    atomic_fetch_add(&stream_place(name)->launches, 1); /* the first count may have been taken for done meanwhile */
    atomic_fetch_sub(&activity_->waiting, 1);
    quiet_end(quiet);
}

void activity_launched(struct stream_name name)
{
    if (!atomic_load_explicit(&tangram.hot.told, memory_order_relaxed))
        tell_work();
    if (turn_gated())
        wait_at_gate(name);
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

/* By the calling thread, in the context that it has. */
static bool can_be_asked(struct activity_stream *of)
{
    uintptr_t key = atomic_load(&of->key);
    if (!stream_is_default(key))
        return key != 0;
    return (key == STREAM_LEGACY || key == stream_key_of_thread()) && atomic_load(&of->context) == stream_context_now();
}

/* Has the stream nothing left? */
static bool stream_done(struct activity_stream *of)
{
    uint64_t launches = atomic_load(&of->launches);
    if (launches == atomic_load(&of->clean))
        return true;
    if (!can_be_asked(of))
        return false;
    uintptr_t key = atomic_load(&of->key);
    CUstream stream = stream_is_default(key) && key != STREAM_LEGACY ? (CUstream)2 : (CUstream)key;
    if (is_capturing(stream) || tangram.driver.cuStreamQuery(stream) != CUDA_SUCCESS)
        return false;
    clean_up_to(of, launches);
    return true;
}

/* In the calling thread's context; `context`: all that lies in it is asked, and else no more than needed for a no. Capturing
 * elsewhere does not mind a question that is asked in relaxed mode. */
static bool all_done(CUcontext context)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    bool exchanged = tangram.driver.cuThreadExchangeStreamCaptureMode != NULL &&
                     tangram.driver.cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS;
    struct activity_stream *of;
    bool done = is_clean(&activity_->crowded);
    stream_context_check();
    EACH_STREAM(of)
        if (done || (context != NULL && atomic_load(&of->context) == context))
            done = stream_done(of) && done;
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
    if (atomic_load(&tangram.hot.told) && atomic_load(&activity_->waiting) == 0 && !too_soon()) {
        atomic_store(&tangram.hot.told, false);
        if (all_clean())
            turn_activity(WIRE_IDLE, 0);
        else
            atomic_store(&tangram.hot.told, true);
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

static void ask(CUcontext context)
{
    if (!atomic_load_explicit(&tangram.hot.told, memory_order_relaxed))
        return;
    struct quiet quiet = quiet_begin();
    if (all_done(context))
        tell_idle();
    quiet_end(quiet);
}

void activity_something_synced(void)
{
    ask(NULL);
}

struct activity_before activity_sync_begins(CUstream stream, int ptds)
{
    if (!atomic_load_explicit(&tangram.hot.told, memory_order_relaxed))
        return (struct activity_before){0};
    stream_context_check();
    struct activity_stream *of = stream_find(stream_name(stream, ptds));
    return of == NULL ? (struct activity_before){0} : (struct activity_before){of, atomic_load(&of->launches)};
}

void activity_stream_synced(struct activity_before before)
{
    if (before.of != NULL)
        clean_up_to(before.of, before.launches);
    activity_something_synced();
}

struct activity_before activity_context_sync_begins(void)
{
    if (!atomic_load_explicit(&tangram.hot.told, memory_order_relaxed) || contexts_list(NULL, 0) != 1)
        return (struct activity_before){0}; /* the crowd may be another context's */
    return (struct activity_before){&activity_->crowded, atomic_load(&activity_->crowded.launches)};
}

void activity_context_synced(struct activity_before before)
{
    if (before.of != NULL)
        clean_up_to(before.of, before.launches);
    ask(stream_context_now());
}

static void end_stream(struct activity_stream *of)
{
    clean_up_to(of, atomic_load(&of->launches));
    atomic_store(&of->context, NULL);
    atomic_store(&of->key, 0);
}

void activity_stream_ends(CUstream stream)
{
    struct activity_stream *of = (uintptr_t)stream > 2 ? stream_find((struct stream_name){(uintptr_t)stream, NULL}) : NULL;
    if (of != NULL)
        end_stream(of);
}

void activity_context_ended(CUcontext context, bool last)
{
    struct activity_stream *of;
    CUcontext named = stream_context_named(context);
    EACH_STREAM(of)
        if (last || (named != NULL && atomic_load(&of->context) == named))
            end_stream(of);
    if (last)
        clean_up_to(&activity_->crowded, atomic_load(&activity_->crowded.launches));
    activity_something_synced();
}

bool activity_is_told(void)
{
    return atomic_load(&tangram.hot.told);
}

/* In a context that our own thread takes: its default stream, and what can be asked in it. */
static bool context_done(CUcontext context)
{
    CUcontext popped;
    if (tangram.driver.cuCtxPushCurrent_v2 == NULL || tangram.driver.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS)
        return false;
    bool done = !is_capturing((CUstream)STREAM_LEGACY) && tangram.driver.cuStreamQuery((CUstream)STREAM_LEGACY) == CUDA_SUCCESS;
    struct activity_stream *of;
    EACH_STREAM(of)
        done = done && (stream_done(of) || stream_is_default(atomic_load(&of->key))); /* another context's is asked there */
    tangram.driver.cuCtxPopCurrent_v2(&popped);
    return done;
}

/* A default stream of a context that is none of these: of one that was not seen being made. */
static bool is_of_none(struct activity_stream *of, const CUcontext *context, size_t count)
{
    bool none = atomic_load(&of->key) == STREAM_LEGACY;
    for (size_t c = 0; c < count; c++)
        none = none && atomic_load(&of->context) != stream_context_named(context[c]);
    return none;
}

/* From our own thread, which has no context: any of ours will do for a stream's handle, and each is asked for its default
 * stream. What lies in a context that is not known is taken for done when all others are. */
static bool contexts_done(void)
{
    struct activity_stream *of;
    uint64_t launches[ACTIVITY_STREAMS];
    CUcontext context[CONTEXTS_ASKED];
    for (unsigned at = 0; at < ACTIVITY_STREAMS; at++)
        launches[at] = atomic_load(&activity_->stream[at].launches);
    size_t count = contexts_list(context, CONTEXTS_ASKED);
    bool done = count > 0 && count <= CONTEXTS_ASKED && is_clean(&activity_->crowded);
    for (size_t c = 0; c < count && done; c++)
        done = context_done(context[c]);
    EACH_STREAM(of)
        if (done && is_of_none(of, context, count))
            clean_up_to(of, launches[of - activity_->stream]);
    return done && all_clean();
}

void activity_look(void)
{
    struct activity_stream *of;
    if (!atomic_load(&tangram.hot.told))
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
    if (atomic_load(&tangram.hot.told))
        turn_activity(WIRE_WORK, 0);
    pthread_mutex_unlock(&activity_->telling);
}

void activity_watch(void)
{
    atomic_store(&tangram.hot.watched, true);
}

void activity_forget(void)
{
    atomic_store(&tangram.hot.watched, false);
    atomic_store(&tangram.hot.told, false);
    memset(activity_, 0, sizeof *activity_);
    activity_->telling = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
