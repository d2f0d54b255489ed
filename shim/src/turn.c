/* turn.c - the second connection to the arbiter, and the thread that keeps it.
 *
 * The arbiter hears of channels and of work on it, and answers in the container's page: whether this container is suspended,
 * whether new work is to wait, and a heartbeat. When the connection ends, or the heartbeat stops while we are suspended, nobody
 * would let us go on: then the process does so itself. A stopped arbiter costs a tenant less than a second.
 */
#include "launching.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    WELCOME_MS = 3000,
    RETRY_FIRST_MS = 5,  /* guessed */
    RETRY_MOST_MS = 200, /* guessed */
    LOOK_MS = 200,       /* at the heartbeat */
    WORKING_LOOK_MS = 20, /* for work that ended and was never waited for; guessed */
    HASTY_LOOK_MS = 2,   /* after an IDLE that it was too soon to tell, and HASTY_LOOKS times more; guessed */
    HASTY_LOOKS = 10,
    STALE_MS = 600,      /* the arbiter's beats are 200 ms apart */
    GATE_MOST_MS = 1000 /* specified: nobody waits longer */
};
enum { LATENCY_CRITICAL = 0 }; /* class of WELCOME */

static struct turn *const turn_ = &tangram.turn;

static void pause_ms(unsigned ms)
{
    struct timespec pause = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
    nanosleep(&pause, NULL);
}

static void map_page(int fd)
{
    if (atomic_load(&tangram.hot.page) != NULL) /* the arbiter was restarted: the place stays, the page is its new one */
        mmap((char *)atomic_load(&tangram.hot.page) - WIRE_TURN_AT, WIRE_PAGE_BYTES, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0);
    else {
        void *page = mmap(NULL, WIRE_PAGE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
        if (page != MAP_FAILED)
            atomic_store(&tangram.hot.page, (struct wire_turn *)(void *)((char *)page + WIRE_TURN_AT));
    }
}

/* A connection that was welcomed, or -1. */
static int meet(void)
{
    struct wire_hello hello = {.pid = (uint32_t)getpid(), .flags = WIRE_FOR_TURNS, .library_version = TANGRAM_VERSION};
    struct wire_packet *packet = malloc(sizeof *packet);
    int passed = -1, fd = packet == NULL ? -1 : wire_connect(tangram.grant.socket);
    bool good = fd >= 0 && wire_send(fd, WIRE_HELLO, 1, &hello, sizeof hello) && link_readable(fd, WELCOME_MS) &&
                wire_receive(fd, packet, &passed) && packet->header.type == WIRE_WELCOME && passed >= 0;
    if (good) {
        map_page(passed);
        atomic_store(&turn_->urgent, packet->body.welcome.cards > 0 && packet->body.welcome.card[0].klass == LATENCY_CRITICAL);
    }
    free(packet);
    if (passed >= 0)
        close(passed);
    if (good && atomic_load(&tangram.hot.page) != NULL)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

/* We are suspended and the one who did it does not show that he lives. */
static bool abandoned(void)
{
    struct wire_turn *page = atomic_load(&tangram.hot.page);
    return page != NULL && atomic_load(&page->off) != 0 && now_ms() > atomic_load(&page->beat_ms) + STALE_MS;
}

bool turn_is_urgent(void)
{
    return atomic_load_explicit(&turn_->urgent, memory_order_relaxed);
}

/* Until the connection ends. The arbiter sends nothing on it but, before it hangs up, an ERROR. */
static void keep(int fd)
{
    for (unsigned hasty = 0;;) {
        if (link_readable(fd, !activity_is_told() ? LOOK_MS : hasty > 0 ? HASTY_LOOK_MS : WORKING_LOOK_MS))
            return;
        hasty = activity_tell_later() ? HASTY_LOOKS : hasty > 0 ? hasty - 1 : 0;
        if (abandoned())
            capture_enable_own();
        activity_look();
        capture_tell();
    }
}

static void wait_until_wanted(void)
{
    pthread_mutex_lock(&turn_->lock);
    while (!turn_->wanted)
        pthread_cond_wait(&turn_->changed, &turn_->lock);
    pthread_mutex_unlock(&turn_->lock);
}

static void *keeper(void *unused)
{
    (void)unused;
    wait_until_wanted();
    for (unsigned wait_ms = RETRY_FIRST_MS;;) {
        int fd = meet();
        if (fd >= 0) {
            pthread_mutex_lock(&turn_->lock);
            turn_->fd = fd;
            pthread_mutex_unlock(&turn_->lock);
            capture_arbiter_is_new();
            activity_arbiter_is_new();
            keep(fd);
            pthread_mutex_lock(&turn_->lock);
            turn_->fd = -1;
            pthread_mutex_unlock(&turn_->lock);
            close(fd);
            capture_enable_own();
            wait_ms = RETRY_FIRST_MS;
        }
        pause_ms(wait_ms);
        wait_ms = wait_ms * 2 > RETRY_MOST_MS ? RETRY_MOST_MS : wait_ms * 2;
    }
    return NULL;
}

/* Locked. */
static void have_thread(void)
{
    if (!turn_->threaded)
        turn_->threaded = thread_start(keeper);
}

void turn_ready(void)
{
    pthread_mutex_lock(&turn_->lock);
    have_thread();
    pthread_mutex_unlock(&turn_->lock);
}

void turn_start(void)
{
    pthread_mutex_lock(&turn_->lock);
    if (!turn_->wanted) {
        turn_->wanted = true;
        activity_watch();
        pthread_cond_signal(&turn_->changed);
    }
    have_thread();
    pthread_mutex_unlock(&turn_->lock);
}

static uint32_t wire_of(const uint8_t uuid[16])
{
    struct card *card = card_of_uuid(uuid);
    return card == NULL ? UINT32_MAX : card->at;
}

bool turn_channels(const struct capture_channels *of, int fd)
{
    struct wire_channels channels = {.card = wire_of(of->uuid),
                                     .client = of->client,
                                     .subdevice = of->subdevice,
                                     .computes = of->computes,
                                     .copies = of->copies,
                                     .flags = (of->unlisted ? WIRE_UNLISTED : 0) | (of->fresh ? WIRE_FRESH : 0)};
    memcpy(channels.compute, of->compute, sizeof channels.compute);
    memcpy(channels.copy, of->copy, sizeof channels.copy);
    pthread_mutex_lock(&turn_->lock);
    bool sent = turn_->fd >= 0 && wire_send_fd(turn_->fd, WIRE_CHANNELS, ++turn_->seq, &channels, sizeof channels, fd);
    pthread_mutex_unlock(&turn_->lock);
    return sent;
}

bool turn_activity(enum wire_activity what, uint64_t value)
{
    struct wire_activity_said said = {.what = (uint32_t)what, .value = value};
    pthread_mutex_lock(&turn_->lock);
    bool sent = turn_->fd >= 0 && wire_send(turn_->fd, WIRE_ACTIVITY, ++turn_->seq, &said, sizeof said);
    pthread_mutex_unlock(&turn_->lock);
    return sent;
}

void turn_wait_for_gate(void)
{
    uint64_t until_ms = now_ms() + GATE_MOST_MS;
    struct timespec moment = {0, 200000};
    while (turn_gated() && !abandoned() && now_ms() < until_ms)
        nanosleep(&moment, NULL);
}

void turn_forget(void)
{
    int fd = turn_->fd;
    memset(turn_, 0, sizeof *turn_);
    turn_->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    turn_->changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    turn_->fd = -1;
    if (fd >= 0)
        close(fd);
}
