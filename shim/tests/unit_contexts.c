/* unit_contexts.c - work of several contexts in one process: what is known of one says nothing of another. A part of unit_time. */
#include <assert.h>
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
    for (int c = 0; c < CONTEXTS; c++)
        atomic_store(&tangram.contexts.primary[c], NULL);
    atomic_store(&tangram.hot.several_contexts, false);
    atomic_store(&tangram.contexts.first, NULL);
    memset(&tangram.driver, 0, sizeof tangram.driver);
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
    activity_stream_synced(before);
}

static void wait_for_context(int context)
{
    current = context;
    struct activity_before before = activity_context_sync_begins();
    memset(queued[context], 0, sizeof queued[context]);
    activity_context_synced(before);
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

static void many_contexts_are_too_many_to_ask(void)
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
    queued[0][0] = false;
    look();
    assert(activity_is_told());
    wait_for(0, NULL, 0);
    assert(!activity_is_told());
    tangram.contexts.made = NULL;
    tangram.contexts.count = 0;
    free(made);
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
    many_contexts_are_too_many_to_ask();
    idleness_is_never_said_of_a_process_with_work();
}
