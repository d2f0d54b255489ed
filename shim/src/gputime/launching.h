/* launching.h - what every launch does, in line and in as few cache lines as possible; struct hot gives the reason. */
#ifndef TANGRAM_LAUNCHING_H
#define TANGRAM_LAUNCHING_H

#include "process.h"
#include "gputime/streams.h"

/* activity.c: a launch was counted. Reports it, and waits, where that is due. */
void activity_launched(struct stream_name name);
void activity_other_came(void); /* the first launch since idleness was reported that is no kernel */

void activity_waits_for_others(void); /* its kernels may stand behind another process's from now on */

/* Is new work to wait? Only where suspending does not work. */
static inline bool launches_must_wait(void)
{
    struct wire_gpu_time *page = atomic_load_explicit(&tangram.hot.page, memory_order_acquire);
    return page != NULL && atomic_load_explicit(&page->gate, memory_order_relaxed) != 0;
}

/* Is memory being swapped? A call that names an address of it would get an error of the driver's. */
static inline bool launches_must_wait_for_memory(void)
{
    return atomic_load_explicit(&tangram.hot.swapped, memory_order_relaxed);
}

/* Before the driver is called with an address that may be of memory that can be swapped, where that puts no work on the GPU. No lock is held. */
static inline void await_memory(void)
{
    if (UNLIKELY(launches_must_wait_for_memory()))
        activity_await_memory();
}

/* One more launch. A thread that reuses a place reads `last` after it has changed the key, so the key is read again after
 * `last`. The number is the largest that the place has had: work that ended there before does not count as this launch's end. */
static inline void activity_count(struct stream_name name)
{
    struct activity_stream *of = stream_home(name);
    for (;;) {
        if (UNLIKELY(!stream_is_at(of, name)) && (of = stream_place(name)) == NULL) {
            stream_mark(stream_home(name), atomic_fetch_add(&tangram.activity.launches, 1) + 1); /* no memory: it counts with another's */
            return;
        }
        if (stream_mark(of, atomic_fetch_add(&tangram.activity.launches, 1) + 1) && stream_is_at(of, name))
            return;
    }
}

/* Before something is put into a stream. */
static inline void activity_launch(CUstream stream, int ptds)
{
    if (!atomic_load_explicit(&tangram.hot.watched, memory_order_relaxed))
        return;
    struct stream_name name = stream_name(stream, ptds);
    activity_count(name);
    if (UNLIKELY(!atomic_load_explicit(&tangram.hot.work_reported, memory_order_relaxed) || launches_must_wait() || launches_must_wait_for_memory()))
        activity_launched(name);
}

static inline void activity_other_known(void)
{
    if (UNLIKELY(!atomic_load_explicit(&tangram.activity.others, memory_order_relaxed)) &&
        atomic_load_explicit(&tangram.hot.watched, memory_order_relaxed))
        activity_other_came();
}

/* The same of what keeps no multiprocessor busy, or may: copies, fills, waits, graphs. The arbiter must not treat it as done because the
 * driver reports no process that computes. Before the launch, so that one packet reports both; after it, as idleness may have been
 * reported in between. */
static inline void activity_other(CUstream stream, int ptds)
{
    activity_other_known();
    activity_launch(stream, ptds);
    activity_other_known();
}

/* Of this process memory is away, or of another one of its container, or others have the GPU. */
static inline bool channels_are_suspended(void)
{
    struct wire_gpu_time *page = atomic_load_explicit(&tangram.hot.page, memory_order_acquire);
    return launches_must_wait_for_memory() || (page != NULL && atomic_load_explicit(&page->off, memory_order_relaxed) != 0);
}

/* Is a thread in a call that may wait for the channels? One that loads code or makes a stream puts nothing into a stream of the program's, and while they
 * are suspended it may be stuck until they are not: it counts as work then. The driver is not queried: it may hold its locks. */
static inline bool activity_is_inside(void)
{
    return atomic_load(&tangram.activity.waiting) > 0 || (channels_are_suspended() && bounds_inside());
}

/* Of a thread in a call of the driver that counts as work. */
struct activity_call {
    bool watched;
    int cancelling; /* the thread's state */
};

/* Around a call that mostly returns when its work has ended: the driver may put it on the GPU piece by piece, and a query between two finds nothing. The
 * thread is not cancelled in it: it would be counted for ever, and the process would never be idle again. */
static inline struct activity_call activity_call_begins(void)
{
    struct activity_call call = {.watched = atomic_load_explicit(&tangram.hot.watched, memory_order_relaxed)};
    if (call.watched) {
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &call.cancelling);
        atomic_fetch_add(&tangram.activity.waiting, 1);
    }
    return call;
}

static inline void activity_call_ends(struct activity_call call)
{
    if (!call.watched)
        return;
    atomic_fetch_sub(&tangram.activity.waiting, 1);
    pthread_setcancelstate(call.cancelling, NULL);
}

#endif
