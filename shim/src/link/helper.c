/* helper.c - the one thread of the library's own.
 *
 * It reads both connections while no other thread waits on them, answers recalls, reports use and returns surplus leases once a second,
 * reconnects to a restarted arbiter, ends a suspend that no arbiter would end, and finds work that ended and was never waited for.
 * It only makes these happen sooner: see link.c for a process that cannot have it. Only the connection for bursts, a third one, is the helper's
 * alone: without a helper a process has no elastic memory.
 *
 * It calls the driver only between `driver_enter` and `driver_leave`, which end with the program: the driver's destructors run before
 * this thread does.
 */
#include "process.h"

#include <poll.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum {
    STATEMENT_MS = 1000,  /* use is reported, and surplus returned, at most this often; guessed */
    LOOK_MS = 200,        /* at the heartbeat, and for a connection that is wanted */
    WORKING_LOOK_MS = 20, /* for work that ended and was never waited for; guessed */
    MAKING_LOOK_MS = 5,   /* while a context is made, whose channels are to be reported; guessed */
    HASTY_LOOK_MS = 2,    /* after an IDLE that it was too soon to report, and HASTY_LOOKS times more; guessed */
    HASTY_LOOKS = 10,
    END_MS = 1000 /* so long the end of the program waits for a call of the driver's; guessed */
};

static struct link *const link_ = &tangram.link;

static struct { /* the end of the program */
    _Atomic bool watched, ended;
    _Atomic pid_t inside; /* whose helper is in a call of the driver's: a child that is forked meanwhile has no helper to wait for */
} end_;

static bool driver_enter(void)
{
    atomic_store(&end_.inside, getpid());
    if (!atomic_load(&end_.ended))
        return true;
    atomic_store(&end_.inside, 0);
    return false;
}

static void driver_leave(void)
{
    atomic_store(&end_.inside, 0);
}

bool helper_ended(void)
{
    return atomic_load(&end_.ended);
}

static void program_ends(void)
{
    struct timespec moment = {0, 100000};
    atomic_store(&end_.ended, true);
    for (uint64_t until_ms = now_ms() + END_MS; atomic_load(&end_.inside) == getpid() && now_ms() < until_ms;)
        nanosleep(&moment, NULL);
}

/* Handlers run in the opposite order of their registration: after cuInit ours runs before the driver's own. */
void helper_watch_end(void)
{
    if (!atomic_exchange(&end_.watched, true))
        atexit(program_ends);
}

/* A thread that waits for the first answer reads it itself, which saves it waiting until this thread has woken it. */
static void take_over(void)
{
    pthread_mutex_lock(&link_->lock);
    while (link_->pumping)
        pthread_cond_wait(&link_->changed, &link_->lock);
    link_->reading = true;
    pthread_mutex_unlock(&link_->lock);
}

struct rounds {
    uint64_t statement_ms; /* when it is due */
    uint64_t look_ms;
    unsigned hasty;
};

static unsigned look_every_ms(const struct rounds *rounds)
{
    if (rounds->hasty > 0)
        return HASTY_LOOK_MS;
    if (activity_work_reported())
        return WORKING_LOOK_MS;
    return atomic_load(&tangram.contexts.making) > 0 ? MAKING_LOOK_MS : LOOK_MS;
}

/* What is done now and then, with the arbiter or without. */
static void look(struct rounds *rounds)
{
    bool driver = driver_enter();
    rounds->hasty = driver && activity_report_later() ? HASTY_LOOKS : rounds->hasty > 0 ? rounds->hasty - 1 : 0;
    time_link_watch();
    if (driver)
        activity_look();
    driver_leave();
    capture_report();
    rounds->look_ms = now_ms() + look_every_ms(rounds);
}

/* A recall may release elastic memory. */
static void read_memory(void)
{
    driver_enter();
    link_read();
    driver_leave();
}

/* Where a connection ends, memory that was let go while it was chosen to be swapped is released. */
static void read_time(void)
{
    driver_enter();
    time_link_read();
    driver_leave();
}

static int try_bursts(void)
{
    driver_enter();
    const int fd = burst_link_try();
    driver_leave();
    return fd;
}

static void state_bursts(void)
{
    driver_enter();
    burst_link_state();
    driver_leave();
}

static void read_bursts(void)
{
    if (driver_enter())
        burst_link_read();
    driver_leave();
}

static void state_things(struct rounds *rounds)
{
    burst_look();
    if (driver_enter()) {
        elastic_surplus();
        burst_link_discard();
    }
    driver_leave();
    bool good = link_once_a_second();
    pthread_mutex_lock(&link_->lock);
    good = good && state_report();
    pthread_mutex_unlock(&link_->lock);
    if (!good)
        read_memory(); /* finds out that the connection is over */
    spare_sockets_fill();
    link_look_for_page();
    time_link_look_for_page();
    rounds->statement_ms = now_ms() + STATEMENT_MS;
}

static void *helper(void *unused)
{
    (void)unused;
    prctl(PR_SET_NAME, "tangram"); /* for those that look at the program's threads, as the arbiter does */
    const bool rooted = root_keep();
    take_over();
    if (!rooted)
        root_keep_folder();
    for (struct rounds rounds = {.statement_ms = now_ms() + STATEMENT_MS};;) {
        pthread_mutex_lock(&link_->lock);
        bool there = link_try(), connected = link_->stage == LINK_CONNECTED;
        struct pollfd ready[] = {{.fd = there ? link_->end.fd : -1, .events = POLLIN}, {.fd = time_link_try(), .events = POLLIN}, {.fd = -1, .events = POLLIN}};
        uint64_t due_ms = there ? rounds.look_ms : link_->again_ms < rounds.look_ms ? link_->again_ms : rounds.look_ms;
        pthread_mutex_unlock(&link_->lock);
        ready[2].fd = try_bursts();
        uint64_t now = now_ms();
        int came = poll(ready, ready[2].fd >= 0 ? 3 : 2, due_ms > now ? (int)(due_ms - now) : 0);
        if (came > 0 && ready[0].revents != 0)
            read_memory();
        if (came > 0 && ready[1].revents != 0)
            read_time();
        if (came > 0 && ready[2].revents != 0) /* after the end of the one for GPU time, with which nothing is swapped out any more */
            read_bursts();
        state_bursts();
        now = now_ms();
        if (connected && now >= rounds.statement_ms)
            state_things(&rounds);
        if (now >= rounds.look_ms)
            look(&rounds);
    }
    return NULL;
}

bool helper_start(void)
{
    return link_->threaded = thread_start(helper);
}
