/* activity.c - when this process has work for the GPU, and when it has none.
 *
 * Work begins with the first launch, asynchronous copy or fill after idleness. It is reported before the call, so that the arbiter can
 * suspend other containers meanwhile. Work has ended when a synchronising call returned and no stream has anything left; streams that were not
 * waited for are queried (done.c). A context that was waited for is clean up to the launch before the wait began, on all its streams. Every launch
 * has a number, and noting it is a full barrier: a launch either sees that the process is reported idle, and reports work, or is seen by the
 * thread that is about to report idleness.
 *
 * What the arbiter knows is a state, not an event: `work_reported`. A packet that does not fit into the socket leaves it as it was. The next launch or
 * wait tries again, and so does the helper until the packet is sent. What the program announces comes after that: a flood of hints displaces nothing.
 * The end of work that no thread waits for is found by the helper, which checks while work is reported and nothing is launched.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hooks/hook.h"
#include "gputime/launching.h"
#include "memory/memory.h"
#include "memory/pool.h"

enum { IDLE_GAP_US = 1000, /* specified */ STILL_MS = 300, /* guessed: well within the second that the arbiter waits */ INVALID_HANDLE = 400 };

static struct activity *const activity_ = &tangram.activity;

/* For how long there has been unreported work: a process's first launches come before it has connected to the arbiter. */
static uint64_t late(void)
{
    uint64_t us = activity_->began_us == 0 ? 0 : now_us() - activity_->began_us;
    return (us > UINT32_MAX ? UINT32_MAX : us) << WIRE_LATE_SHIFT;
}

/* Called with `reporting` held. What is TIME_LINK_FULL is to be sent again. */
static enum time_link_sent send_activity(enum wire_activity what)
{
    const bool unseen = atomic_load(&activity_->others) || atomic_load(&activity_->foreign);
    const uint64_t kind = unseen || what == WIRE_IDLE ? 0 : WIRE_KERNELS_ONLY;
    const enum time_link_sent sent = time_link_activity(what, what == WIRE_WORK ? kind | late() : kind);
    if (sent == TIME_LINK_FULL)
        atomic_store(&activity_->full, true);
    return sent;
}

/* Called with `reporting` held. An arbiter that is away gets the report when it is back. */
static void send_work(void)
{
    const enum time_link_sent sent = send_activity(WIRE_WORK);
    if (sent == TIME_LINK_SENT)
        activity_->began_us = 0;
    else if (activity_->began_us == 0)
        activity_->began_us = now_us();
    atomic_store(&activity_->unreported, sent == TIME_LINK_FULL);
    atomic_store(&tangram.hot.work_reported, sent != TIME_LINK_FULL);
}

/* Is there work of which the end is to be found? */
static bool is_counted(void)
{
    return atomic_load_explicit(&tangram.hot.work_reported, memory_order_relaxed) || atomic_load_explicit(&activity_->unreported, memory_order_relaxed);
}

static void report_work(void)
{
    struct quiet quiet = quiet_begin();
    time_link_meet();
    pthread_mutex_lock(&activity_->reporting);
    if (!atomic_load(&tangram.hot.work_reported))
        send_work();
    pthread_mutex_unlock(&activity_->reporting);
    capture_report(); /* a context that was made since the last time has its channels by now */
    quiet_end(quiet);
}

void activity_other_came(void)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&activity_->reporting);
    if (!atomic_exchange(&activity_->others, true) && atomic_load(&tangram.hot.work_reported) && time_link_understands(WIRE_UNDERSTANDS_STILL))
        send_activity(WIRE_STILL);
    pthread_mutex_unlock(&activity_->reporting);
    quiet_end(quiet);
}

void activity_waits_for_others(void)
{
    atomic_store(&activity_->foreign, true);
    if (atomic_load_explicit(&tangram.hot.watched, memory_order_relaxed))
        activity_other_came();
}

/* Called with `reporting` held. A WORK ends the state DRAINED. */
static void send_drained(bool drained)
{
    if (atomic_load(&activity_->drained) == drained || !atomic_load(&tangram.hot.work_reported))
        return;
    if (drained)
        atomic_store(&activity_->drained, time_link_activity(WIRE_DRAINED, 0) == TIME_LINK_SENT); /* tried again at the next look */
    else if (send_activity(WIRE_WORK) != TIME_LINK_FULL)
        atomic_store(&activity_->drained, false);
}

/* A container that waits at the gate is not charged for the time while nothing of it is on the GPU: DRAINED reports that. */
static bool look_at_gate(void)
{
    bool drained = streams_done();
    if (time_link_understands(WIRE_UNDERSTANDS_DRAINED) && drained != atomic_load(&activity_->drained)) {
        pthread_mutex_lock(&activity_->reporting);
        send_drained(drained);
        pthread_mutex_unlock(&activity_->reporting);
    }
    return drained;
}

static void leave_gate(void)
{
    pthread_mutex_lock(&activity_->reporting);
    send_drained(false);
    pthread_mutex_unlock(&activity_->reporting);
}

/* What waits here is counted and not yet the driver's: that its stream has nothing left proves nothing. */
static void wait_at_gate(struct stream_name name)
{
    struct quiet quiet = quiet_begin();
    atomic_fetch_add(&activity_->waiting, 1);
    time_link_wait_for_gate(look_at_gate);
    leave_gate();
    activity_count(name); /* the first count may have been taken for done meanwhile */
    atomic_fetch_sub(&activity_->waiting, 1);
    quiet_end(quiet);
}

/* Until all of it is back: nothing that this process does brings it. At the end of the program no order comes any more. */
static void sleep_without_memory(void)
{
    const struct timespec moment = {0, 1000000};
    while (launches_must_wait_for_memory() && !helper_ended())
        nanosleep(&moment, NULL);
}

static void wait_for_memory(struct stream_name name)
{
    struct quiet quiet = quiet_begin();
    atomic_fetch_add(&activity_->waiting, 1);
    sleep_without_memory();
    activity_count(name);
    atomic_fetch_sub(&activity_->waiting, 1);
    quiet_end(quiet);
}

void activity_launched(struct stream_name name)
{
    if (!atomic_load_explicit(&tangram.hot.work_reported, memory_order_relaxed))
        report_work();
    if (launches_must_wait_for_memory())
        wait_for_memory(name);
    if (launches_must_wait())
        wait_at_gate(name);
}

void activity_waits_for_memory(void)
{
    atomic_fetch_add(&activity_->waiting, 1);
    if (!atomic_load_explicit(&tangram.hot.work_reported, memory_order_relaxed))
        report_work();
}

void activity_has_memory(void)
{
    atomic_fetch_sub(&activity_->waiting, 1);
    atomic_store(&activity_->idle_later, true); /* the helper looks whether something else is left */
}

void activity_await_memory(void)
{
    if (!launches_must_wait_for_memory())
        return;
    struct quiet quiet = quiet_begin();
    activity_waits_for_memory();
    sleep_without_memory();
    activity_has_memory();
    quiet_end(quiet);
}

/* A process that waits after every small kernel would report work and idleness thousands of times a second, which costs the
 * arbiter processor time. A process that is not latency-critical reports IDLE at most once in IDLE_GAP_US. If it is still true by then, the
 * helper reports it. Called with `reporting` held. */
static bool too_soon(void)
{
    uint64_t now = now_us();
    if (time_link_is_urgent() || now - activity_->idle_reported_us >= IDLE_GAP_US) {
        activity_->idle_reported_us = now;
        atomic_store(&activity_->idle_later, false);
        return false;
    }
    atomic_store(&activity_->idle_later, true);
    return true;
}

/* Called with `reporting` held. `work_reported` falls before the last look, so that a launch in between is seen by one of the two threads.
 * Unreported work ends without a report. */
static void send_idle(void)
{
    const bool reported = atomic_exchange(&tangram.hot.work_reported, false);
    if (!streams_clean()) {
        atomic_store(&tangram.hot.work_reported, reported);
    } else if (reported && send_activity(WIRE_IDLE) == TIME_LINK_FULL) {
        atomic_store(&tangram.hot.work_reported, true);
    } else {
        activity_->began_us = 0;
        atomic_store(&activity_->idle_later, false);
        atomic_store(&activity_->unreported, false);
        atomic_store(&activity_->others, false);
    }
}

/* All streams were done a moment ago. */
static void report_idle(void)
{
    pthread_mutex_lock(&activity_->reporting);
    if (is_counted() && !activity_is_inside() && !too_soon())
        send_idle();
    pthread_mutex_unlock(&activity_->reporting);
}

/* Called with `reporting` held. Sends the state anew, after a packet did not fit. False: the next one did not either. */
static bool send_again(void)
{
    const bool waits = activity_is_inside();
    atomic_store(&activity_->full, false);
    if (is_counted() && !waits && streams_clean())
        send_idle();
    else if (atomic_load(&activity_->unreported))
        send_work();
    else if (atomic_load(&activity_->drained) && !waits)
        send_drained(false);
    else if (atomic_load(&tangram.hot.work_reported) && time_link_understands(WIRE_UNDERSTANDS_STILL))
        send_activity(WIRE_STILL);
    return !atomic_load(&activity_->full);
}

bool activity_announce(enum wire_activity what, uint64_t value)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&activity_->reporting);
    bool sent = (!atomic_load(&activity_->full) || send_again()) && time_link_activity(what, value) == TIME_LINK_SENT;
    pthread_mutex_unlock(&activity_->reporting);
    quiet_end(quiet);
    return sent;
}

bool activity_report_later(void)
{
    if (atomic_load(&activity_->full)) {
        pthread_mutex_lock(&activity_->reporting);
        send_again();
        pthread_mutex_unlock(&activity_->reporting);
        return true;
    }
    if (!atomic_exchange(&activity_->idle_later, false))
        return false;
    if (streams_clean())
        report_idle();
    return true;
}

void activity_something_synced(void)
{
    if (!is_counted())
        return;
    struct quiet quiet = quiet_begin();
    if (streams_done())
        report_idle();
    quiet_end(quiet);
}

struct activity_before activity_sync_begins(CUstream stream, int ptds)
{
    if (!is_counted())
        return (struct activity_before){0};
    stream_context_check();
    struct stream_name name = stream_name(stream, ptds);
    struct activity_stream *of = stream_find(name);
    uint64_t last = of == NULL ? 0 : atomic_load(&of->last);
    if (of == NULL || !stream_is_at(of, name)) /* it has no place, or lost it just now: it has nothing left */
        return (struct activity_before){0};
    return (struct activity_before){.stream = of, .launches = last};
}

struct activity_before activity_context_sync_begins(CUcontext context)
{
    if (!is_counted())
        return (struct activity_before){0};
    stream_context_check();
    CUcontext named = context == NULL ? stream_context_now() : stream_context_named(context);
    return (struct activity_before){.context = context_record(named, true), .launches = atomic_load(&activity_->launches)};
}

void activity_synced(struct activity_before before)
{
    if (before.stream != NULL)
        stream_clean(&before.stream->clean, before.launches);
    if (before.context != NULL)
        stream_clean(&before.context->clean, before.launches);
    activity_something_synced();
}

void activity_stream_ends(CUstream stream)
{
    struct stream_name name = {(uintptr_t)stream, NULL};
    struct activity_stream *of = (uintptr_t)stream > 2 ? stream_find(name) : NULL;
    if (of == NULL)
        return;
    if (is_counted()) {
        struct quiet quiet = quiet_begin();
        CUstreamCaptureMode mode = relax();
        if (!stream_done(of) && !stream_captures(stream))
            destroyed_leaves(stream, of);
        relax_end(mode);
        quiet_end(quiet);
    }
    stream_gone(of, name);
}

void activity_context_ended(CUcontext context, bool last)
{
    struct activity_stream *of;
    CUcontext named = stream_context_named(context);
    struct activity_context *record = named == NULL ? NULL : context_record(named, false);
    for (size_t at = 0; (of = streams_next(&at)) != NULL;)
        if (last || (named != NULL && atomic_load(&of->context) == named))
            stream_gone(of, (struct stream_name){atomic_load(&of->key), named});
    if (record != NULL)
        atomic_store(&record->context, NULL);
    activity_something_synced();
}

bool activity_work_reported(void)
{
    return atomic_load(&tangram.hot.work_reported);
}

/* Without it, the arbiter would treat later launches as being as old as the first report. */
static void report_still(void)
{
    pthread_mutex_lock(&activity_->reporting);
    if (atomic_load(&tangram.hot.work_reported) && time_link_understands(WIRE_UNDERSTANDS_STILL))
        send_activity(WIRE_STILL);
    pthread_mutex_unlock(&activity_->reporting);
    activity_->still_ms = now_ms() + STILL_MS;
}

/* A thread that stopped between counting a launch and making it looks idle, or one that loads code: nothing else brings memory back, or resumes the channels. */
static void look_for_more(void)
{
    if ((channels_are_suspended() && activity_is_inside()) || (launches_must_wait_for_memory() && (relax(), contexts_have_more())))
        report_work();
}

void activity_look(void)
{
    if (!is_counted()) {
        look_for_more();
        return;
    }
    uint64_t launches = atomic_load(&activity_->launches);
    bool quiet = launches == activity_->looked_at;
    activity_->looked_at = launches;
    if (!quiet) { /* a program that launches will also wait, mostly */
        if (now_ms() >= activity_->still_ms)
            report_still();
        return;
    }
    relax(); /* this thread is ours: it stays so */
    if (!activity_is_inside() && contexts_done())
        report_idle();
}

void activity_arbiter_is_new(void)
{
    pthread_mutex_lock(&activity_->reporting);
    atomic_store(&activity_->drained, false);
    atomic_store(&activity_->full, false);
    if (is_counted())
        send_work();
    pthread_mutex_unlock(&activity_->reporting);
}

void activity_watch(void)
{
    atomic_store(&tangram.hot.watched, true);
}

void activity_forget(void)
{
    atomic_store(&tangram.hot.watched, false);
    atomic_store(&tangram.hot.work_reported, false);
    memset(activity_, 0, sizeof *activity_);
    activity_->reporting = activity_->placing = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
