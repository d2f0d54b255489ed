/* link.c - the connection to the arbiter: how it is met, and who reads on it. What is asked over it is in ask.c.
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
    PATIENCE_MS = 2000, /* for an arbiter that was never met; specified */
    RESTART_MS = 5000,  /* for one that went away: a restarted container is back by then; guessed */
    PROMISE_MS = 500,   /* after HELLO; half of what the arbiter keeps to: specified */
    SEQ_MASK = 0x0fffffff
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

bool link_say(enum wire_type type, const void *body, uint32_t body_bytes)
{
    return wire_send(link_->fd, type, link_next_seq(), body, body_bytes);
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
    return wire_send(link_->fd, WIRE_USAGE, link_next_seq(), &usage, sizeof usage);
}

/* Locked. */
bool link_say_context(struct card *card, enum wire_step step, uint32_t seq)
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
            if (atomic_load(&contexts->bytes) > 0 && !link_say_context(card, WIRE_DONE, link_next_seq() | WIRE_SEQ_CONTEXT))
                return false;
        }
    }
    link_->connected = true;
    pthread_cond_broadcast(&link_->changed);
    return true;
}

/* A connection that has said HELLO, or -1. */
static int say_hello(uint32_t flags)
{
    struct wire_hello hello = {.pid = (uint32_t)getpid(), .flags = flags, .library_version = TANGRAM_VERSION};
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
        link_->promised_bytes = link_->packet.body.welcome.promised_mib * MIB;
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
    fd = say_hello(0);
    return fd >= 0 && welcomed(fd, patience_ms, &hung_up);
}

void link_greet(void)
{
    struct quiet quiet = quiet_begin();
    if (grant_ready() == GRANT_GOOD) {
        forks_watch();
        pthread_mutex_lock(&link_->lock);
        if (!link_->begun && link_->greeted < 0) {
            link_->promised_until_ms = now_ms() + PROMISE_MS;
            link_->greeted = say_hello(atomic_load(&tangram.contexts.one_made) ? 0 : WIRE_FOR_CONTEXT);
        }
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
bool link_reader_needed(void)
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
bool link_connected_in_time(void)
{
    if (!link_->begun)
        begin();
    while (!link_->connected) {
        if (!link_->meeting && !link_reader_needed())
            return false;
        bool met = atomic_load(&link_->page) != NULL;
        uint64_t deadline_ms = link_->lost_at_ms + (met ? RESTART_MS : PATIENCE_MS);
        if (now_ms() >= deadline_ms)
            return false;
        link_wait_until(deadline_ms);
    }
    return true;
}

bool link_wait(void)
{
    struct quiet quiet = quiet_begin();
    forks_watch();
    pthread_mutex_lock(&link_->lock);
    bool there = link_connected_in_time() && link_reader_needed();
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
    return there;
}

/* Locked on entry and exit. Reads one packet in the reader's place. */
void link_pump(uint64_t deadline_ms)
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

void link_forget(void)
{
    if (link_->fd >= 0)
        close(link_->fd); /* our copy: the parent's stays open */
    if (link_->greeted >= 0)
        close(link_->greeted);
    *link_ = (struct link)LINK_NEVER_MET;
}
