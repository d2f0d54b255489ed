/* unit_bound.c - what an arbiter granted whose connection has ended since: the next one has reserved none of it. And limits that it has not sent.
 *
 * Compiled with the library's own sources, so that the sanitizers see them. The arbiter is a thread at the other end of a pair of sockets. It hands its
 * answers to the library as the helper would; in `ends` the connection has ended, and the next one has begun, before the thread that waits has woken.
 * In `starves` that thread does not run for longer than it would wait: it wakes with link.lock, which the arbiter has meanwhile. */
#include <assert.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "answering.h"
#include "bursting.h"

#undef NDEBUG

enum { ROUNDS = 20000, LOOKS = 200, STARVED_MS = 2400, LATER_MS = 100 };

static int arbiter;
static struct gpu *gpu;
static _Atomic uint32_t *features; /* of the arbiter's page */
static _Atomic unsigned requests; /* BEGIN, GROW, HOLD and CONVERT */
static _Atomic bool ends, starves; /* with the next answer */

static void answer_and_end(struct awaited *awaited)
{
    pthread_mutex_lock(&tangram.link.lock);
    tangram.link.grow_answer = tangram.link.shared_answer = (struct wire_leased){.refused = 0};
    tangram.link.context_answer = (struct wire_leased){.granted_bytes = MIB};
    awaited->answered = true;
    tangram.link.ended++;
    bound_lost(gpu);
    pthread_cond_broadcast(&tangram.link.changed);
    pthread_mutex_unlock(&tangram.link.lock);
}

static void sleep_ms(unsigned ms)
{
    assert(usleep(ms * 1000) == 0);
}

/* Then the thread that waits has time to give up. */
static void starve(struct awaited *awaited)
{
    pthread_mutex_lock(&tangram.link.lock);
    sleep_ms(2); /* the PENDING is later than the request */
    awaited->pending_ms = now_ms();
    sleep_ms(STARVED_MS);
    pthread_mutex_unlock(&tangram.link.lock);
    sleep_ms(LATER_MS);
}

static void *serve(void *unused)
{
    struct wire_packet packet;
    while (recv(arbiter, &packet, sizeof packet, 0) > 0) {
        const enum wire_type type = (enum wire_type)packet.header.type;
        const bool grows = type == WIRE_CONTEXT && packet.body.context.step == WIRE_GROW;
        const bool begins = type == WIRE_CONTEXT && packet.body.context.step == WIRE_BEGIN;
        const struct wire_packet leased = {.header = {.type = WIRE_LEASED, .seq = packet.header.seq}};
        if (!begins && !grows && type != WIRE_HOLD && type != WIRE_CONVERT)
            continue;
        struct awaited *const awaited = begins ? &tangram.link.context : grows ? &tangram.link.grow : &tangram.link.hold;
        atomic_fetch_add(&requests, 1);
        if (atomic_exchange(&starves, false))
            starve(awaited);
        if (atomic_exchange(&ends, false))
            answer_and_end(awaited);
        else
            assert(link_handle(&leased));
    }
    return unused;
}

static void set_up(void)
{
    gpu = bursting_gpu(0, 0);
    atomic_store(&gpu->limit_bytes, 1000 * MIB);
    atomic_store(&gpu->resident_limit_bytes, 1000 * MIB);
    features = connect_arbiter(&arbiter, serve);
    atomic_store(features, WIRE_UNDERSTANDS_OPEN | WIRE_UNDERSTANDS_GROW);
}

static uint64_t left_mib(void)
{
    return atomic_load(&tangram.bounds[gpu->at].left) / MIB;
}

static void what_is_granted_for_calls_is_requested_of_the_next_arbiter(void)
{
    assert(bound_begin(gpu, MIB) && atomic_exchange(&requests, 0) == 1 && left_mib() == 13);
    bound_end(gpu);
    assert(bound_settle(gpu) && left_mib() == 0);
    atomic_store(&ends, true);
    assert(bound_begin(gpu, MIB) && atomic_exchange(&requests, 0) == 2 && left_mib() == 13);
    bound_end(gpu);
    assert(bound_settle(gpu) && left_mib() == 0);
}

static void a_pending_that_was_heard_before_shortens_no_wait(void)
{
    atomic_store(&starves, true);
    assert(bound_begin(gpu, MIB) && atomic_exchange(&requests, 0) == 1 && left_mib() == 13);
    bound_end(gpu);
    assert(bound_settle(gpu) && left_mib() == 0);
}

/* Which has not measured what one takes, and answers with 0. */
static void what_is_granted_for_a_context_is_requested_of_the_next_arbiter(void)
{
    bool estimated = true;
    atomic_store(&ends, true);
    assert(link_context_begin(gpu, &estimated) == LINK_GRANTED && atomic_exchange(&requests, 0) == 2);
    assert(!estimated && atomic_load(&tangram.contexts.of[gpu->at].bytes) == 0);
}

static void what_is_opened_is_stated_to_the_next_arbiter(void)
{
    const uint8_t key[WIRE_HANDLE_BYTES] = {1};
    atomic_store(&ends, true);
    assert(shared_opened(gpu, WIRE_IPC, 1, PAGE, key) && atomic_exchange(&requests, 0) == 2);
}

static void what_is_converted_is_elastic_to_the_next_arbiter(void)
{
    atomic_store(&gpu->elastic_leased_bytes, 4 * MIB);
    atomic_store(&ends, true);
    assert(!lease_convert(gpu, 4 * MIB) && atomic_load(&gpu->elastic_leased_bytes) == 4 * MIB && atomic_exchange(&requests, 0) == 1);
    assert(lease_convert(gpu, 4 * MIB) && atomic_load(&gpu->elastic_leased_bytes) == 0 && atomic_exchange(&requests, 0) == 1);
}

static void an_answer_to_convert_has_its_time_once_the_process_runs(void)
{
    atomic_store(&gpu->elastic_leased_bytes, 4 * MIB);
    atomic_store(&starves, true);
    assert(lease_convert(gpu, 4 * MIB) && atomic_load(&gpu->elastic_leased_bytes) == 0 && atomic_exchange(&requests, 0) == 1);
}

static void starve_here(int signal)
{
    (void)signal;
    sleep_ms(STARVED_MS);
}

static void *starve_and_answer_discard(void *waits)
{
    sleep_ms(LATER_MS);
    assert(pthread_kill(*(pthread_t *)waits, SIGUSR1) == 0);
    sleep_ms(STARVED_MS + LATER_MS);
    atomic_store(&gpu->discarding_bytes, 0);
    return NULL;
}

static void an_answer_to_discard_has_its_time_once_the_process_runs(void)
{
    const struct sigaction starves_here = {.sa_handler = starve_here};
    pthread_t waits = pthread_self(), thread;
    assert(sigaction(SIGUSR1, &starves_here, NULL) == 0);
    atomic_store(&gpu->discarding_bytes, MIB);
    assert(pthread_create(&thread, NULL, starve_and_answer_discard, &waits) == 0);
    assert(discard_wait(gpu));
    pthread_join(thread, NULL);
}

static _Atomic bool is_inside, is_cancelled;

/* Its call of the driver is a cancellation point. */
static void *calls(void *unused)
{
    assert(bound_begin(gpu, MIB) && bound_begin(gpu, MIB));
    atomic_store(&is_inside, true);
    while (!atomic_load(&is_cancelled))
        sleep_ms(1);
    sleep_ms(1);
    bound_end(gpu);
    sleep_ms(1); /* inside the outer call still */
    bound_end(gpu);
    pthread_testcancel();
    return unused;
}

static void a_thread_that_is_cancelled_in_such_a_call_ends_it_first(void)
{
    pthread_t thread;
    void *result = NULL;
    int state;
    assert(pthread_create(&thread, NULL, calls, NULL) == 0);
    while (!atomic_load(&is_inside))
        sleep_ms(1);
    assert(bounds_inside() && pthread_cancel(thread) == 0);
    atomic_store(&is_cancelled, true);
    assert(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED && !bounds_inside());
    assert(!bound_begin(gpu, 2000 * MIB)); /* refused: it is no call */
    assert(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state) == 0 && state == PTHREAD_CANCEL_ENABLE && !bounds_inside());
    assert(bound_settle(gpu));
    atomic_store(&requests, 0);
}

static void *settles(void *ended)
{
    while (!atomic_load((_Atomic bool *)ended))
        bound_settle(gpu);
    return NULL;
}

/* While the helper reads a WELCOME, which is with link.lock. */
static void what_is_left_for_calls_does_not_return_once_it_was_lost(void)
{
    struct bound *bound = &tangram.bounds[gpu->at];
    _Atomic bool ended = false;
    pthread_t thread;
    atomic_store(&bound->inside, 1);
    assert(pthread_create(&thread, NULL, settles, &ended) == 0);
    for (unsigned round = 0; round < ROUNDS; round++) {
        pthread_mutex_lock(&tangram.link.lock);
        bound_granted(gpu, 10 * MIB);
        pthread_mutex_unlock(&tangram.link.lock);
        sched_yield();
        pthread_mutex_lock(&tangram.link.lock);
        bound_lost(gpu);
        for (unsigned look = 0; look < LOOKS; look++)
            assert(left_mib() == 0);
        pthread_mutex_unlock(&tangram.link.lock);
        assert(left_mib() == 0);
    }
    atomic_store(&ended, true);
    pthread_join(thread, NULL);
    atomic_store(&bound->inside, 0);
}

/* In the helper's place. */
static void *starve_and_bring_limits(void *unused)
{
    bool waits = false;
    while (!waits) {
        pthread_mutex_lock(&tangram.link.lock);
        waits = tangram.burst_link.until_ms != 0;
        if (waits)
            sleep_ms(STARVED_MS);
        pthread_mutex_unlock(&tangram.link.lock);
        sleep_ms(waits ? LATER_MS : 1);
    }
    pthread_mutex_lock(&tangram.link.lock);
    atomic_store(&gpu->limits_came, true);
    pthread_cond_broadcast(&tangram.link.changed);
    pthread_mutex_unlock(&tangram.link.lock);
    return unused;
}

static void limits_have_their_second_once_the_process_runs(void)
{
    pthread_t thread;
    atomic_fetch_or(features, WIRE_UNDERSTANDS_BURST);
    atomic_store(&gpu->limits_came, false);
    assert(pthread_create(&thread, NULL, starve_and_bring_limits, NULL) == 0);
    assert(burst_limits_came(gpu));
    pthread_join(thread, NULL);
}

static CUresult count_devices(int *count)
{
    *count = 2;
    return CUDA_SUCCESS;
}

/* The arbiter does not know the second one's pool yet. */
static void a_gpu_without_limits_leaves_the_other_its_burst(void)
{
    struct gpu *other = &tangram.grant.gpu[1];
    tangram.grant.gpus = 2;
    tangram.driver.cuDeviceGetCount = count_devices;
    atomic_store(&tangram.device_gpu[1], other);
    atomic_store(&tangram.only_gpu, NULL);
    atomic_store(&other->bursts, true);
    tangram.burst_link.until_ms = 1; /* long ago */
    atomic_store(&gpu->resident_limit_bytes, MIB);
    assert(!elastic_able(other) && elastic_reason() == ELASTIC_ABLE && elastic_able(gpu));
    atomic_store(&gpu->limits_came, false);
    assert(!elastic_able(gpu) && elastic_reason() == ELASTIC_NO_ARBITER);
}

int main(void)
{
    set_up();
    what_is_granted_for_a_context_is_requested_of_the_next_arbiter();
    what_is_granted_for_calls_is_requested_of_the_next_arbiter();
    a_pending_that_was_heard_before_shortens_no_wait();
    what_is_opened_is_stated_to_the_next_arbiter();
    what_is_converted_is_elastic_to_the_next_arbiter();
    an_answer_to_convert_has_its_time_once_the_process_runs();
    an_answer_to_discard_has_its_time_once_the_process_runs();
    a_thread_that_is_cancelled_in_such_a_call_ends_it_first();
    what_is_left_for_calls_does_not_return_once_it_was_lost();
    limits_have_their_second_once_the_process_runs();
    a_gpu_without_limits_leaves_the_other_its_burst();
    puts("ok");
    return 0;
}
