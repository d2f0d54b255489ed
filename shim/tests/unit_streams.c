/* unit_streams.c - streams without number, and what ends their work: none with work is forgotten, and none without keeps a place. A part of unit_time. */
#include <assert.h>
#include <pthread.h>
#include <stdlib.h>

#include "../src/gputime/launching.h"
#include "double.h"
#include "queues.h"

#undef NDEBUG

/* More streams than have a place, as handles from MANY_AT on. */
enum { MANY_STREAMS = 5000, MANY_AT = 0x100000 };
static _Atomic bool busy[MANY_STREAMS];

static CUstream one_of_many(unsigned n)
{
    return (CUstream)(uintptr_t)(MANY_AT + 16 * n);
}

static CUresult query_many(CUstream stream)
{
    uintptr_t handle = (uintptr_t)stream;
    return handle >= MANY_AT && busy[(handle - MANY_AT) / 16 % MANY_STREAMS] ? (CUresult)600 : CUDA_SUCCESS;
}

static CUresult get_context_of_many(CUstream stream, CUcontext *context)
{
    (void)stream;
    *context = handle_of(0);
    return CUDA_SUCCESS;
}

static void begin_many(void)
{
    queues_begin(1);
    tangram.driver.cuStreamQuery = query_many;
    tangram.driver.cuStreamGetCtx = get_context_of_many;
    for (unsigned n = 0; n < MANY_STREAMS; n++)
        busy[n] = false;
}

static void streams_that_were_waited_for_and_destroyed_leave_nothing(unsigned at_once, unsigned rounds)
{
    begin_many();
    for (unsigned round = 0; round < rounds; round++) {
        for (unsigned n = 0; n < at_once; n++) {
            activity_launch(one_of_many(n), 0);
            busy[n] = true;
        }
        for (unsigned n = 0; n < at_once; n++) {
            struct activity_before before = activity_sync_begins(one_of_many(n), 0);
            assert(activity_work_reported());
            busy[n] = false;
            activity_synced(before);
            activity_stream_ends(one_of_many(n));
        }
        assert(!activity_work_reported());
    }
    queues_end();
}

static void an_idle_stream_that_is_never_destroyed_is_replaced(void)
{
    begin_many();
    for (unsigned n = 0; n < 100000; n++) {
        CUstream stream = one_of_many(n);
        activity_launch(stream, 0);
        activity_synced(activity_sync_begins(stream, 0));
        assert(!activity_work_reported());
    }
    assert(tangram.activity.more[0] == NULL);
    queues_end();
}

static void of_very_many_streams_none_with_work_is_forgotten(void)
{
    begin_many();
    for (unsigned n = 0; n < MANY_STREAMS; n++) {
        activity_launch(one_of_many(n), 0);
        busy[n] = true;
    }
    for (unsigned n = 0; n < MANY_STREAMS; n++) {
        look();
        assert(activity_work_reported());
        busy[n * 7919 % MANY_STREAMS] = false;
    }
    look();
    assert(!activity_work_reported());
    queues_end();
}

static CUresult failure;

static CUresult query_fails(CUstream stream)
{
    (void)stream;
    return failure;
}

static CUresult capturing_fails(CUstream stream, CUstreamCaptureStatus *status)
{
    (void)status;
    return query_fails(stream);
}

/* Launched, never waited for with success. */
static void begin_failing(int answer, CUresult (*is_capturing)(CUstream, CUstreamCaptureStatus *))
{
    queues_begin(1);
    failure = (CUresult)answer;
    tangram.driver.cuStreamQuery = query_fails;
    tangram.driver.cuStreamIsCapturing = is_capturing;
    launch(0, NULL, 0);
    launch(0, stream_of(0, 0), 0);
    look();
}

/* 700 illegal address, 710 assert, 719 launch failed: they stay with the context. 709: its green context was destroyed. */
static void an_error_ends_work_as_well(void)
{
    const int answers[] = {700, 709, 710, 719, 4};
    for (unsigned i = 0; i < sizeof answers / sizeof *answers; i++) {
        begin_failing(answers[i], capturing_fails);
        assert(!activity_work_reported());
        queues_end();
    }
}

static void an_answer_without_a_state_of_the_work_ends_none(void)
{
    const int answers[] = {600, 900, 901, 906, 908, 1, 3, 201};
    for (unsigned i = 0; i < sizeof answers / sizeof *answers; i++) {
        begin_failing(answers[i], not_capturing);
        assert(activity_work_reported());
        queues_end();
    }
}

/* Threads that launch and wait in streams that reuse each other's places: none is idle with work of its own. */
static void *many_streams_in_a_thread(void *number)
{
    unsigned seed = (unsigned)(uintptr_t)number;
    for (unsigned step = 0; step < 20000; step++) {
        unsigned n = (unsigned)(uintptr_t)number * 1000 + (unsigned)rand_r(&seed) % 1000;
        busy[n] = true;
        activity_launch(one_of_many(n), 0);
        pthread_mutex_lock(&tangram.activity.reporting); /* a thread that finds that not all are idle withdraws its report at once */
        assert(activity_work_reported());
        pthread_mutex_unlock(&tangram.activity.reporting);
        struct activity_before before = activity_sync_begins(one_of_many(n), 0);
        busy[n] = false;
        activity_synced(before);
    }
    return NULL;
}

static void *read_until(void *stop)
{
    while (!atomic_load((_Atomic bool *)stop))
        read_all_that_was_reported();
    return NULL;
}

static void places_change_hands_among_threads(void)
{
    enum { THREADS = 4 };
    pthread_t thread[THREADS], reader;
    _Atomic bool stop = false;
    begin_many();
    assert(pthread_create(&reader, NULL, read_until, &stop) == 0);
    for (uintptr_t i = 0; i < THREADS; i++)
        assert(pthread_create(&thread[i], NULL, many_streams_in_a_thread, (void *)i) == 0);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    atomic_store(&stop, true);
    pthread_join(reader, NULL);
    activity_something_synced();
    assert(!activity_work_reported());
    queues_end();
}

void streams_keep_their_places(void)
{
    streams_that_were_waited_for_and_destroyed_leave_nothing(300, 1);
    streams_that_were_waited_for_and_destroyed_leave_nothing(10, 10000);
    an_idle_stream_that_is_never_destroyed_is_replaced();
    of_very_many_streams_none_with_work_is_forgotten();
    an_error_ends_work_as_well();
    an_answer_without_a_state_of_the_work_ends_none();
    places_change_hands_among_threads();
}
