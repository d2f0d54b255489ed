/* unit_contexts.c - work of several contexts in one process: what is known of one says nothing of another. A part of unit_time. */
#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "../src/launching.h"
#include "double.h"

#undef NDEBUG

/* A driver of which only queues are known. Context n is handle n + 1 << 12; its streams' handles are a little more. */
enum { CONTEXTS = 3, OWN_STREAMS = 2, QUEUES = 2 + OWN_STREAMS }; /* legacy, per-thread, made */
static bool queued[CONTEXTS][QUEUES];
static int current;

static CUcontext handle_of(int context)
{
    return (CUcontext)(uintptr_t)((context + 1) << 12);
}

static CUstream stream_of(int context, int made)
{
    return (CUstream)(uintptr_t)(((context + 1) << 12) + 16 * (made + 1));
}

static bool *queue_of(CUstream stream)
{
    uintptr_t handle = (uintptr_t)stream;
    if (handle <= 2)
        return &queued[current][handle == 2];
    return &queued[(handle >> 12) - 1][2 + (handle & 0xfff) / 16 - 1];
}

static CUresult query(CUstream stream)
{
    return *queue_of(stream) ? (CUresult)600 : CUDA_SUCCESS;
}

static CUresult get_current(CUcontext *context)
{
    *context = handle_of(current);
    return CUDA_SUCCESS;
}

static CUresult get_context(CUstream stream, CUcontext *context)
{
    *context = handle_of((int)((uintptr_t)stream >> 12) - 1);
    return CUDA_SUCCESS;
}

static int pushed_from;

static CUresult push(CUcontext context)
{
    pushed_from = current;
    current = (int)((uintptr_t)context >> 12) - 1;
    return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *context)
{
    *context = handle_of(current);
    current = pushed_from;
    return CUDA_SUCCESS;
}

static CUresult capturing(CUstream stream, CUstreamCaptureStatus *status)
{
    (void)stream;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

static void read_all_that_was_told(void)
{
    char packet[4096];
    while (recv(peer, packet, sizeof packet, MSG_DONTWAIT) > 0)
        continue;
}

static unsigned asked_for_current;

static CUresult count_current(CUcontext *context)
{
    asked_for_current++;
    return get_current(context);
}

/* The first is made before there are several. */
static void another_comes(int context)
{
    atomic_store(&tangram.hot.several_contexts, true);
    atomic_store(&tangram.contexts.primary[context], handle_of(context));
}

static void begin(int contexts)
{
    fresh();
    activity_forget();
    activity_watch();
    atomic_store(&tangram.turn.urgent, true);
    tangram.turn.stage = LINK_APART; /* nobody reads here, and a socket that is full is another test's: unit_work.c */
    tangram.driver.cuStreamQuery = query;
    tangram.driver.cuStreamGetCtx = get_context;
    tangram.driver.cuStreamIsCapturing = capturing;
    tangram.driver.cuCtxGetCurrent = get_current;
    tangram.driver.cuCtxPushCurrent_v2 = push;
    tangram.driver.cuCtxPopCurrent_v2 = pop;
    memset(queued, 0, sizeof queued);
    atomic_store(&tangram.hot.several_contexts, false);
    atomic_store(&tangram.contexts.first, handle_of(0));
    for (int c = 0; c < contexts; c++)
        atomic_store(&tangram.contexts.primary[c], handle_of(c));
    atomic_store(&tangram.hot.several_contexts, contexts > 1);
}

static void end(void)
{
    tangram.turn.stage = LINK_CONNECTED;
    for (int c = 0; c < CONTEXTS; c++)
        atomic_store(&tangram.contexts.primary[c], NULL);
    atomic_store(&tangram.hot.several_contexts, false);
    atomic_store(&tangram.contexts.first, NULL);
    forget_driver();
    for (unsigned table = 0; table < ACTIVITY_TABLES; table++)
        free(atomic_load(&tangram.activity.more[table]));
    for (struct activity_context *of = atomic_load(&tangram.activity.context.next), *next; of != NULL; of = next) {
        next = atomic_load(&of->next);
        free(of);
    }
    activity_forget();
    read_all_that_was_told();
}

static void launch(int context, CUstream stream, int ptds)
{
    current = context;
    activity_launch(stream, ptds);
    *queue_of(ptds && stream == NULL ? (CUstream)2 : stream) = true;
}

static void wait_for(int context, CUstream stream, int ptds)
{
    current = context;
    struct activity_before before = activity_sync_begins(stream, ptds);
    *queue_of(ptds && stream == NULL ? (CUstream)2 : stream) = false;
    activity_synced(before);
}

static void wait_for_context(int context)
{
    current = context;
    struct activity_before before = activity_context_sync_begins(NULL);
    memset(queued[context], 0, sizeof queued[context]);
    activity_synced(before);
}

static void look(void)
{
    activity_look(); /* it is quiet only the second time */
    activity_look();
}

/* Both default streams. */
static void a_wait_in_one_context_says_nothing_of_another(int ptds)
{
    begin(2);
    launch(0, NULL, ptds); /* long */
    launch(1, NULL, ptds);
    wait_for(1, NULL, ptds);
    assert(activity_is_told());
    launch(1, NULL, ptds);
    wait_for_context(1);
    assert(activity_is_told());
    look();
    assert(activity_is_told());
    wait_for(0, NULL, ptds);
    assert(!activity_is_told()); /* and the last wait is told at once */
    end();
}

static void a_context_that_ends_takes_only_its_own_work_along(void)
{
    begin(2);
    launch(0, NULL, 0);
    launch(0, stream_of(0, 0), 0);
    launch(1, NULL, 0);
    launch(1, NULL, 1);
    launch(1, stream_of(1, 0), 0);
    memset(queued[1], 0, sizeof queued[1]);
    atomic_store(&tangram.contexts.primary[1], NULL);
    current = 0;
    activity_context_ended(handle_of(1), false);
    assert(activity_is_told());
    wait_for(0, NULL, 0);
    assert(activity_is_told());
    wait_for(0, stream_of(0, 0), 0);
    assert(!activity_is_told());
    launch(0, NULL, 1);
    launch(0, stream_of(0, 1), 0);
    atomic_store(&tangram.contexts.primary[0], NULL);
    activity_context_ended(handle_of(0), true);
    assert(!activity_is_told());
    end();
}

static void work_that_nobody_waits_for_is_found_in_each_context(void)
{
    begin(3);
    for (int c = 0; c < 3; c++)
        launch(c, NULL, 0);
    launch(1, stream_of(1, 0), 0);
    for (int c = 2; c >= 0; c--) {
        queued[c][0] = false;
        look();
        assert(activity_is_told());
    }
    *queue_of(stream_of(1, 0)) = false;
    look();
    assert(!activity_is_told());
    end();
}

static void a_context_that_was_not_seen_being_made_is_done_when_the_others_are(void)
{
    begin(2);
    launch(2, NULL, 0);
    launch(0, NULL, 0);
    look();
    assert(activity_is_told());
    queued[0][0] = false;
    look();
    assert(!activity_is_told());
    end();
}

static void a_launch_asks_for_its_context_only_where_there_was_more_than_one(void)
{
    begin(1);
    tangram.driver.cuCtxGetCurrent = count_current;
    asked_for_current = 0;
    launch(0, NULL, 0);
    launch(0, NULL, 1);
    assert(asked_for_current == 0);
    another_comes(1);
    launch(1, NULL, 0);
    assert(asked_for_current == 1);
    end();
}

static void what_was_launched_before_another_context_came_is_of_the_first(int ptds)
{
    begin(1);
    launch(0, NULL, ptds);
    another_comes(1);
    launch(1, NULL, ptds);
    wait_for(1, NULL, ptds);
    wait_for_context(1);
    look();
    assert(activity_is_told());
    wait_for(0, NULL, ptds);
    assert(!activity_is_told());
    end();
}

/* One that was not seen being made, where one was. */
static void a_wait_in_a_context_that_was_not_seen_says_nothing_of_the_first(void)
{
    begin(1);
    launch(0, NULL, 0);
    wait_for(1, NULL, 0);
    assert(activity_is_told());
    wait_for_context(1);
    assert(activity_is_told());
    wait_for(0, NULL, 0);
    assert(!activity_is_told());
    end();
}

static void however_many_contexts_there_are_all_are_asked(void)
{
    enum { MANY = 300 };
    struct context_made *made = calloc(MANY, sizeof *made);
    assert(made != NULL);
    begin(0);
    for (unsigned i = 0; i < MANY; i++)
        made[i].context = handle_of(0);
    tangram.contexts.made = made;
    tangram.contexts.count = MANY;
    launch(0, NULL, 0);
    look();
    assert(activity_is_told());
    queued[0][0] = false;
    look();
    assert(!activity_is_told());
    tangram.contexts.made = NULL;
    tangram.contexts.count = 0;
    free(made);
    end();
}

static void *launch_in_a_thread_of_its_own(void *unused)
{
    launch(0, NULL, 1);
    return unused;
}

/* Nobody else can ask for its default stream, and the thread is no more. */
static void a_wait_for_the_context_ends_what_other_threads_launched(void)
{
    pthread_t thread;
    begin(1);
    assert(pthread_create(&thread, NULL, launch_in_a_thread_of_its_own, NULL) == 0);
    pthread_join(thread, NULL);
    wait_for(0, NULL, 0);
    assert(activity_is_told());
    wait_for_context(0);
    assert(!activity_is_told());
    end();
}

static void what_is_launched_while_a_context_is_waited_for_stays(void)
{
    begin(1);
    launch(0, NULL, 1);
    struct activity_before before = activity_context_sync_begins(NULL);
    launch(0, stream_of(0, 0), 0);
    queued[0][1] = false;
    activity_synced(before);
    assert(activity_is_told());
    wait_for(0, stream_of(0, 0), 0);
    assert(!activity_is_told());
    end();
}

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
    begin(1);
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
            assert(activity_is_told());
            busy[n] = false;
            activity_synced(before);
            activity_stream_ends(one_of_many(n));
        }
        assert(!activity_is_told());
    }
    end();
}

static void streams_that_nobody_destroys_make_room_for_others(void)
{
    begin_many();
    for (unsigned n = 0; n < 100000; n++) {
        CUstream stream = one_of_many(n);
        activity_launch(stream, 0);
        activity_synced(activity_sync_begins(stream, 0));
        assert(!activity_is_told());
    }
    assert(tangram.activity.more[0] == NULL);
    end();
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
        assert(activity_is_told());
        busy[n * 7919 % MANY_STREAMS] = false;
    }
    look();
    assert(!activity_is_told());
    end();
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
    begin(1);
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
        assert(!activity_is_told());
        end();
    }
}

static void an_answer_that_says_nothing_of_the_work_ends_none(void)
{
    const int answers[] = {600, 900, 901, 906, 908, 1, 3, 201};
    for (unsigned i = 0; i < sizeof answers / sizeof *answers; i++) {
        begin_failing(answers[i], capturing);
        assert(activity_is_told());
        end();
    }
}

/* Threads that launch and wait in streams that take each other's places: none is idle with work of its own. */
static void *many_streams_in_a_thread(void *number)
{
    unsigned seed = (unsigned)(uintptr_t)number;
    for (unsigned step = 0; step < 20000; step++) {
        unsigned n = (unsigned)(uintptr_t)number * 1000 + (unsigned)rand_r(&seed) % 1000;
        busy[n] = true;
        activity_launch(one_of_many(n), 0);
        pthread_mutex_lock(&tangram.activity.telling); /* who looks whether all are idle takes it back at once if not */
        assert(activity_is_told());
        pthread_mutex_unlock(&tangram.activity.telling);
        struct activity_before before = activity_sync_begins(one_of_many(n), 0);
        busy[n] = false;
        activity_synced(before);
    }
    return NULL;
}

static void *read_until(void *stop)
{
    while (!atomic_load((_Atomic bool *)stop))
        read_all_that_was_told();
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
    assert(!activity_is_told());
    end();
}

/* Against the queues themselves: whoever is idle has nothing queued, and who waited for all of it is idle. */
static void idleness_is_never_said_of_a_process_with_work(void)
{
    unsigned seed = 11;
    int contexts = 1;
    begin(contexts);
    for (unsigned step = 0; step < 100000; step++) {
        if (step % 10000 == 9999 && contexts < CONTEXTS)
            another_comes(contexts++);
        int context = rand_r(&seed) % contexts, which = rand_r(&seed) % QUEUES;
        CUstream stream = which < 2 ? NULL : stream_of(context, which - 2);
        switch (rand_r(&seed) % 4) {
        case 0:
            launch(context, stream, which == 1);
            break;
        case 1:
            wait_for(context, stream, which == 1);
            break;
        case 2:
            wait_for_context(context);
            break;
        default:
            queued[context][which] = false; /* it ends, and nobody waits */
            look();
        }
        read_all_that_was_told();
        bool any = false;
        for (int c = 0; c < CONTEXTS; c++)
            for (int q = 0; q < QUEUES; q++)
                any = any || queued[c][q];
        assert(!any || activity_is_told());
    }
    for (int c = 0; c < CONTEXTS; c++) {
        wait_for(c, NULL, 0);
        wait_for(c, NULL, 1);
        wait_for_context(c);
    }
    assert(!activity_is_told());
    end();
}

void contexts_are_told_apart(void)
{
    a_wait_in_one_context_says_nothing_of_another(0);
    a_wait_in_one_context_says_nothing_of_another(1);
    a_context_that_ends_takes_only_its_own_work_along();
    work_that_nobody_waits_for_is_found_in_each_context();
    a_context_that_was_not_seen_being_made_is_done_when_the_others_are();
    a_launch_asks_for_its_context_only_where_there_was_more_than_one();
    what_was_launched_before_another_context_came_is_of_the_first(0);
    what_was_launched_before_another_context_came_is_of_the_first(1);
    a_wait_in_a_context_that_was_not_seen_says_nothing_of_the_first();
    however_many_contexts_there_are_all_are_asked();
    a_wait_for_the_context_ends_what_other_threads_launched();
    what_is_launched_while_a_context_is_waited_for_stays();
    streams_that_were_waited_for_and_destroyed_leave_nothing(300, 1);
    streams_that_were_waited_for_and_destroyed_leave_nothing(10, 10000);
    streams_that_nobody_destroys_make_room_for_others();
    of_very_many_streams_none_with_work_is_forgotten();
    an_error_ends_work_as_well();
    an_answer_that_says_nothing_of_the_work_ends_none();
    places_change_hands_among_threads();
    idleness_is_never_said_of_a_process_with_work();
}
