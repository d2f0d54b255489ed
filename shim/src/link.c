/* link.c - the connection to the arbiter, and what is asked over it.
 *
 * HELLO is said when the driver is initialised, so that the arbiter has answered by the time memory is wanted. The first
 * answers are read by the thread that waits for them, which saves it waiting for another to wake up; then a thread of our own
 * reads (reader.c). While the arbiter is away what is leased stays usable and nothing new is leased; who asks waits until it has
 * been away for RESTART_MS (PATIENCE_MS if it was never there), and after that is refused at once.
 */
#include "process.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    PATIENCE_MS = 2000, /* for an arbiter that was never met, and for an answer; specified */
    RESTART_MS = 5000,  /* for one that went away: a restarted container is back by then; guessed */
    MEASURE_MS = 500,   /* for NVML, of which only the first process on a node waits; guessed */
    SEQ_MASK = 0x0fffffff
};

static struct link *const link_ = &tangram.link;

static void wait_until(uint64_t deadline_ms)
{
    struct timespec at = {(time_t)(deadline_ms / 1000), (long)(deadline_ms % 1000) * 1000000};
    pthread_cond_timedwait(&link_->changed, &link_->lock, &at);
}

static uint32_t next_seq(void)
{
    link_->seq = (link_->seq + 1) & SEQ_MASK;
    return link_->seq == 0 ? ++link_->seq : link_->seq;
}

bool link_say(enum wire_type type, const void *body, uint32_t body_bytes)
{
    return wire_send(link_->fd, type, next_seq(), body, body_bytes);
}

/* Locked. What is free for this process once the arbiter has read it: who asks how much that is waits for the answer. */
static bool give(enum wire_type type, const void *body, uint32_t body_bytes)
{
    uint32_t seq = next_seq() | WIRE_SEQ_GIVEN;
    bool sent = wire_send(link_->fd, type, seq, body, body_bytes);
    if (sent)
        atomic_store(&link_->given_seq, seq);
    return sent;
}

bool link_drop(const struct wire_shared *said)
{
    return give(WIRE_DROP, said, sizeof *said);
}

bool link_readable(int fd, int ms)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    int rc;
    do
        rc = poll(&ready, 1, ms);
    while (rc < 0 && errno == EINTR);
    return rc > 0;
}

/* What this process holds, in full: the arbiter takes it as it is when it has just come back. */
bool link_state_use(struct card *card)
{
    uint64_t leased = atomic_load(&card->leased_bytes), unused = atomic_load(&card->unused_bytes);
    struct wire_usage usage = {
        .card = (uint32_t)atomic_load(&card->wire),
        .used_bytes = leased > unused ? leased - unused : 0,
        .leased_bytes = leased,
    };
    atomic_store(&card->stated_bytes, usage.used_bytes);
    return wire_send(link_->fd, WIRE_USAGE, next_seq(), &usage, sizeof usage);
}

/* Locked. */
static bool say_context(struct card *card, enum wire_step step, uint32_t seq)
{
    struct wire_context context = {.card = (uint32_t)atomic_load(&card->wire),
                                   .step = (uint32_t)step,
                                   .estimate_bytes = atomic_load(&tangram.contexts.of[card->at].bytes)};
    return wire_send(link_->fd, WIRE_CONTEXT, seq, &context, sizeof context);
}

static void map_page(int fd)
{
    void *old = (void *)(uintptr_t)atomic_load(&link_->page);
    void *page = mmap(old, WIRE_PAGE_BYTES, PROT_READ, MAP_SHARED | (old ? MAP_FIXED : 0), fd, 0);
    if (page != MAP_FAILED)
        atomic_store(&link_->page, (const _Atomic uint64_t *)page);
}

/* Locked. The arbiter's limits are the ones that hold; the grant said which cards are meant. */
static bool welcome(const struct wire_welcome *in)
{
    for (unsigned i = 0; i < tangram.grant.cards; i++) {
        struct card *card = &tangram.grant.card[i];
        struct card_contexts *contexts = &tangram.contexts.of[i];
        atomic_store(&card->wire, -1);
        atomic_store(&contexts->chunk_seq, 0);
        for (uint32_t w = 0; w < in->cards; w++) {
            if (memcmp(in->card[w].uuid, card->uuid, sizeof card->uuid) != 0)
                continue;
            atomic_store(&card->limit_bytes, in->card[w].limit_bytes);
            atomic_store(&card->wire, (int)w);
            if (atomic_load(&card->leased_bytes) > 0 && !link_state_use(card))
                return false;
            if (!holds_restate(card))
                return false;
            if (atomic_load(&contexts->bytes) > 0 && !say_context(card, WIRE_DONE, next_seq() | WIRE_SEQ_CONTEXT))
                return false;
        }
    }
    link_->connected = true;
    pthread_cond_broadcast(&link_->changed);
    return true;
}

/* A connection that has said HELLO, or -1. */
static int say_hello(void)
{
    struct wire_hello hello = {.pid = (uint32_t)getpid(), .library_version = TANGRAM_VERSION};
    int fd = wire_connect(tangram.grant.socket);
    if (fd >= 0 && !wire_send(fd, WIRE_HELLO, 1, &hello, sizeof hello)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* Takes fd over. *hung_up: nobody read the HELLO. */
static bool welcomed(int fd, int patience_ms, bool *hung_up)
{
    int passed = -1;
    bool came = link_readable(fd, patience_ms);
    bool good = came && wire_receive(fd, &link_->packet, &passed);
    *hung_up = came && !good;
    good = good && passed >= 0 && link_->packet.header.type == WIRE_WELCOME;
    pthread_mutex_lock(&link_->lock);
    if (good) {
        map_page(passed);
        link_->fd = fd;
        link_->seq = 1;
        good = atomic_load(&link_->page) != NULL && welcome(&link_->packet.body.welcome);
        if (!good)
            link_->fd = -1;
    }
    pthread_mutex_unlock(&link_->lock);
    if (passed >= 0)
        close(passed);
    if (!good)
        close(fd);
    return good;
}

/* A connection that has been welcomed, or false. One that was greeted may have ended meanwhile, with the arbiter of that time. */
bool link_meet(int patience_ms)
{
    pthread_mutex_lock(&link_->lock);
    int fd = link_->greeted;
    link_->greeted = -1;
    pthread_mutex_unlock(&link_->lock);
    bool hung_up = false;
    if (fd >= 0 && welcomed(fd, patience_ms, &hung_up))
        return true;
    if (fd >= 0 && !hung_up)
        return false;
    fd = say_hello();
    return fd >= 0 && welcomed(fd, patience_ms, &hung_up);
}

void link_greet(void)
{
    struct quiet quiet = quiet_begin();
    if (grant_ready() == GRANT_GOOD) {
        forks_watch();
        pthread_mutex_lock(&link_->lock);
        if (!link_->begun && link_->greeted < 0)
            link_->greeted = say_hello();
        pthread_mutex_unlock(&link_->lock);
    }
    quiet_end(quiet);
}

/* Locked. */
void link_lost(void)
{
    if (close(link_->fd) != 0)
        errno = 0; /* the program closed it under us */
    link_->fd = -1;
    link_->connected = false;
    atomic_store(&link_->given_seq, 0); /* the next arbiter is told what there is */
    link_->lost_at_ms = now_ms();
    pthread_cond_broadcast(&link_->changed);
}

/* Locked. The reader is started when the first answer is there. Without one nobody would answer a recall: no connection then. */
static bool reader_needed(void)
{
    if (link_->threaded || link_->pumping || reader_start()) /* who pumps starts it when he has his answer */
        return true;
    if (link_->connected)
        link_lost();
    link_->begun = false;
    return false;
}

/* Locked. The first connection is made by the thread that asks. Threads that come meanwhile wait for `connected`. */
static void begin(void)
{
    link_->begun = link_->meeting = true;
    if (!link_->clocked) {
        pthread_condattr_t clock;
        pthread_condattr_init(&clock);
        pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
        pthread_cond_init(&link_->changed, &clock);
        pthread_condattr_destroy(&clock);
        link_->clocked = true;
    }
    link_->lost_at_ms = now_ms();
    pthread_mutex_unlock(&link_->lock);
    link_meet(PATIENCE_MS);
    pthread_mutex_lock(&link_->lock);
    link_->meeting = false;
    pthread_cond_broadcast(&link_->changed);
}

/* Locked. */
static bool connected_in_time(void)
{
    if (!link_->begun)
        begin();
    while (!link_->connected) {
        if (!link_->meeting && !reader_needed())
            return false;
        bool met = atomic_load(&link_->page) != NULL;
        uint64_t deadline_ms = link_->lost_at_ms + (met ? RESTART_MS : PATIENCE_MS);
        if (now_ms() >= deadline_ms)
            return false;
        wait_until(deadline_ms);
    }
    return true;
}

bool link_wait(void)
{
    struct quiet quiet = quiet_begin();
    forks_watch();
    pthread_mutex_lock(&link_->lock);
    bool there = connected_in_time() && reader_needed();
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
    return there;
}

/* Locked on entry and exit. Reads one packet in the reader's place. */
static void pump(uint64_t deadline_ms)
{
    uint64_t now = now_ms();
    int passed = -1;
    link_->pumping = true;
    pthread_mutex_unlock(&link_->lock);
    bool good = true;
    if (link_readable(link_->fd, deadline_ms > now ? (int)(deadline_ms - now) : 0))
        good = wire_receive(link_->fd, &link_->packet, &passed) && link_handle(&link_->packet);
    if (passed >= 0)
        close(passed);
    pthread_mutex_lock(&link_->lock);
    link_->pumping = false;
    if (!good)
        link_lost();
    pthread_cond_broadcast(&link_->changed);
}

/* Locked. Until the answer is there: false when it is not, in time or at all. */
static bool answered_in_time(struct awaited *awaited, int patience_ms)
{
    uint64_t deadline_ms = now_ms() + (uint64_t)patience_ms;
    while (!awaited->answered && link_->connected && now_ms() < deadline_ms) {
        if (link_->threaded || link_->pumping)
            wait_until(deadline_ms);
        else
            pump(deadline_ms);
    }
    awaited->seq = 0;
    return awaited->answered;
}

/* Locked. Up to so much of the unused lease goes back. Without an arbiter it stays ours. */
static void return_unused(struct card *card, uint64_t most_bytes)
{
    if (!link_->connected || atomic_load(&card->unused_bytes) == 0)
        return;
    atomic_fetch_add(&link_->gives, 1); /* before it is taken out */
    struct wire_amount back = {.card = (uint32_t)atomic_load(&card->wire), .bytes = lease_take_unused(card, most_bytes)};
    if (give(WIRE_RETURN, &back, sizeof back))
        atomic_fetch_sub(&card->leased_bytes, back.bytes);
    else
        atomic_fetch_add(&card->unused_bytes, back.bytes);
}

/* Locked. Until the answer to that number has come, and it is 0. False when none was on its way. An arbiter that is there and says
 * nothing is waited for once. */
static bool came(_Atomic uint32_t *seq)
{
    if (atomic_load(seq) == 0)
        return false;
    uint64_t deadline_ms = now_ms() + PATIENCE_MS;
    while (atomic_load(seq) != 0 && link_->connected && now_ms() < deadline_ms) {
        if (link_->threaded || link_->pumping)
            wait_until(deadline_ms);
        else
            pump(deadline_ms);
    }
    atomic_store(seq, 0);
    return true;
}

/* Locked. A chunk was asked for when the context was made, and may be on its way: wait for it. False when none is. */
static bool chunk_came(struct card *card)
{
    return came(&tangram.contexts.of[card->at].chunk_seq);
}

void link_settle(struct card *card)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&link_->lock);
    chunk_came(card);
    came(&link_->given_seq);
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
}

/* Locked. */
static bool chunk_is_enough(struct card *card, uint64_t need_bytes)
{
    if (!chunk_came(card))
        return false;
    if (lease_take(card, need_bytes))
        return true;
    return_unused(card, UINT64_MAX);
    return false;
}

/* Asks for at least `need`. Granted: `need` is the caller's, what came beyond it is unused lease. */
enum link_answer link_ask(struct card *card, uint64_t need_bytes, uint64_t want_bytes)
{
    enum link_answer answer = LINK_ABSENT;
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&link_->lock);
    while (answer == LINK_ABSENT && connected_in_time()) {
        struct wire_lease lease = {
            .card = (uint32_t)atomic_load(&card->wire), .need_bytes = need_bytes, .want_bytes = want_bytes};
        if (atomic_load(&card->wire) < 0) {
            answer = LINK_REFUSED; /* the arbiter's grant does not name it */
            break;
        }
        if (chunk_is_enough(card, need_bytes)) {
            answer = LINK_GRANTED;
            break;
        }
        if (!link_->connected)
            continue;
        link_->lease = (struct awaited){.seq = next_seq()};
        if (!wire_send(link_->fd, WIRE_LEASE, link_->lease.seq, &lease, sizeof lease))
            break;
        if (!answered_in_time(&link_->lease, PATIENCE_MS)) {
            if (link_->connected)
                break; /* it is there and says nothing */
            continue;  /* it went away meanwhile: ask the next one */
        }
        answer = LINK_REFUSED;
        if (!link_->lease_answer.refused && link_->lease_answer.granted_bytes >= need_bytes) {
            atomic_fetch_add(&card->unused_bytes, link_->lease_answer.granted_bytes - need_bytes);
            answer = LINK_GRANTED;
        }
    }
    if (link_->begun)
        reader_needed();
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
    return answer;
}

void link_return(struct card *card, uint64_t most_bytes)
{
    if (most_bytes == 0)
        return;
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&link_->lock);
    return_unused(card, most_bytes);
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
}

/* What no process of the container holds. False when that is not known: never connected, or the arbiter is away. */
bool link_unleased(struct card *card, uint64_t *bytes)
{
    const _Atomic uint64_t *page = atomic_load_explicit(&link_->page, memory_order_acquire);
    int wire = atomic_load_explicit(&card->wire, memory_order_acquire);
    if (page == NULL || wire < 0)
        return false;
    *bytes = atomic_load_explicit(&page[wire], memory_order_relaxed);
    return true;
}

/* Locked. The first allocation will want a lease: ask for it while the driver is busy with the context. */
static void ask_chunk_ahead(struct card *card)
{
    struct card_contexts *contexts = &tangram.contexts.of[card->at];
    struct wire_lease lease = {.card = (uint32_t)atomic_load(&card->wire), .want_bytes = lease_chunk_bytes(card)};
    if (atomic_load(&contexts->chunk_seq) != 0 || atomic_load(&card->leased_bytes) != 0)
        return;
    uint32_t seq = next_seq();
    if (wire_send(link_->fd, WIRE_LEASE, seq, &lease, sizeof lease))
        atomic_store(&contexts->chunk_seq, seq);
}

/* Before the first context on a card. *estimated: the arbiter knew what it will take, and holds that. */
enum link_answer link_context_begin(struct card *card, bool *estimated)
{
    enum link_answer answer = LINK_ABSENT;
    struct quiet quiet = quiet_begin();
    forks_watch();
    pthread_mutex_lock(&link_->lock);
    while (answer == LINK_ABSENT && connected_in_time()) {
        if (atomic_load(&card->wire) < 0) {
            answer = LINK_REFUSED;
            break;
        }
        link_->context = (struct awaited){.seq = next_seq() | WIRE_SEQ_CONTEXT};
        if (!say_context(card, WIRE_BEGIN, link_->context.seq))
            break;
        ask_chunk_ahead(card);
        if (!answered_in_time(&link_->context, PATIENCE_MS)) {
            if (link_->connected)
                break;
            continue;
        }
        answer = link_->context_answer.refused ? LINK_REFUSED : LINK_GRANTED;
        *estimated = link_->context_answer.granted_bytes > 0;
    }
    if (link_->begun)
        reader_needed();
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
    return answer;
}

/* Memory was opened that somebody else may have made. What is answered too late is taken back. */
enum link_answer link_hold(struct card *card, struct wire_shared *said)
{
    enum link_answer answer = LINK_ABSENT;
    forks_watch();
    pthread_mutex_lock(&link_->lock);
    while (answer == LINK_ABSENT && connected_in_time()) {
        if (atomic_load(&card->wire) < 0) {
            answer = LINK_REFUSED;
            break;
        }
        said->card = (uint32_t)atomic_load(&card->wire);
        link_->hold = (struct awaited){.seq = next_seq() | WIRE_SEQ_HOLD};
        if (!wire_send(link_->fd, WIRE_HOLD, link_->hold.seq, said, sizeof *said))
            break;
        if (!answered_in_time(&link_->hold, PATIENCE_MS)) {
            if (!link_->connected)
                continue;
            link_drop(said);
            break;
        }
        answer = link_->hold_answer.refused ? LINK_REFUSED : LINK_GRANTED;
    }
    if (link_->begun)
        reader_needed();
    if (answer != LINK_GRANTED)
        pthread_mutex_unlock(&link_->lock);
    return answer;
}

/* After the first context was made or the last is gone. */
void link_context_end(struct card *card, enum wire_step step, bool wait)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&link_->lock);
    if (link_->connected && atomic_load(&card->wire) >= 0) {
        uint32_t seq = next_seq() | WIRE_SEQ_CONTEXT;
        if (wait)
            link_->measured = (struct awaited){.seq = seq};
        if (say_context(card, step, seq) && wait)
            answered_in_time(&link_->measured, MEASURE_MS);
    }
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
}

/* The container's processes on a card. False when the arbiter does not say. One thread at a time. */
bool link_processes(struct card *card, struct wire_process *out, uint32_t room, uint32_t *count)
{
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    bool known = false;
    struct quiet quiet = quiet_begin();
    if (!link_wait())
        return false;
    pthread_mutex_lock(&one);
    pthread_mutex_lock(&link_->lock);
    if (link_->connected && atomic_load(&card->wire) >= 0) {
        struct wire_card_only ask = {.card = (uint32_t)atomic_load(&card->wire)};
        link_->processes = (struct awaited){.seq = next_seq()};
        link_->listed = out;
        link_->listed_room = room;
        known = wire_send(link_->fd, WIRE_PROCESSES, link_->processes.seq, &ask, sizeof ask) &&
                answered_in_time(&link_->processes, PATIENCE_MS);
        link_->listed = NULL;
        *count = link_->listed_count;
    }
    pthread_mutex_unlock(&link_->lock);
    pthread_mutex_unlock(&one);
    quiet_end(quiet);
    return known;
}

void link_forget(void)
{
    if (link_->fd >= 0)
        close(link_->fd); /* our copy: the parent's stays open */
    if (link_->greeted >= 0)
        close(link_->greeted);
    *link_ = (struct link){.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1, .greeted = -1};
}
