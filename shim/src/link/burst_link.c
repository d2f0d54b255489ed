/* burst_link.c - the third connection to the arbiter.
 *
 * BURST brings the limits of each GPU, SWAPPABLE states what could be swapped, and burst_orders.c carries the orders out. Only the helper
 * connects, reads and sends here, so the program never waits for it, but for one second in its life: a call that needs elastic memory before
 * BURST has come (burst_limits_came). A process without a helper has no such connection, and so no elastic memory.
 *
 * When the connection ends, blocks that are away or made stay so, and are stated on the next one. The limits stay, too: every lease is
 * granted on the memory connection.
 */
#include "process.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    RETRY_FIRST_MS = 5,  /* guessed, as for the connection for GPU time */
    RETRY_MOST_MS = 200, /* guessed */
    STATE_MS = 100,      /* SWAPPABLE is sent at most this often; specified */
    LIMITS_MS = 1000     /* so long BURST is waited for, once, beside time in which the thread that waits did not run; specified */
};

static struct burst_link *const burst_ = &tangram.burst_link;

static bool arbiter_serves(void)
{
    return (link_page_word(WIRE_GPU_TIME_AT + offsetof(struct wire_gpu_time, features)) & WIRE_UNDERSTANDS_BURST) != 0;
}

static bool some_gpu_bursts(void)
{
    for (unsigned i = 0; i < tangram.grant.gpus; i++)
        if (atomic_load(&tangram.grant.gpu[i].bursts))
            return true;
    return atomic_load(&tangram.elastic.any);
}

bool burst_is_allowed(struct gpu *gpu)
{
    return atomic_load_explicit(&gpu->limit_bytes, memory_order_relaxed) > atomic_load_explicit(&gpu->resident_limit_bytes, memory_order_relaxed);
}

/* Limits of BURST are valid until the next BURST: the memory connection may come back before this one. */
void burst_guaranteed(struct gpu *gpu, uint64_t limit_bytes)
{
    atomic_store(&gpu->resident_limit_bytes, limit_bytes);
    if (!atomic_load(&gpu->limits_came) || atomic_load(&gpu->limit_bytes) < limit_bytes)
        atomic_store(&gpu->limit_bytes, limit_bytes);
}

/* The arbiter serves no bursts, or the container has none any more. */
static void forget_limits(void)
{
    for (unsigned i = 0; i < tangram.grant.gpus; i++) {
        struct gpu *gpu = &tangram.grant.gpu[i];
        if (atomic_exchange(&gpu->limits_came, false))
            atomic_store(&gpu->limit_bytes, atomic_load(&gpu->resident_limit_bytes));
    }
}

static void greet(void)
{
    struct wire_hello hello = {.pid = (uint32_t)getpid(), .flags = WIRE_FOR_BURST, .library_version = TANGRAM_VERSION};
    uint64_t now = now_ms();
    if (now < burst_->again_ms)
        return;
    burst_->pause_ms = burst_->pause_ms == 0 ? RETRY_FIRST_MS : burst_->pause_ms * 2 > RETRY_MOST_MS ? RETRY_MOST_MS : burst_->pause_ms * 2;
    burst_->again_ms = now + burst_->pause_ms;
    if (!wire_connect(&burst_->end, tangram.grant.socket, &burst_->past))
        return;
    if (wire_send(&burst_->end, WIRE_HELLO, 1, &hello, sizeof hello))
        burst_->stage = LINK_GREETED;
    else
        burst_->past = wire_ended(&burst_->end);
}

static void lost(void)
{
    const bool was_welcomed = burst_->stage == LINK_CONNECTED;
    burst_->past = wire_ended(&burst_->end);
    burst_->stage = LINK_APART;
    burst_->pause_ms = was_welcomed ? 0 : burst_->pause_ms;
    burst_->again_ms = was_welcomed ? 0 : burst_->again_ms;
    burst_orders_end();
}

/* A program that closed our descriptor, and has it for a file of its own, is noticed here: nothing may come on that file. */
int burst_link_try(void)
{
    const bool wanted = arbiter_serves() && some_gpu_bursts() && !helper_ended();
    if (burst_->stage != LINK_APART && (!wanted || !wire_is_there(&burst_->end)))
        lost();
    if (!wanted && atomic_exchange(&burst_->wanted, false) && !helper_ended())
        forget_limits();
    if (!wanted && !helper_ended() && atomic_load(&tangram.elastic.any_discarding))
        discard_end_all(); /* no arbiter that serves bursts has a record of it */
    if (!wanted)
        return -1;
    atomic_store(&burst_->wanted, true);
    if (burst_->stage == LINK_APART)
        greet();
    return burst_->stage == LINK_APART ? -1 : burst_->end.fd;
}

bool burst_link_send(enum wire_type type, uint32_t seq, const void *body, uint32_t body_bytes, const int *fd, unsigned fds)
{
    return wire_send_fds(&burst_->end, type, seq, body, body_bytes, fd, fds);
}

/* By the page that comes with this WELCOME: the one of the memory connection may be of another arbiter. */
static bool understands_discard(int page)
{
    uint32_t features = 0;
    if (page < 0 || pread(page, &features, sizeof features, WIRE_GPU_TIME_AT + offsetof(struct wire_gpu_time, features)) != (ssize_t)sizeof features)
        return false;
    return (features & WIRE_UNDERSTANDS_DISCARD) != 0;
}

static bool welcomed(const struct wire_packet *packet, int page)
{
    const struct wire_welcome *in = &packet->body.welcome;
    if (packet->header.type != WIRE_WELCOME)
        return false;
    burst_->discards = understands_discard(page);
    if (burst_->discards)
        discard_resend();
    else
        discard_end_all();
    for (unsigned i = 0; i < in->gpus; i++) {
        burst_->gpu[i] = gpu_of_uuid(in->gpu[i].uuid);
        burst_->is_stated[i] = false;
    }
    burst_->gpus = in->gpus;
    burst_->stated_ms = 0;
    burst_->stage = LINK_CONNECTED;
    return true;
}

/* What is leased beyond a limit that fell, and not used, goes back at once. */
static void keep_limit(struct gpu *gpu, uint64_t limit_bytes)
{
    const uint64_t leased = lease_leased_bytes(gpu), over = leased > limit_bytes ? leased - limit_bytes : 0;
    if (over == 0)
        return;
    elastic_trim(gpu, over);
    link_return(gpu, WIRE_ELASTIC, over);
}

static bool limits(const struct wire_burst *in, struct gpu *gpu)
{
    if (in->gpu >= burst_->gpus || in->limit_bytes < in->guarantee_bytes)
        return false;
    if (gpu == NULL)
        return true;
    atomic_store(&gpu->resident_limit_bytes, in->guarantee_bytes);
    atomic_store(&gpu->limit_bytes, in->limit_bytes);
    pthread_mutex_lock(&tangram.link.lock);
    atomic_store(&gpu->limits_came, true);
    pthread_cond_broadcast(&tangram.link.changed);
    pthread_mutex_unlock(&tangram.link.lock);
    keep_limit(gpu, in->limit_bytes);
    return true;
}

static bool discarded(const struct wire_ids *in)
{
    if (in->count < 1 || in->count > WIRE_BLOCKS_LIMIT)
        return false;
    discard_answered(in->id, in->count);
    return true;
}

/* The number of the GPU is the first of each body. */
static bool handle(const struct wire_packet *packet)
{
    const uint32_t wire = packet->body.gpu_only.gpu;
    struct gpu *gpu = wire < burst_->gpus ? burst_->gpu[wire] : NULL;
    switch (packet->header.type) {
    case WIRE_BURST:
        return limits(&packet->body.burst, gpu);
    case WIRE_SWAP_OUT:
    case WIRE_UNMAP:
    case WIRE_SWAP_IN:
    case WIRE_FILLED:
    case WIRE_CANCEL:
        return burst_order(packet, gpu);
    case WIRE_DISCARDED:
        return discarded(&packet->body.ids);
    default: /* ERROR, or what has no place here */
        return false;
    }
}

void burst_link_read(void)
{
    struct wire_packet *packet = malloc(sizeof *packet);
    int passed = -1;
    bool good = packet != NULL && wire_receive(&burst_->end, packet, &passed);
    good = good && (burst_->stage == LINK_GREETED ? welcomed(packet, passed) : handle(packet));
    free(packet);
    if (passed >= 0) /* the page, which the other connections have mapped */
        close(passed);
    if (!good)
        lost();
}

static struct wire_swappable state_of(unsigned wire)
{
    const struct elastic_totals totals = elastic_totals(burst_->gpu[wire]);
    return (struct wire_swappable){.gpu = wire, .reason = (uint32_t)elastic_reason(), .elastic_bytes = totals.bytes, .away_bytes = totals.away};
}

/* What was begun, and what an earlier arbiter did not answer. Before SWAPPABLE, which does not count it. */
static bool send_discards(void)
{
    struct wire_ids out = {0};
    for (unsigned i = 0; i < burst_->gpus; i++)
        while (burst_->gpu[i] != NULL && (out.count = (uint32_t)discard_next(burst_->gpu[i], out.id, WIRE_BLOCKS_LIMIT)) > 0) {
            out.gpu = i;
            memset(out.id + out.count, 0, (WIRE_BLOCKS_LIMIT - out.count) * sizeof *out.id);
            if (!wire_send(&burst_->end, WIRE_DISCARD, ++burst_->seq, &out, sizeof out))
                return false;
        }
    return true;
}

void burst_link_discard(void)
{
    if (burst_->stage != LINK_CONNECTED || !burst_->discards)
        return;
    discard_begin();
    atomic_store(&tangram.hot.swapped, elastic_is_moving());
}

void burst_link_state(void)
{
    const uint64_t now = now_ms();
    if (burst_->stage == LINK_CONNECTED && burst_->discards && atomic_load(&tangram.elastic.any_discarding) && !send_discards())
        lost();
    if (burst_->stage != LINK_CONNECTED || now < burst_->stated_ms + STATE_MS)
        return;
    for (unsigned i = 0; i < burst_->gpus; i++) {
        if (burst_->gpu[i] == NULL)
            continue;
        const struct wire_swappable state = state_of(i);
        if (burst_->is_stated[i] && memcmp(&state, &burst_->stated[i], sizeof state) == 0)
            continue;
        if (!wire_send(&burst_->end, WIRE_SWAPPABLE, ++burst_->seq, &state, sizeof state)) {
            lost();
            return;
        }
        burst_->stated[i] = state;
        burst_->is_stated[i] = true;
        burst_->stated_ms = now;
    }
}

/* Where an arbiter is connected that serves none, nothing is to be waited for. */
static bool may_come(void)
{
    return link_has_helper() && (tangram.link.stage != LINK_CONNECTED || arbiter_serves());
}

bool burst_limits_came(struct gpu *gpu)
{
    if (atomic_load_explicit(&gpu->limits_came, memory_order_acquire))
        return true;
    pthread_mutex_lock(&tangram.link.lock);
    if (burst_->until_ms == 0)
        burst_->until_ms = now_ms() + LIMITS_MS;
    link_have_helper();
    for (uint64_t until_ms = burst_->until_ms; !atomic_load(&gpu->limits_came) && may_come() && now_ms() < until_ms;) {
        until_ms += link_wait_slice(until_ms, link_wait_until);
        if (burst_->until_ms < until_ms) /* for other threads, too */
            burst_->until_ms = until_ms;
    }
    pthread_mutex_unlock(&tangram.link.lock);
    return atomic_load(&gpu->limits_came);
}

void burst_link_forget(void)
{
    struct wire_end end = burst_->end;
    *burst_ = (struct burst_link)BURST_LINK_NEVER_MET;
    wire_close(&end);
}
