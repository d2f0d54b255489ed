/* link.c - the connection to the arbiter: how it is made, and which thread reads on it. Requests over it are in request.c.
 *
 * HELLO is sent when the driver is initialised, so that the arbiter has answered by the time memory is wanted. One thread reads at a time:
 * the helper, or, before there is one and where none can be started, the thread that waits for an answer.
 *
 * Three ways in which the arbiter does not answer
 *     away        nothing listens, or the connection ended. A request waits until it has been away for `wait_ms` of the page; all
 *                 threads share that wait, and after it each is refused at once until the arbiter is back.
 *     silent      it is connected, or has accepted our connection, and sends nothing for SILENT_MS. That is detected once: from then on,
 *                 until a packet comes, requests are refused at once. A measure that does not come for MEASURE_MS is detected once, too.
 *                 Time in which the waiting thread itself did not run does not count: the arbiter may have had no processor, either.
 *     rejecting   it answers HELLO with an ERROR. Requests are refused at once; the helper keeps trying.
 * What is leased stays usable in all of them.
 */
#include "process.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    SILENT_MS = 2000,       /* specified */
    WAIT_MS = 30000,        /* specified: where the arbiter's page gives no value */
    WAIT_MOST_MS = 600000,  /* guessed */
    PROMISE_MS = 500,       /* after HELLO; half of the time for which the arbiter reserves it: specified */
    SLICE_MS = 100,         /* after which a thread that waits sees whether it ran; guessed */
    RETRY_FIRST_MS = 5,     /* guessed */
    RETRY_MOST_MS = 200,    /* below the arbiter's grace after a start, in which it waits for statements */
    THREAD_AGAIN_MS = 1000, /* guessed: a limit on processes may be lifted */
    SEQ_MASK = 0x03ffffff
};

static struct link *const link_ = &tangram.link;

void link_wait_until(uint64_t deadline_ms)
{
    struct timespec at = {(time_t)(deadline_ms / 1000), (long)(deadline_ms % 1000) * 1000000};
    pthread_cond_timedwait(&link_->changed, &link_->lock, &at);
}

uint32_t link_next_seq(void)
{
    link_->seq = (link_->seq + 1) & SEQ_MASK;
    return link_->seq == 0 ? ++link_->seq : link_->seq;
}

bool link_send(enum wire_type type, const void *body, uint32_t body_bytes)
{
    return wire_send(&link_->end, type, link_next_seq(), body, body_bytes);
}

/* Locked. What becomes free once the arbiter has read it: a query of the free memory waits for the answer. */
bool link_give(enum wire_type type, const void *body, uint32_t body_bytes)
{
    uint32_t seq = link_next_seq() | WIRE_SEQ_GIVEN;
    bool sent = wire_send(&link_->end, type, seq, body, body_bytes);
    if (sent)
        atomic_store(&link_->given_seq, seq);
    return sent;
}

bool link_drop(const struct wire_shared *message)
{
    return link_give(WIRE_DROP, message, sizeof *message);
}

/* What this process leases, in full: a restarted arbiter adopts it as it is. */
bool link_state_use(struct gpu *gpu)
{
    uint64_t leased = lease_leased_bytes(gpu), unused = lease_unused_bytes(gpu);
    struct wire_usage usage = {
        .gpu = (uint32_t)atomic_load(&gpu->wire),
        .managed_mib = lease_managed_mib(gpu),
        .used_bytes = leased > unused ? leased - unused : 0,
        .leased_bytes = leased,
    };
    atomic_store(&gpu->stated_bytes, usage.used_bytes);
    atomic_store(&gpu->stated_managed_mib, usage.managed_mib);
    return link_send(WIRE_USAGE, &usage, sizeof usage);
}

bool link_send_context(struct gpu *gpu, enum wire_step step, uint32_t seq)
{
    struct wire_context context = {.gpu = (uint32_t)atomic_load(&gpu->wire),
                                   .step = (uint32_t)step,
                                   .estimate_bytes = atomic_load(&tangram.contexts.of[gpu->at].bytes)};
    return wire_send(&link_->end, WIRE_CONTEXT, seq, &context, sizeof context);
}

static void map_page(int fd)
{
    void *page = wire_map_page((void *)(uintptr_t)atomic_load(&link_->page), fd);
    if (page != MAP_FAILED)
        atomic_store(&link_->page, (const _Atomic uint64_t *)page);
    link_->blind = fd < 0;
}

/* The first page is needed to know what the arbiter understands. A later one contains nothing that limits memory. */
static bool can_be_welcomed(int page_fd)
{
    return page_fd >= 0 || atomic_load(&link_->page) != NULL;
}

/* Locked. What this process has of a GPU, sent to an arbiter that may be new. */
static bool restate(struct gpu *gpu)
{
    struct gpu_contexts *contexts = &tangram.contexts.of[gpu->at];
    if (lease_leased_bytes(gpu) > 0 && !link_state_use(gpu))
        return false;
    return shared_restate(gpu) &&
           (atomic_load(&contexts->bytes) == 0 || link_send_context(gpu, WIRE_DONE, link_next_seq() | WIRE_SEQ_CONTEXT));
}

/* Locked. The arbiter's limits are the ones that are enforced; the grant names the GPUs. */
static bool welcomed(const struct wire_welcome *in)
{
    for (unsigned i = 0; i < tangram.grant.gpus; i++) {
        struct gpu *gpu = &tangram.grant.gpu[i];
        atomic_store(&gpu->wire, -1);
        atomic_store(&tangram.contexts.of[i].chunk_seq, 0);
        bound_lost(gpu);
        for (uint32_t w = 0; w < in->gpus; w++) {
            if (memcmp(in->gpu[w].uuid, gpu->uuid, sizeof gpu->uuid) != 0)
                continue;
            burst_guaranteed(gpu, in->gpu[w].limit_bytes);
            atomic_store(&gpu->wire, (int)w);
            if (!restate(gpu))
                return false;
        }
    }
    link_->stage = LINK_CONNECTED;
    link_->rejected = false;
    link_->lost_at_ms = 0;
    link_->states_reported = 0;
    pthread_cond_broadcast(&link_->changed);
    return state_report();
}

/* Locked. */
static bool greet(uint32_t flags)
{
    struct wire_hello hello = {.pid = (uint32_t)getpid(), .flags = flags, .library_version = TANGRAM_VERSION};
    uint64_t now = now_ms();
    if (link_->lost_at_ms == 0)
        link_->lost_at_ms = now;
    if (now < link_->again_ms)
        return false;
    link_->pause_ms = link_->pause_ms == 0 ? RETRY_FIRST_MS : link_->pause_ms * 2 > RETRY_MOST_MS ? RETRY_MOST_MS : link_->pause_ms * 2;
    link_->again_ms = now + link_->pause_ms;
    if (!wire_connect(&link_->end, tangram.grant.socket, &link_->past))
        return false;
    if (!wire_send(&link_->end, WIRE_HELLO, 1, &hello, sizeof hello)) {
        link_->past = wire_ended(&link_->end);
        return false;
    }
    link_->stage = LINK_GREETED;
    link_->greeted_at_ms = now;
    link_->seq = 1;
    return true;
}

bool link_try(void)
{
    return link_->stage != LINK_APART || greet(0);
}

void link_greet(void)
{
    struct quiet quiet = quiet_begin();
    if (grant_ready() == GRANT_GOOD) {
        process_check();
        pthread_mutex_lock(&link_->lock);
        if (link_->stage == LINK_APART && !link_->reading && !link_->pumping && link_->lost_at_ms == 0) {
            link_->promised_until_ms = now_ms() + PROMISE_MS;
            link_->ahead = greet(atomic_load(&tangram.contexts.one_made) ? 0 : WIRE_FOR_CONTEXT);
        }
        pthread_mutex_unlock(&link_->lock);
    }
    quiet_end(quiet);
}

/* Locked, by the thread that reads. */
static void lost(void)
{
    bool was_connected = link_->stage == LINK_CONNECTED;
    link_->past = wire_ended(&link_->end);
    link_->stage = LINK_APART;
    link_->ended++;
    atomic_store(&link_->silent, false);
    atomic_store(&link_->measures_late, false);
    atomic_store(&link_->given_seq, 0); /* the next arbiter gets the whole state */
    if (was_connected) {
        link_->lost_at_ms = now_ms();
        link_->pause_ms = 0;
        link_->again_ms = 0;
    }
    pthread_cond_broadcast(&link_->changed);
}

/* The first packet on a connection. */
static bool answered_hello(const struct wire_packet *packet, int passed)
{
    bool good = packet->header.type == WIRE_WELCOME && can_be_welcomed(passed);
    if (packet->header.type == WIRE_ERROR)
        warn(WARN_REJECTED, "the arbiter rejects this process (%.*s): GPU memory is refused", (int)sizeof packet->body.error.text,
             packet->body.error.text);
    pthread_mutex_lock(&link_->lock);
    if (good) {
        map_page(passed);
        link_->promised_bytes = packet->body.welcome.promised_mib * MIB;
        good = atomic_load(&link_->page) != NULL && welcomed(&packet->body.welcome);
    } else {
        link_->rejected = packet->header.type == WIRE_ERROR;
    }
    pthread_mutex_unlock(&link_->lock);
    if (good)
        spare_sockets_fill();
    return good;
}

void link_look_for_page(void)
{
    if (!link_->blind || !wire_has_descriptor())
        return;
    pthread_mutex_lock(&link_->lock);
    if (link_->stage == LINK_CONNECTED)
        lost();
    pthread_mutex_unlock(&link_->lock);
}

/* What brings descriptors, or needs the driver. */
static bool handled_passing(struct wire_passed *passed)
{
    const struct wire_packet *packet = &link_->packet;
    if (packet->header.type == WIRE_EXPORTED)
        passing_came(packet->header.seq, &packet->body.exported, passed);
    else if (packet->header.type == WIRE_EXPORT)
        ipc_export(packet->header.seq, &packet->body.handle);
    return packet->header.type == WIRE_EXPORTED || packet->header.type == WIRE_EXPORT;
}

void link_read(void)
{
    struct wire_passed passed;
    bool good = wire_receive_all(&link_->end, &link_->packet, &passed);
    if (good) {
        atomic_store(&link_->silent, false);
        atomic_store(&link_->measures_late, false);
        if (link_->stage == LINK_GREETED)
            good = answered_hello(&link_->packet, passed.count > 0 ? passed.fd[0] : -1);
        else
            good = handled_passing(&passed) || link_handle(&link_->packet);
    }
    wire_passed_close(&passed);
    if (good)
        return;
    pthread_mutex_lock(&link_->lock);
    lost();
    pthread_mutex_unlock(&link_->lock);
}

/* Locked on entry and exit: one step of a thread that reads in the helper's place, until a deadline. */
void link_pump(uint64_t deadline_ms)
{
    if (process_is_guest()) {
        link_wait_until(deadline_ms);
        return;
    }
    link_->pumping = true;
    bool there = link_try();
    uint64_t now = now_ms(), until_ms = there || deadline_ms < link_->again_ms ? deadline_ms : link_->again_ms;
    if (there) {
        struct wire_end end = link_->end;
        pthread_mutex_unlock(&link_->lock);
        if (wire_readable(&end, until_ms > now ? until_ms - now : 0))
            link_read();
        pthread_mutex_lock(&link_->lock);
    } else if (until_ms > now) {
        link_wait_until(until_ms);
    }
    link_->pumping = false;
    pthread_cond_broadcast(&link_->changed);
}

uint64_t link_wait_slice(uint64_t deadline_ms, void (*wait)(uint64_t until_ms))
{
    const uint64_t begun_ms = now_ms(), slice_ms = begun_ms + SLICE_MS;
    const uint64_t until_ms = deadline_ms < begun_ms ? begun_ms : deadline_ms < slice_ms ? deadline_ms : slice_ms;
    wait(until_ms);
    const uint64_t now = now_ms();
    return now > until_ms ? now - until_ms : 0;
}

uint64_t link_wait_for_packet(uint64_t deadline_ms)
{
    return link_wait_slice(deadline_ms, link_->reading || link_->pumping ? link_wait_until : link_pump);
}

/* Locked. How long to wait for an arbiter that is away: by the program's environment, else by what the arbiter announced before. It
 * limits only the wait. */
static uint64_t wait_ms(void)
{
    if (link_->wanted_ms > 0)
        return link_->wanted_ms;
    uint32_t reported_ms = link_page_word(WIRE_GPU_TIME_AT + offsetof(struct wire_gpu_time, wait_ms));
    return reported_ms == 0 ? WAIT_MS : reported_ms;
}

/* Locked. Until when it is worth waiting for a connection. */
static uint64_t worth_until_ms(void)
{
    if (link_->stage == LINK_GREETED)
        return link_->greeted_at_ms + SILENT_MS;
    if (link_->rejected)
        return 0;
    return (link_->lost_at_ms == 0 ? now_ms() : link_->lost_at_ms) + wait_ms();
}

static void set_up(void)
{
    pthread_condattr_t clock;
    if (link_->clocked)
        return;
    const char *wanted = getenv("TANGRAM_WAIT_MS");
    unsigned long ms = wanted != NULL ? strtoul(wanted, NULL, 10) : 0;
    link_->wanted_ms = ms > WAIT_MOST_MS ? WAIT_MOST_MS : (uint32_t)ms;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&link_->changed, &clock);
    pthread_condattr_destroy(&clock);
    link_->clocked = true;
}

/* Locked. `most_ms`: no longer than that, whatever it is worth. */
static bool connected_in(uint64_t most_ms)
{
    uint64_t begun_ms = now_ms(), late_ms = 0;
    bool looked = false;
    set_up();
    if (link_->ahead) /* nothing waited for the WELCOME until now: the driver was busy */
        link_->greeted_at_ms = begun_ms;
    link_->ahead = false;
    while (link_->stage != LINK_CONNECTED) {
        uint64_t until_ms = worth_until_ms() + (link_->stage == LINK_GREETED ? late_ms : 0);
        if (until_ms > begun_ms + most_ms)
            until_ms = begun_ms + most_ms;
        if (now_ms() >= until_ms && (looked || link_->reading))
            return false;
        if (!link_->reading && process_is_guest()) /* it cannot bring that about */
            return false;
        looked = true;
        late_ms += link_wait_for_packet(until_ms);
    }
    return true;
}

bool link_connected_in_time(void)
{
    return connected_in(UINT32_MAX);
}

bool link_is_silent(void)
{
    if ((atomic_load(&link_->silent) || atomic_load(&link_->measures_late)) && !link_->reading && !link_->pumping)
        link_pump(0); /* no other thread would notice that it answers again */
    return atomic_load(&link_->silent);
}

bool link_wait(void)
{
    struct quiet quiet = quiet_begin();
    process_check();
    pthread_mutex_lock(&link_->lock);
    bool there = connected_in(SILENT_MS) && !link_is_silent();
    link_have_helper();
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
    return there;
}

void link_have_helper(void)
{
    set_up();
    if (link_->threaded || link_->pumping || process_is_guest() || now_ms() < link_->thread_again_ms) /* a thread that pumps makes it when it has its answer */
        return;
    bool made = helper_start();
    if (!made) {
        link_->thread_again_ms = now_ms() + THREAD_AGAIN_MS;
        root_keep_folder();
        warn(WARN_NO_THREAD, "no thread can be started here: GPU memory stays limited, and GPU time is limited less exactly");
    }
    state_set(WIRE_NO_THREAD, !made);
    if (link_->stage == LINK_CONNECTED)
        state_report();
}

bool link_has_helper(void)
{
    return (atomic_load_explicit(&tangram.states, memory_order_relaxed) & UINT32_C(1) << WIRE_NO_THREAD) == 0;
}

void link_forget(void)
{
    wire_close(&link_->end);
    *link_ = (struct link)LINK_NEVER_MET;
}
