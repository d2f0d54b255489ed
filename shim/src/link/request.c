/* request.c - what the threads of the program request from the arbiter and report to it.
 *
 * Each request is one packet and one answer, awaited for a bounded time. If the arbiter ends meanwhile, the request is sent again
 * when it is back; nothing is sent to one that is silent. link.lock is free during the wait.
 */
#include "process.h"

#include <errno.h>
#include <pthread.h>

enum {
    PATIENCE_MS = 2000,          /* for an answer; specified */
    PENDING_MOST_MS = 3605000,   /* while the arbiter answers PENDING, where no file `burst` has another; specified: more than any wait_s */
    MEASURE_MS = 500,   /* for NVML, of which only the first process on a node waits; guessed */
    TRIES_MOST = 8      /* connections that end before they answer; guessed */
};

struct tries {
    unsigned count;
    uint32_t ended; /* as it was at the last query */
};

static struct link *const link_ = &tangram.link;

static bool is_connected(void)
{
    return link_->stage == LINK_CONNECTED;
}

/* How long a request may wait while the arbiter reports that it waits for other containers. */
static uint64_t pending_most_ms(void)
{
    const uint32_t ms = atomic_load(&tangram.grant.pending_most_ms);
    return ms > 0 ? ms : PENDING_MOST_MS;
}

/* Locked. The arbiter has that request in its queue still, and accepts no other: the connection ends, and with it the request. */
static void give_up(struct awaited *awaited)
{
    awaited->overdue = true;
    wire_hang_up(&link_->end);
}

/* Locked. Until the answer is there: false when it does not come in time or at all. Each PENDING renews that time. A helper may have connected to the next arbiter before this
 * thread wakes: the connection of the query has ended all the same. */
static bool answered_in_time(struct awaited *awaited, int patience_ms)
{
    const uint32_t ended = link_->ended;
    const uint64_t begun_ms = now_ms(), since_ms = awaited->since_ms > 0 ? awaited->since_ms : begun_ms;
    uint64_t heard_ms = begun_ms, deadline_ms = begun_ms + (uint64_t)patience_ms, most_ms = since_ms + pending_most_ms();
    most_ms = most_ms > deadline_ms ? most_ms : deadline_ms;
    while (!awaited->answered && link_->ended == ended && now_ms() < deadline_ms) {
        deadline_ms += link_wait_for_packet(deadline_ms);
        if (awaited->pending_ms > heard_ms) {
            heard_ms = awaited->pending_ms;
            const uint64_t renewed_ms = heard_ms + (uint64_t)patience_ms;
            deadline_ms = deadline_ms > renewed_ms ? deadline_ms : renewed_ms; /* it may have been heard before this thread did not run */
        }
        deadline_ms = deadline_ms < most_ms ? deadline_ms : most_ms;
    }
    awaited->seq = 0;
    if (!awaited->answered && link_->ended == ended && now_ms() >= most_ms)
        give_up(awaited);
    else if (!awaited->answered && link_->ended == ended && patience_ms >= PATIENCE_MS)
        atomic_store(&link_->silent, true);
    return awaited->answered;
}

/* Can an answer come? Not when the arbiter reads nothing. Where it has ended, waiting for the answer is waiting until the thread that reads finds that. */
static bool reached(bool sent)
{
    return sent || errno != EAGAIN;
}

/* Locked. What is in no lease of this process any more. Without an arbiter it is unused lease, and stated to the next one. */
static void give_back(struct gpu *gpu, enum wire_lease_kind kind, uint64_t bytes)
{
    const struct wire_amount back = {.gpu = (uint32_t)atomic_load(&gpu->wire), .kind = kind, .bytes = bytes};
    if (is_connected() && link_give(WIRE_RETURN, &back, sizeof back))
        atomic_fetch_sub(leased_of(gpu, kind), bytes);
    else
        atomic_fetch_add(unused_of(gpu, kind), bytes);
}

/* Locked. Returns up to so much of the unused lease. Without an arbiter it stays leased. */
static void return_unused(struct gpu *gpu, enum wire_lease_kind kind, uint64_t most_bytes)
{
    if (!is_connected() || atomic_load(unused_of(gpu, kind)) == 0)
        return;
    atomic_fetch_add(&link_->gives, 1); /* before it is taken out */
    give_back(gpu, kind, lease_take_unused(gpu, kind, most_bytes));
}

/* Locked. */
static void return_both(struct gpu *gpu)
{
    return_unused(gpu, WIRE_RESIDENT, UINT64_MAX);
    return_unused(gpu, WIRE_ELASTIC, UINT64_MAX);
}

/* Locked. Until the answer to that number has come, and it is 0. False when none was on its way. */
static bool came(_Atomic uint32_t *seq)
{
    if (atomic_load(seq) == 0)
        return false;
    const uint32_t ended = link_->ended;
    uint64_t deadline_ms = now_ms() + (link_is_silent() ? 0 : PATIENCE_MS);
    while (atomic_load(seq) != 0 && is_connected() && link_->ended == ended && now_ms() < deadline_ms)
        deadline_ms += link_wait_for_packet(deadline_ms);
    if (atomic_load(seq) != 0 && is_connected() && link_->ended == ended)
        atomic_store(&link_->silent, true);
    atomic_store(seq, 0);
    return true;
}

/* Locked. A chunk was requested when the context was made, and may be on its way: wait for it. False when none is. */
static bool chunk_came(struct gpu *gpu)
{
    return came(&tangram.contexts.of[gpu->at].chunk_seq);
}

void link_settle(struct gpu *gpu)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&link_->lock);
    chunk_came(gpu);
    came(&link_->given_seq);
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
}

/* Locked. Is a request to be sent, or, because the connection ended before its answer came, to be sent again? */
static bool should_send(struct tries *tries)
{
    if (tries->count > 0 && tries->ended == link_->ended)
        return false; /* it was sent, and not answered in time */
    if (tries->count++ == TRIES_MOST || !link_connected_in_time() || link_is_silent())
        return false;
    tries->ended = link_->ended;
    return true;
}

/* Locked, connected. One request. LINK_ABSENT: it was not answered; send it again if the arbiter went away meanwhile. */
static enum link_answer request_once(struct gpu *gpu, enum wire_lease_kind kind, uint64_t need_bytes, uint64_t want_bytes, uint64_t since_ms)
{
    struct wire_lease lease = {.gpu = (uint32_t)atomic_load(&gpu->wire), .kind = kind, .need_bytes = need_bytes, .want_bytes = want_bytes};
    link_->lease = (struct awaited){.seq = link_next_seq() | (kind == WIRE_ELASTIC ? WIRE_SEQ_ELASTIC : 0)};
    if (link_page_word(WIRE_GPU_TIME_AT + offsetof(struct wire_gpu_time, features)) & WIRE_UNDERSTANDS_WAITED) {
        const uint64_t waited_ms = now_ms() - since_ms;
        lease.kind |= (uint32_t)(waited_ms < WIRE_WAITED_MOST_MS ? waited_ms : WIRE_WAITED_MOST_MS) << WIRE_WAITED_SHIFT;
        link_->lease.since_ms = since_ms; /* an earlier arbiter lets each request wait */
    }
    atomic_store(&gpu->ceiling_by, WIRE_GRANTED);
    bool sent = wire_send(&link_->end, WIRE_LEASE, link_->lease.seq, &lease, sizeof lease);
    if (!reached(sent) || !answered_in_time(&link_->lease, PATIENCE_MS))
        return link_->lease.overdue ? LINK_REFUSED : LINK_ABSENT;
    if (link_->lease_answer.refused || link_->lease_answer.granted_bytes < need_bytes)
        return LINK_REFUSED;
    atomic_fetch_add(unused_of(gpu, kind), link_->lease_answer.granted_bytes - need_bytes);
    return LINK_GRANTED;
}

/* Requests at least `need` bytes. Granted: `need` is the caller's, the rest is unused lease. The unused lease is returned first, in every try: an arbiter that
 * was away at the start would count it as leased. That of the other kind is, too: else a request could be refused, or memory of others moved, for nothing. */
enum link_answer link_request(struct gpu *gpu, enum wire_lease_kind kind, uint64_t need_bytes, uint64_t want_bytes, uint64_t *since_ms)
{
    uint64_t before_ms;
    enum link_answer answer = LINK_ABSENT;
    struct quiet quiet = quiet_begin();
    process_check();
    pthread_mutex_lock(&link_->lock);
    for (struct tries tries = {0}; answer == LINK_ABSENT && (before_ms = now_ms(), should_send(&tries));) {
        *since_ms += now_ms() - before_ms;
        if (atomic_load(&gpu->wire) < 0) {
            answer = LINK_REFUSED; /* the arbiter's grant does not name it */
        } else if (chunk_came(gpu) && kind == WIRE_RESIDENT && lease_take(gpu, need_bytes)) {
            answer = LINK_GRANTED;
        } else {
            return_both(gpu);
            if (is_connected())
                answer = request_once(gpu, kind, need_bytes, want_bytes, *since_ms);
        }
    }
    link_have_helper();
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
    return answer;
}

void link_return(struct gpu *gpu, enum wire_lease_kind kind, uint64_t most_bytes)
{
    if (most_bytes == 0)
        return;
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&link_->lock);
    return_unused(gpu, kind, most_bytes);
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
}

void link_return_used(struct gpu *gpu, enum wire_lease_kind kind, uint64_t bytes)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&link_->lock);
    atomic_fetch_add(&link_->gives, 1);
    give_back(gpu, kind, bytes);
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
}

void link_return_all(struct gpu *gpu)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&link_->lock);
    return_both(gpu);
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
}

/* Locked. The first allocation will want a lease: request it while the driver is busy with the context. */
static void request_chunk_ahead(struct gpu *gpu)
{
    struct gpu_contexts *contexts = &tangram.contexts.of[gpu->at];
    struct wire_lease lease = {.gpu = (uint32_t)atomic_load(&gpu->wire), .want_bytes = lease_chunk_bytes(gpu)};
    if (!link_has_helper() || atomic_load(&contexts->chunk_seq) != 0 || lease_leased_bytes(gpu) != 0)
        return;
    uint32_t seq = link_next_seq();
    if (wire_send(&link_->end, WIRE_LEASE, seq, &lease, sizeof lease))
        atomic_store(&contexts->chunk_seq, seq);
}

/* Locked. The arbiter reserves a context's memory for a process that has just initialised the driver: a BEGIN that is sent before that
 * reservation ends is granted without waiting for its answer. Bytes; 0 = nothing was reserved, or it is too late. It is used up either way. */
static uint64_t redeem_promise(struct gpu *gpu)
{
    bool promised = atomic_load(&gpu->wire) == 0 && now_ms() < link_->promised_until_ms;
    uint64_t bytes = promised ? link_->promised_bytes : 0;
    link_->promised_bytes = 0;
    return bytes;
}

/* Locked, connected. One request, as `request_once`. What an arbiter granted whose connection has ended since is not reserved by the next one. */
static enum link_answer begin_once(struct gpu *gpu, bool *estimated)
{
    const uint32_t ended = link_->ended;
    link_->context = (struct awaited){.seq = link_next_seq() | WIRE_SEQ_CONTEXT};
    bool sent = link_send_context(gpu, WIRE_BEGIN, link_->context.seq);
    if (!reached(sent))
        return LINK_ABSENT;
    link_have_helper(); /* now, while the arbiter decides */
    request_chunk_ahead(gpu);
    uint64_t granted_bytes = sent ? redeem_promise(gpu) : 0;
    if (granted_bytes > 0) {
        link_->context.seq = 0; /* no thread waits for the answer */
    } else if (!answered_in_time(&link_->context, PATIENCE_MS) || link_->ended != ended) {
        return LINK_ABSENT;
    } else if (link_->context_answer.refused) {
        return LINK_REFUSED;
    } else {
        granted_bytes = link_->context_answer.granted_bytes;
    }
    *estimated = granted_bytes > 0;
    atomic_store(&tangram.contexts.of[gpu->at].bytes, granted_bytes); /* reported to the next arbiter, should this one end before it has measured */
    return LINK_GRANTED;
}

/* Before the first context on a GPU. *estimated: the arbiter knew what it will take, and has reserved that. */
enum link_answer link_context_begin(struct gpu *gpu, bool *estimated)
{
    enum link_answer answer = LINK_ABSENT;
    struct quiet quiet = quiet_begin();
    process_check();
    pthread_mutex_lock(&link_->lock);
    for (struct tries tries = {0}; answer == LINK_ABSENT && should_send(&tries);)
        answer = atomic_load(&gpu->wire) < 0 ? LINK_REFUSED : begin_once(gpu, estimated);
    link_have_helper();
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
    return answer;
}

static bool say_grow(struct gpu *gpu, enum wire_step step, uint32_t seq, uint64_t bytes)
{
    struct wire_context message = {.gpu = (uint32_t)atomic_load(&gpu->wire), .step = (uint32_t)step, .estimate_bytes = bytes};
    return wire_send(&link_->end, WIRE_CONTEXT, seq, &message, sizeof message);
}

/* Locked, connected. One request, as `begin_once`. */
static enum link_answer grow_once(struct gpu *gpu, uint64_t bytes, bool *held)
{
    const uint32_t ended = link_->ended;
    *held = (link_page_word(WIRE_GPU_TIME_AT + offsetof(struct wire_gpu_time, features)) & WIRE_UNDERSTANDS_GROW) != 0;
    if (!*held)
        return LINK_GRANTED;
    link_->grow = (struct awaited){.seq = link_next_seq() | WIRE_SEQ_GROW};
    if (!reached(say_grow(gpu, WIRE_GROW, link_->grow.seq, bytes)) || !answered_in_time(&link_->grow, PATIENCE_MS) || link_->ended != ended)
        return LINK_ABSENT;
    return link_->grow_answer.refused ? LINK_REFUSED : LINK_GRANTED;
}

enum link_answer link_grow(struct gpu *gpu, uint64_t bytes, uint64_t spare_bytes)
{
    enum link_answer answer = LINK_ABSENT;
    bool held = false; /* else granted by an arbiter that knows no bounds */
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&link_->lock);
    for (struct tries tries = {0}; answer == LINK_ABSENT && should_send(&tries);)
        answer = atomic_load(&gpu->wire) < 0 ? LINK_REFUSED : grow_once(gpu, bytes, &held);
    if (answer == LINK_GRANTED && held)
        bound_granted(gpu, spare_bytes);
    link_have_helper();
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
    return answer;
}

/* Use is stated first: what NVML counts is read beside it. `unneeded`: of what the arbiter reserved, so much no call was made for. */
void link_grown(struct gpu *gpu, uint64_t unneeded_bytes)
{
    if (is_connected() && atomic_load(&gpu->wire) >= 0 && link_state_use(gpu))
        say_grow(gpu, WIRE_GROWN, link_next_seq() | WIRE_SEQ_GROW, unneeded_bytes);
}

/* Locked, connected. One request, as `request_once`. An answer that comes too late is undone; the next arbiter knows of none. */
static enum link_answer shared_once(struct gpu *gpu, struct wire_shared *message)
{
    const uint32_t ended = link_->ended;
    message->gpu = (uint32_t)atomic_load(&gpu->wire);
    link_->hold = (struct awaited){.seq = link_next_seq() | WIRE_SEQ_HOLD};
    if (!reached(wire_send(&link_->end, WIRE_HOLD, link_->hold.seq, message, sizeof *message)))
        return LINK_ABSENT;
    const bool answered = answered_in_time(&link_->hold, PATIENCE_MS);
    if (link_->ended != ended)
        return LINK_ABSENT;
    if (answered)
        return link_->shared_answer.refused ? LINK_REFUSED : LINK_GRANTED;
    if (is_connected())
        link_drop(message);
    return LINK_ABSENT;
}

/* Memory was opened that another process may have made. */
enum link_answer link_shared(struct gpu *gpu, struct wire_shared *message)
{
    enum link_answer answer = LINK_ABSENT;
    process_check();
    pthread_mutex_lock(&link_->lock);
    for (struct tries tries = {0}; answer == LINK_ABSENT && should_send(&tries);)
        answer = atomic_load(&gpu->wire) < 0 ? LINK_REFUSED : shared_once(gpu, message);
    link_have_helper();
    if (answer != LINK_GRANTED)
        pthread_mutex_unlock(&link_->lock);
    return answer;
}

/* After the first context was made or the last is gone. An arbiter that was late with a measure is not waited for again until it has sent
 * something. */
void link_context_end(struct gpu *gpu, enum wire_step step, bool wait)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&link_->lock);
    if (is_connected() && !link_is_silent() && atomic_load(&gpu->wire) >= 0) {
        uint32_t seq = link_next_seq() | WIRE_SEQ_CONTEXT;
        wait = wait && !atomic_load(&link_->measures_late);
        if (wait)
            link_->measured = (struct awaited){.seq = seq};
        if (link_send_context(gpu, step, seq) && wait && !answered_in_time(&link_->measured, MEASURE_MS))
            atomic_store(&link_->measures_late, true);
    }
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
}

/* The container's processes on a GPU. False when the arbiter does not answer. One thread at a time; the caller is quiet. */
bool link_processes(struct gpu *gpu, struct wire_process *out, uint32_t capacity, uint32_t *count)
{
    bool known = false;
    if (!link_wait())
        return false;
    pthread_mutex_lock(&link_->listing);
    pthread_mutex_lock(&link_->lock);
    if (is_connected() && atomic_load(&gpu->wire) >= 0) {
        struct wire_gpu_only wanted = {.gpu = (uint32_t)atomic_load(&gpu->wire)};
        link_->processes = (struct awaited){.seq = link_next_seq()};
        link_->listed = out;
        link_->listed_capacity = capacity;
        known = wire_send(&link_->end, WIRE_PROCESSES, link_->processes.seq, &wanted, sizeof wanted) &&
                answered_in_time(&link_->processes, PATIENCE_MS);
        link_->listed = NULL;
        *count = link_->listed_count;
    }
    pthread_mutex_unlock(&link_->lock);
    pthread_mutex_unlock(&link_->listing);
    return known;
}
