/* unit_contexts.c - work of several contexts in one process: the state of one implies nothing about another. A part of unit_time. */
#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "../src/gputime/launching.h"
#include "double.h"
#include "queues.h"

#undef NDEBUG

static unsigned queries_of_current;

static CUresult count_current(CUcontext *context)
{
    queries_of_current++;
    return get_current(context);
}

/* Both default streams. */
static void a_wait_in_one_context_ends_no_work_of_another(int ptds)
{
    queues_begin(2);
    launch(0, NULL, ptds); /* long */
    launch(1, NULL, ptds);
    wait_for(1, NULL, ptds);
    assert(activity_work_reported());
    launch(1, NULL, ptds);
    wait_for_context(1);
    assert(activity_work_reported());
    look();
    assert(activity_work_reported());
    wait_for(0, NULL, ptds);
    assert(!activity_work_reported()); /* and the last wait is reported at once */
    queues_end();
}

static void a_context_that_ends_takes_only_its_own_work_along(void)
{
    queues_begin(2);
    launch(0, NULL, 0);
    launch(0, stream_of(0, 0), 0);
    launch(1, NULL, 0);
    launch(1, NULL, 1);
    launch(1, stream_of(1, 0), 0);
    memset(queued[1], 0, sizeof queued[1]);
    atomic_store(&tangram.contexts.primary[1], NULL);
    current = 0;
    activity_context_ended(handle_of(1), false);
    assert(activity_work_reported());
    wait_for(0, NULL, 0);
    assert(activity_work_reported());
    wait_for(0, stream_of(0, 0), 0);
    assert(!activity_work_reported());
    launch(0, NULL, 1);
    launch(0, stream_of(0, 1), 0);
    atomic_store(&tangram.contexts.primary[0], NULL);
    activity_context_ended(handle_of(0), true);
    assert(!activity_work_reported());
    queues_end();
}

static void work_that_is_not_waited_for_is_found_in_each_context(void)
{
    queues_begin(3);
    for (int c = 0; c < 3; c++)
        launch(c, NULL, 0);
    launch(1, stream_of(1, 0), 0);
    for (int c = 2; c >= 0; c--) {
        queued[c][0] = false;
        look();
        assert(activity_work_reported());
    }
    *queue_of(stream_of(1, 0)) = false;
    look();
    assert(!activity_work_reported());
    queues_end();
}

static void a_context_that_was_not_seen_being_made_is_done_when_the_others_are(void)
{
    queues_begin(2);
    launch(2, NULL, 0);
    launch(0, NULL, 0);
    look();
    assert(activity_work_reported());
    queued[0][0] = false;
    look();
    assert(!activity_work_reported());
    queues_end();
}

static void a_launch_requests_for_its_context_only_where_there_was_more_than_one(void)
{
    queues_begin(1);
    tangram.driver.cuCtxGetCurrent = count_current;
    queries_of_current = 0;
    launch(0, NULL, 0);
    launch(0, NULL, 1);
    assert(queries_of_current == 0);
    another_comes(1);
    launch(1, NULL, 0);
    assert(queries_of_current == 1);
    queues_end();
}

static void what_was_launched_before_another_context_came_is_of_the_first(int ptds)
{
    queues_begin(1);
    launch(0, NULL, ptds);
    another_comes(1);
    launch(1, NULL, ptds);
    wait_for(1, NULL, ptds);
    wait_for_context(1);
    look();
    assert(activity_work_reported());
    wait_for(0, NULL, ptds);
    assert(!activity_work_reported());
    queues_end();
}

/* One that was not seen being made, where one was. */
static void a_wait_in_an_unseen_context_ends_no_work_of_the_first(void)
{
    queues_begin(1);
    launch(0, NULL, 0);
    wait_for(1, NULL, 0);
    assert(activity_work_reported());
    wait_for_context(1);
    assert(activity_work_reported());
    wait_for(0, NULL, 0);
    assert(!activity_work_reported());
    queues_end();
}

static void however_many_contexts_there_are_all_are_requested(void)
{
    enum { MANY = 300 };
    struct context_made *made = calloc(MANY, sizeof *made);
    assert(made != NULL);
    queues_begin(0);
    for (unsigned i = 0; i < MANY; i++)
        made[i].context = handle_of(0);
    tangram.contexts.made = made;
    tangram.contexts.count = MANY;
    launch(0, NULL, 0);
    look();
    assert(activity_work_reported());
    queued[0][0] = false;
    look();
    assert(!activity_work_reported());
    tangram.contexts.made = NULL;
    tangram.contexts.count = 0;
    free(made);
    queues_end();
}

static void *launch_in_a_thread_of_its_own(void *unused)
{
    launch(0, NULL, 1);
    return unused;
}

/* No other thread can query its default stream, and the thread is no more. */
static void a_wait_for_the_context_ends_what_other_threads_launched(void)
{
    pthread_t thread;
    queues_begin(1);
    assert(pthread_create(&thread, NULL, launch_in_a_thread_of_its_own, NULL) == 0);
    pthread_join(thread, NULL);
    wait_for(0, NULL, 0);
    assert(activity_work_reported());
    wait_for_context(0);
    assert(!activity_work_reported());
    queues_end();
}

static void what_is_launched_while_a_context_is_waited_for_stays(void)
{
    queues_begin(1);
    launch(0, NULL, 1);
    struct activity_before before = activity_context_sync_begins(NULL);
    launch(0, stream_of(0, 0), 0);
    queued[0][1] = false;
    activity_synced(before);
    assert(activity_work_reported());
    wait_for(0, stream_of(0, 0), 0);
    assert(!activity_work_reported());
    queues_end();
}

/* Against the queues themselves: an idle process has nothing queued, and one that waited for all of it is idle. */
static void a_process_with_work_is_never_reported_idle(void)
{
    unsigned seed = 11;
    int contexts = 1;
    queues_begin(contexts);
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
            queued[context][which] = false; /* it ends, and no thread waits */
            look();
        }
        read_all_that_was_reported();
        bool any = false;
        for (int c = 0; c < CONTEXTS; c++)
            for (int q = 0; q < QUEUES; q++)
                any = any || queued[c][q];
        assert(!any || activity_work_reported());
    }
    for (int c = 0; c < CONTEXTS; c++) {
        wait_for(c, NULL, 0);
        wait_for(c, NULL, 1);
        wait_for_context(c);
    }
    assert(!activity_work_reported());
    queues_end();
}

void contexts_are_distinguished(void)
{
    a_wait_in_one_context_ends_no_work_of_another(0);
    a_wait_in_one_context_ends_no_work_of_another(1);
    a_context_that_ends_takes_only_its_own_work_along();
    work_that_is_not_waited_for_is_found_in_each_context();
    a_context_that_was_not_seen_being_made_is_done_when_the_others_are();
    a_launch_requests_for_its_context_only_where_there_was_more_than_one();
    what_was_launched_before_another_context_came_is_of_the_first(0);
    what_was_launched_before_another_context_came_is_of_the_first(1);
    a_wait_in_an_unseen_context_ends_no_work_of_the_first();
    however_many_contexts_there_are_all_are_requested();
    a_wait_for_the_context_ends_what_other_threads_launched();
    what_is_launched_while_a_context_is_waited_for_stays();
    a_process_with_work_is_never_reported_idle();
}
