/* passing.c - OPEN, EXPORT and CONVERT on the connection to the arbiter. What they are for is in elastic/ipc.c and elastic/opened.c. */
#include "process.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OPEN_MS = 2000, CONVERT_MS = 2000 }; /* specified: protocol.md. An arbiter that cannot open it answers in 1,500 */

static struct link *const link_ = &tangram.link;
static struct passing *const passing = &tangram.passing;

static const char *const texts[] = {
    [0] = "the arbiter does not answer",
    [WIRE_UNKNOWN] = "no process of this pod has such memory, or it has freed it",
    [WIRE_NO_ANSWER] = "the process that has the memory does not answer",
    [WIRE_OUT_OF_DESCRIPTORS] = "no file descriptor is free",
    [WIRE_DRIVER_REFUSED] = "the driver refused to export the memory",
    [WIRE_BUSY] = "too many processes open memory at the moment",
    [WIRE_NO_GPU] = "the memory is on a GPU that this container does not have",
};

const char *passing_reason_text(enum wire_unopened_reason reason)
{
    return (unsigned)reason < sizeof texts / sizeof *texts ? texts[reason] : "the arbiter gives no reason that this library knows";
}

bool passing_is_understood(void)
{
    return link_wait() && (link_page_word(WIRE_GPU_TIME_AT + offsetof(struct wire_gpu_time, features)) & WIRE_UNDERSTANDS_OPEN) != 0;
}

/* Locked. False: the answer does not come in time, or at all. */
static bool answered(struct awaited *awaited, uint64_t patience_ms)
{
    const uint32_t ended = link_->ended;
    for (uint64_t deadline_ms = now_ms() + patience_ms; !awaited->answered && link_->ended == ended && now_ms() < deadline_ms;)
        deadline_ms += link_wait_for_packet(deadline_ms);
    awaited->seq = 0;
    return awaited->answered;
}

bool passing_open(const void *handle, struct passed_blocks *out)
{
    struct quiet quiet = quiet_begin();
    bool came = false;
    *out = (struct passed_blocks){0};
    pthread_mutex_lock(&passing->opening);
    pthread_mutex_lock(&link_->lock);
    if (link_->stage == LINK_CONNECTED && !link_is_silent()) {
        passing->open = (struct awaited){.seq = link_next_seq()};
        passing->into = out;
        came = wire_send(&link_->end, WIRE_OPEN, passing->open.seq, handle, WIRE_HANDLE_BYTES) && answered(&passing->open, OPEN_MS);
        passing->into = NULL;
    }
    pthread_mutex_unlock(&link_->lock);
    pthread_mutex_unlock(&passing->opening);
    quiet_end(quiet);
    return came && out->reason == 0;
}

void passed_blocks_free(struct passed_blocks *blocks)
{
    for (uint32_t i = 0; i < blocks->came; i++)
        if (blocks->fd[i] >= 0)
            close(blocks->fd[i]);
    free(blocks->fd);
    free(blocks->block_bytes);
    *blocks = (struct passed_blocks){0};
}

static struct gpu *gpu_of_wire(uint32_t wire)
{
    for (unsigned i = 0; i < tangram.grant.gpus; i++)
        if (atomic_load(&tangram.grant.gpu[i].wire) == (int)wire)
            return &tangram.grant.gpu[i];
    return NULL;
}

/* Locked. The first packet of an answer: room for all. */
static bool begin(struct passed_blocks *into, const struct wire_exported *in)
{
    into->gpu = gpu_of_wire(in->gpu);
    into->total = in->total;
    into->bytes = in->bytes;
    if (into->gpu == NULL || in->total == 0 || in->total > WIRE_OPEN_BLOCKS_LIMIT)
        return false;
    into->fd = malloc(in->total * sizeof *into->fd);
    into->block_bytes = malloc(in->total * sizeof *into->block_bytes);
    return into->fd != NULL && into->block_bytes != NULL;
}

/* Locked. False: the answer is not whole. */
static bool add(struct passed_blocks *into, const struct wire_exported *in, struct wire_passed *passed)
{
    const bool fits = into->came == in->first && in->total == into->total && in->bytes == into->bytes && in->count <= WIRE_PASSED_LIMIT &&
                      in->count <= into->total - into->came && passed->count == in->count;
    for (uint32_t i = 0; fits && i < in->count; i++) {
        into->fd[into->came] = passed->fd[i];
        into->block_bytes[into->came++] = in->block_bytes[i];
        passed->fd[i] = -1;
    }
    return fits;
}

void passing_came(uint32_t seq, const struct wire_exported *in, struct wire_passed *passed)
{
    pthread_mutex_lock(&link_->lock);
    struct passed_blocks *into = passing->into;
    if (into != NULL && passing->open.seq == seq && !passing->open.answered) {
        if (in->count == 0)
            into->reason = in->reason != 0 ? (enum wire_unopened_reason)in->reason : WIRE_UNKNOWN;
        else if ((into->came == 0 && !begin(into, in)) || !add(into, in, passed))
            into->reason = WIRE_OUT_OF_DESCRIPTORS; /* the kernel leaves out those for which there is no number */
        passing->open.answered = into->reason != 0 || into->came == into->total;
        pthread_cond_broadcast(&link_->changed);
    }
    pthread_mutex_unlock(&link_->lock);
}

void passing_answer(uint32_t seq, const struct wire_exported *exported, const int *fd)
{
    pthread_mutex_lock(&link_->lock);
    if (link_->stage == LINK_CONNECTED) /* what is not sent is not waited for long */
        wire_send_fds(&link_->end, WIRE_EXPORTED, seq, exported, sizeof *exported, fd, exported->count);
    pthread_mutex_unlock(&link_->lock);
}

/* Its answer is a LEASED, as that of HOLD: one of the two at a time. An arbiter that has not answered in time may have converted all the same: the
 * connection ends, and all leases are stated on the next one, where SWAPPABLE states which of them are elastic. */
enum link_answer passing_convert(struct gpu *gpu, uint64_t bytes)
{
    enum link_answer answer = LINK_ABSENT;
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&link_->sharing);
    pthread_mutex_lock(&link_->lock);
    const struct wire_amount message = {.gpu = (uint32_t)atomic_load(&gpu->wire), .bytes = bytes};
    if (link_->stage == LINK_CONNECTED && !link_is_silent() && atomic_load(&gpu->wire) >= 0) {
        link_->hold = (struct awaited){.seq = link_next_seq() | WIRE_SEQ_HOLD};
        const uint32_t ended = link_->ended;
        const bool sent = wire_send(&link_->end, WIRE_CONVERT, link_->hold.seq, &message, sizeof message);
        const bool came = sent && answered(&link_->hold, CONVERT_MS);
        if (came && link_->ended == ended)
            answer = link_->shared_answer.refused ? LINK_REFUSED : LINK_GRANTED;
        else if (sent && link_->ended == ended)
            wire_hang_up(&link_->end);
    }
    if (answer == LINK_GRANTED) {
        atomic_fetch_add(leased_of(gpu, WIRE_RESIDENT), bytes);
        atomic_fetch_sub(leased_of(gpu, WIRE_ELASTIC), bytes);
    }
    pthread_mutex_unlock(&link_->lock);
    pthread_mutex_unlock(&link_->sharing);
    quiet_end(quiet);
    return answer;
}

void passing_forget(void)
{
    *passing = (struct passing)PASSING_NEVER_MET;
}
