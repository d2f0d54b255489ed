/* time_link.c - the second connection to the arbiter.
 *
 * The library reports channels and work on it, and the arbiter answers in the container's page: whether this container is suspended,
 * whether new work is to wait, and a heartbeat. When the connection ends, or the heartbeat stops while we are suspended, the
 * arbiter would not resume us: the helper does so. A stopped arbiter costs a container less than a second.
 *
 * A process without a helper could not be resumed: it reports its channels only to an arbiter that understands not to suspend it, and the
 * thread that launches connects and reads.
 */
#include "gputime/launching.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    RETRY_FIRST_MS = 5,   /* guessed */
    RETRY_MOST_MS = 200,  /* guessed */
    WELCOME_MS = 100,     /* for the WELCOME, where there is no helper; guessed: it takes less than one */
    STALE_MS = 600,       /* the arbiter's beats are 200 ms apart */
    LOOK_ROUNDS = 5,      /* of the gate's 200 us: the streams are queried once a millisecond; guessed */
    GATE_BUSY_MS = 10000, /* with earlier work of ours still on the GPU; guessed: longer than a kernel takes */
    GATE_GPUS_MS = 1000   /* on several GPUs, whose kernels may wait for the launch that is held back; guessed */
};
enum { LATENCY_CRITICAL = 0 }; /* class of WELCOME */

static struct time_link *const time_link_ = &tangram.time_link;

static void map_page(int fd)
{
    struct wire_gpu_time *old = atomic_load(&tangram.hot.page); /* the arbiter was restarted: the place stays, the page is its new one */
    void *page = wire_map_page(old == NULL ? NULL : (char *)old - WIRE_GPU_TIME_AT, fd);
    if (page != MAP_FAILED)
        atomic_store(&tangram.hot.page, (struct wire_gpu_time *)(void *)((char *)page + WIRE_GPU_TIME_AT));
    time_link_->blind = fd < 0;
    state_set(WIRE_NO_PAGE, time_link_->blind);
}

/* Without a page launches do not wait at the gate, which is reported. Channels are suspended as ever, and resumed when the connection ends. */
static bool can_be_welcomed(int page_fd)
{
    return page_fd >= 0 || atomic_load(&tangram.hot.page) != NULL;
}

/* Locked. */
static void greet(void)
{
    struct wire_hello hello = {.pid = (uint32_t)getpid(), .flags = WIRE_FOR_GPU_TIME, .library_version = TANGRAM_VERSION};
    uint64_t now = now_ms();
    if (now < time_link_->again_ms)
        return;
    time_link_->pause_ms = time_link_->pause_ms == 0 ? RETRY_FIRST_MS : time_link_->pause_ms * 2 > RETRY_MOST_MS ? RETRY_MOST_MS : time_link_->pause_ms * 2;
    time_link_->again_ms = now + time_link_->pause_ms;
    if (!wire_connect(&time_link_->end, tangram.grant.socket, &time_link_->past))
        return;
    if (wire_send(&time_link_->end, WIRE_HELLO, 1, &hello, sizeof hello))
        time_link_->stage = LINK_GREETED;
    else
        time_link_->past = wire_ended(&time_link_->end);
}

int time_link_try(void)
{
    if (!atomic_load(&time_link_->wanted))
        return -1;
    pthread_mutex_lock(&time_link_->lock);
    if (time_link_->stage == LINK_APART)
        greet();
    int fd = time_link_->stage == LINK_APART ? -1 : time_link_->end.fd;
    pthread_mutex_unlock(&time_link_->lock);
    return fd;
}

bool time_link_is_there(void)
{
    pthread_mutex_lock(&time_link_->lock);
    const bool there = !atomic_load(&time_link_->wanted) || time_link_->stage == LINK_CONNECTED;
    pthread_mutex_unlock(&time_link_->lock);
    return there;
}

/* A kernel that runs while some of its memory is away ends with an error: then nobody enables the channels but an arbiter that has brought the
 * memory back. What was only chosen to be swapped out stays, for its content may change from here on. */
static void resume_own(void)
{
    time_link_->owed = elastic_is_away();
    if (time_link_->owed)
        return;
    burst_orders_end();
    capture_enable_own();
}

static void lost(void)
{
    pthread_mutex_lock(&time_link_->lock);
    bool was_welcomed = time_link_->stage == LINK_CONNECTED;
    time_link_->past = wire_ended(&time_link_->end);
    time_link_->stage = LINK_APART;
    time_link_->pause_ms = was_welcomed ? 0 : time_link_->pause_ms;
    time_link_->again_ms = was_welcomed ? 0 : time_link_->again_ms;
    pthread_mutex_unlock(&time_link_->lock);
    if (was_welcomed)
        resume_own();
}

/* The first packet is the WELCOME; after it the arbiter sends nothing but, before it hangs up, an ERROR. */
void time_link_read(void)
{
    struct wire_packet *packet = malloc(sizeof *packet);
    int passed = -1;
    bool good = packet != NULL && time_link_->stage == LINK_GREETED && wire_receive(&time_link_->end, packet, &passed) &&
                packet->header.type == WIRE_WELCOME && can_be_welcomed(passed);
    if (good) {
        map_page(passed);
        atomic_store(&time_link_->urgent, packet->body.welcome.gpus > 0 && packet->body.welcome.gpu[0].service_class == LATENCY_CRITICAL);
        good = atomic_load(&tangram.hot.page) != NULL;
    }
    free(packet);
    if (passed >= 0)
        close(passed);
    if (!good) {
        lost();
        return;
    }
    pthread_mutex_lock(&time_link_->lock);
    time_link_->stage = LINK_CONNECTED;
    pthread_mutex_unlock(&time_link_->lock);
    time_link_->owed = false; /* this arbiter enables them */
    capture_arbiter_is_new();
    activity_arbiter_is_new();
}

/* The arbiter is alive while the heartbeat changes. Its value is of the arbiter's clock, which differs from ours in a time namespace. */
static bool arbiter_is_stale(void)
{
    struct wire_gpu_time *page = atomic_load(&tangram.hot.page);
    if (page == NULL)
        return false;
    uint64_t now = now_ms(), beat = atomic_load(&page->beat_ms);
    if (beat == 0) /* it has never beaten */
        return true;
    if (beat != atomic_load(&time_link_->beat)) {
        atomic_store(&time_link_->beat_seen_ms, now);
        atomic_store(&time_link_->beat, beat);
        return false;
    }
    return now > atomic_load(&time_link_->beat_seen_ms) + STALE_MS;
}

/* This process is suspended, and the heartbeat of the arbiter that did it has stopped. */
static bool abandoned(void)
{
    struct wire_gpu_time *page = atomic_load(&tangram.hot.page);
    return page != NULL && atomic_load(&page->off) != 0 && arbiter_is_stale();
}

void time_link_look_for_page(void)
{
    if (time_link_->blind && time_link_->stage == LINK_CONNECTED && wire_has_descriptor())
        lost();
}

/* Once for each silence. Sent before, so that no report of the work that runs then comes first, and after, as the arbiter may be back in between. */
static bool resumed_says(uint64_t beat_ms, uint64_t value)
{
    return time_link_->resumed_beat_ms == beat_ms || !time_link_understands(WIRE_UNDERSTANDS_RESUMED) ||
           time_link_activity(WIRE_RESUMED, value) == TIME_LINK_SENT;
}

void time_link_watch(void)
{
    if (!atomic_load(&time_link_->wanted))
        return;
    arbiter_is_stale(); /* also while we run: how old a beat is can be known only if it was seen when it came */
    if (elastic_is_away())
        return;
    if (time_link_->owed)
        resume_own();
    if (!abandoned())
        return;
    uint64_t beat_ms = atomic_load(&atomic_load(&tangram.hot.page)->beat_ms);
    resumed_says(beat_ms, WIRE_ABOUT_TO);
    resume_own();
    if (resumed_says(beat_ms, 0))
        time_link_->resumed_beat_ms = beat_ms;
}

bool time_link_is_urgent(void)
{
    return atomic_load_explicit(&time_link_->urgent, memory_order_relaxed);
}

void time_link_start(void)
{
    if (atomic_exchange(&time_link_->wanted, true))
        return;
    activity_watch();
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&tangram.link.lock);
    link_have_helper();
    pthread_mutex_unlock(&tangram.link.lock);
    quiet_end(quiet);
}

void time_link_meet(void)
{
    if (link_has_helper() || !time_link_understands(WIRE_UNDERSTANDS_REPORT) || pthread_mutex_trylock(&time_link_->meeting) != 0)
        return;
    if (time_link_try() >= 0) {
        pthread_mutex_lock(&time_link_->lock);
        struct wire_end end = time_link_->end;
        uint64_t patience_ms = time_link_->stage == LINK_GREETED ? WELCOME_MS : 0;
        pthread_mutex_unlock(&time_link_->lock);
        if (wire_readable(&end, patience_ms))
            time_link_read();
    }
    pthread_mutex_unlock(&time_link_->meeting);
}

static uint32_t wire_of(const uint8_t uuid[16])
{
    struct gpu *gpu = gpu_of_uuid(uuid);
    return gpu == NULL ? UINT32_MAX : gpu->at;
}

static enum time_link_sent send_now(enum wire_type type, const void *body, uint32_t body_bytes, int fd)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&time_link_->lock);
    enum time_link_sent sent = TIME_LINK_AWAY;
    if (time_link_->stage == LINK_CONNECTED) {
        if (wire_send_fd(&time_link_->end, type, ++time_link_->seq, body, body_bytes, fd))
            sent = TIME_LINK_SENT;
        else if (errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM)
            sent = TIME_LINK_FULL;
    }
    pthread_mutex_unlock(&time_link_->lock);
    quiet_end(quiet);
    return sent;
}

bool time_link_channels(const struct capture_channels *of, int fd)
{
    struct wire_channels channels = {.gpu = wire_of(of->uuid),
                                     .client = of->client,
                                     .subdevice = of->subdevice,
                                     .computes = of->computes,
                                     .copies = of->copies,
                                     .flags = (of->unlisted ? WIRE_UNLISTED : 0) | (of->fresh ? WIRE_FRESH : 0) |
                                              (elastic_is_away() ? WIRE_AWAY : 0)};
    memcpy(channels.compute, of->compute, sizeof channels.compute);
    memcpy(channels.copy, of->copy, sizeof channels.copy);
    return send_now(WIRE_CHANNELS, &channels, sizeof channels, fd) == TIME_LINK_SENT;
}

bool time_link_understands(uint32_t feature)
{
    return (link_page_word(WIRE_GPU_TIME_AT + offsetof(struct wire_gpu_time, features)) & feature) != 0;
}

enum time_link_sent time_link_activity(enum wire_activity what, uint64_t value)
{
    struct wire_work work = {.what = (uint32_t)what, .value = value};
    return send_now(WIRE_ACTIVITY, &work, sizeof work, -1);
}

/* A launch that nothing of ours waits for stays until the gate opens, as a suspended process would. Else the work on the GPU may itself wait
 * for this launch, and would never end. */
void time_link_wait_for_gate(bool (*drained)(void))
{
    uint64_t until_ms = now_ms() + (tangram.grant.gpus > 1 ? GATE_GPUS_MS : GATE_BUSY_MS);
    struct timespec moment = {0, 200000};
    bool busy = true;
    for (unsigned round = 1; launches_must_wait() && !arbiter_is_stale() && (!busy || now_ms() < until_ms); round++) {
        nanosleep(&moment, NULL);
        if (round % LOOK_ROUNDS == 0)
            busy = !drained();
    }
}

void time_link_forget(void)
{
    struct wire_end end = time_link_->end;
    *time_link_ = (struct time_link)TIME_LINK_NEVER_MET;
    wire_close(&end);
}
