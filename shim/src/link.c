/* link.c - the connection to the arbiter, and the thread that reads it.
 *
 * The thread is made when memory is first asked for. It connects, answers recalls, and when the arbiter goes away it comes
 * back to it and states what this process holds. While it is away what is leased stays usable and nothing new is leased;
 * who asks waits until the arbiter has been away for RESTART_MS (PATIENCE_MS if it was never there), and after that is refused
 * at once.
 */
#include "process.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    PATIENCE_MS = 2000,     /* for an arbiter that was never met, and for an answer; specified */
    RESTART_MS = 5000,      /* for one that went away: a restarted container is back by then; guessed */
    WELCOME_MS = 3000,      /* the arbiter itself waits up to 2 s for the grant */
    RETRY_FIRST_MS = 5,     /* guessed */
    RETRY_MOST_MS = 200,    /* below the arbiter's grace after a start, in which it waits for statements */
    STATEMENT_MS = 1000,    /* use is told, and surplus returned, at most this often; guessed */
    SURPLUS_LOOKS = 100,    /* 5 ms */
    THREAD_STACK = 256 * 1024
};

static struct link *const link_ = &tangram.link;

static void wait_until(uint64_t deadline_ms)
{
    struct timespec at = {(time_t)(deadline_ms / 1000), (long)(deadline_ms % 1000) * 1000000};
    pthread_cond_timedwait(&link_->changed, &link_->lock, &at);
}

static struct card *card_of_wire(uint32_t wire)
{
    for (unsigned i = 0; i < tangram.grant.cards; i++)
        if (atomic_load(&tangram.grant.card[i].wire) == (int)wire)
            return &tangram.grant.card[i];
    return NULL;
}

/* Locked. What this process holds, in full: the arbiter takes it as it is when it has just come back. */
static bool state_use(struct card *card)
{
    uint64_t leased = atomic_load(&card->leased_bytes), unused = atomic_load(&card->unused_bytes);
    struct wire_usage usage = {
        .card = (uint32_t)atomic_load(&card->wire),
        .used_bytes = leased > unused ? leased - unused : 0,
        .leased_bytes = leased,
    };
    atomic_store(&card->stated_bytes, usage.used_bytes);
    return wire_send(link_->fd, WIRE_USAGE, ++link_->seq, &usage, sizeof usage);
}

/* Locked. */
static bool state_changes(void)
{
    for (unsigned i = 0; i < tangram.grant.cards; i++) {
        struct card *card = &tangram.grant.card[i];
        uint64_t leased = atomic_load(&card->leased_bytes), unused = atomic_load(&card->unused_bytes);
        if (atomic_load(&card->wire) < 0 || leased - unused == atomic_load(&card->stated_bytes))
            continue;
        if (!state_use(card))
            return false;
    }
    return true;
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
        atomic_store(&card->wire, -1);
        for (uint32_t w = 0; w < in->cards; w++) {
            if (memcmp(in->card[w].uuid, card->uuid, sizeof card->uuid) != 0)
                continue;
            atomic_store(&card->limit_bytes, in->card[w].limit_bytes);
            atomic_store(&card->wire, (int)w);
            if (atomic_load(&card->leased_bytes) > 0 && !state_use(card))
                return false;
        }
    }
    link_->connected = true;
    pthread_cond_broadcast(&link_->changed);
    return true;
}

static bool wait_readable(int fd, int ms)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    int rc;
    do
        rc = poll(&ready, 1, ms);
    while (rc < 0 && errno == EINTR);
    return rc > 0;
}

/* A connection that has been welcomed, or false. */
static bool meet(int patience_ms)
{
    struct wire_hello hello = {.pid = (uint32_t)getpid(), .library_version = TANGRAM_VERSION};
    struct wire_packet packet;
    int passed = -1;
    int fd = wire_connect(tangram.grant.socket);
    if (fd < 0)
        return false;
    bool good = wire_send(fd, WIRE_HELLO, 1, &hello, sizeof hello) && wait_readable(fd, patience_ms) &&
                wire_receive(fd, &packet, &passed) && passed >= 0 && packet.header.type == WIRE_WELCOME;
    pthread_mutex_lock(&link_->lock);
    if (good) {
        map_page(passed);
        link_->fd = fd;
        link_->seq = 1;
        good = atomic_load(&link_->page) != NULL && welcome(&packet.body.welcome);
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

/* Not locked. What was freed and not needed since goes back, so that siblings see it as free. Until the arbiter's page shows
 * it, it is kept in `returning_bytes`: a program that asks in that moment must not find it gone. */
static void return_surplus(struct card *card)
{
    const _Atomic uint64_t *page = atomic_load(&link_->page);
    int wire = atomic_load(&card->wire);
    uint64_t surplus = wire >= 0 ? lease_take_surplus(card) : 0;
    if (surplus == 0)
        return;
    uint64_t before = atomic_load(&page[wire]);
    atomic_store(&card->returning_bytes, surplus);
    link_return(card, surplus);
    struct timespec moment = {0, 50000};
    for (unsigned i = 0; i < SURPLUS_LOOKS && atomic_load(&page[wire]) == before; i++)
        nanosleep(&moment, NULL);
    atomic_store(&card->returning_bytes, 0);
}

/* Locked. What is granted is ours from here on, and is stated if the connection ends now, whether or not the thread that asked
 * has woken up. A lease that nobody waits for any more is unused. */
static void leased(uint32_t seq, const struct wire_leased *in)
{
    struct card *card = card_of_wire(in->card);
    uint64_t granted = card == NULL || in->refused ? 0 : in->granted_bytes;
    if (granted > 0)
        atomic_fetch_add(&card->leased_bytes, granted);
    if (seq == link_->awaited) {
        link_->answer = *in;
        link_->answer.granted_bytes = granted;
        link_->answered = true;
        pthread_cond_broadcast(&link_->changed);
    } else if (granted > 0) {
        atomic_fetch_add(&card->unused_bytes, granted);
    }
}

/* Locked. Always answered, with 0 bytes if need be: the arbiter waits for it. */
static bool recall(uint32_t seq, const struct wire_amount *in)
{
    struct card *card = card_of_wire(in->card);
    struct wire_amount back = {.card = in->card};
    if (card == NULL)
        return false;
    back.bytes = lease_take_unused(card, in->bytes);
    if (!wire_send(link_->fd, WIRE_RETURN, seq, &back, sizeof back)) {
        atomic_fetch_add(&card->unused_bytes, back.bytes);
        return false;
    }
    atomic_fetch_sub(&card->leased_bytes, back.bytes);
    return true;
}

static bool handle(const struct wire_packet *packet)
{
    bool good = true;
    pthread_mutex_lock(&link_->lock);
    switch (packet->header.type) {
    case WIRE_LEASED:
        leased(packet->header.seq, &packet->body.leased);
        break;
    case WIRE_RECALL:
        good = recall(packet->header.seq, &packet->body.amount);
        break;
    default: /* ERROR, or what has no place here: the connection is over either way */
        good = false;
    }
    pthread_mutex_unlock(&link_->lock);
    return good;
}

static void serve(void)
{
    struct wire_packet packet;
    int passed;
    for (bool good = true; good;) {
        if (wait_readable(link_->fd, STATEMENT_MS)) {
            good = wire_receive(link_->fd, &packet, &passed) && handle(&packet);
            if (passed >= 0)
                close(passed);
        } else {
            pthread_mutex_lock(&link_->lock);
            good = state_changes();
            pthread_mutex_unlock(&link_->lock);
            for (unsigned i = 0; i < tangram.grant.cards; i++)
                return_surplus(&tangram.grant.card[i]);
        }
    }
    pthread_mutex_lock(&link_->lock);
    if (close(link_->fd) != 0)
        errno = 0; /* the program closed it under us */
    link_->fd = -1;
    link_->connected = false;
    link_->lost_at_ms = now_ms();
    pthread_cond_broadcast(&link_->changed);
    pthread_mutex_unlock(&link_->lock);
}

/* The first connection is there when the thread begins. */
static bool met_before(void)
{
    pthread_mutex_lock(&link_->lock);
    bool connected = link_->connected;
    pthread_mutex_unlock(&link_->lock);
    return connected;
}

static void *reader(void *unused)
{
    (void)unused;
    for (unsigned pause_ms = RETRY_FIRST_MS;;) {
        if (met_before() || meet(WELCOME_MS)) {
            serve();
            pause_ms = RETRY_FIRST_MS;
        }
        struct timespec pause = {0, (long)pause_ms * 1000000};
        nanosleep(&pause, NULL);
        pause_ms = pause_ms * 2 > RETRY_MOST_MS ? RETRY_MOST_MS : pause_ms * 2;
    }
    return NULL;
}

/* Locked. The thread takes no signals: those are the program's. */
static bool start_reader(void)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, THREAD_STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(&thread, &attributes, reader, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return started;
}

/* Locked. The first connection is made by the thread that asks, which saves it waiting for another to wake up; the reader has
 * it from then on. Threads that come meanwhile wait for `connected`. */
static bool start(void)
{
    if (link_->running)
        return true;
    link_->running = true;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&link_->changed, &clock);
    pthread_condattr_destroy(&clock);
    link_->lost_at_ms = now_ms();

    pthread_mutex_unlock(&link_->lock);
    meet(PATIENCE_MS);
    pthread_mutex_lock(&link_->lock);
    if (start_reader())
        return true;
    if (link_->connected)
        close(link_->fd); /* nobody would answer a recall */
    link_->fd = -1;
    link_->connected = link_->running = false;
    return false;
}

/* Locked. */
static bool connected_in_time(void)
{
    if (!start())
        return false;
    while (!link_->connected) {
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
    forks_watch();
    pthread_mutex_lock(&link_->lock);
    bool there = connected_in_time();
    pthread_mutex_unlock(&link_->lock);
    return there;
}

/* Locked. The answer to the LEASE just sent; false when none came. */
static bool answered_in_time(void)
{
    uint64_t deadline_ms = now_ms() + PATIENCE_MS;
    while (!link_->answered && link_->connected && now_ms() < deadline_ms)
        wait_until(deadline_ms);
    link_->awaited = 0;
    return link_->answered;
}

/* Asks for at least `need`. Granted: `need` is the caller's, what came beyond it is unused lease. */
enum link_answer link_ask(struct card *card, uint64_t need_bytes, uint64_t want_bytes)
{
    enum link_answer answer = LINK_ABSENT;
    int saved = errno;
    pthread_mutex_lock(&link_->lock);
    while (answer == LINK_ABSENT && connected_in_time()) {
        struct wire_lease lease = {
            .card = (uint32_t)atomic_load(&card->wire), .need_bytes = need_bytes, .want_bytes = want_bytes};
        if (atomic_load(&card->wire) < 0) {
            answer = LINK_REFUSED; /* the arbiter's grant does not name it */
            break;
        }
        link_->awaited = ++link_->seq;
        link_->answered = false;
        if (!wire_send(link_->fd, WIRE_LEASE, link_->awaited, &lease, sizeof lease))
            break;
        if (!answered_in_time()) {
            if (link_->connected)
                break; /* it is there and says nothing */
            continue;  /* it went away meanwhile: ask the next one */
        }
        answer = LINK_REFUSED;
        if (!link_->answer.refused && link_->answer.granted_bytes >= need_bytes) {
            atomic_fetch_add(&card->unused_bytes, link_->answer.granted_bytes - need_bytes);
            answer = LINK_GRANTED;
        }
    }
    pthread_mutex_unlock(&link_->lock);
    errno = saved;
    return answer;
}

/* Hands back bytes that the caller has taken out of the unused lease. Without an arbiter they stay ours. */
void link_return(struct card *card, uint64_t bytes)
{
    if (bytes == 0)
        return;
    int saved = errno;
    pthread_mutex_lock(&link_->lock);
    struct wire_amount back = {.card = (uint32_t)atomic_load(&card->wire), .bytes = bytes};
    if (link_->connected && wire_send(link_->fd, WIRE_RETURN, ++link_->seq, &back, sizeof back))
        atomic_fetch_sub(&card->leased_bytes, bytes);
    else
        atomic_fetch_add(&card->unused_bytes, bytes);
    pthread_mutex_unlock(&link_->lock);
    errno = saved;
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
