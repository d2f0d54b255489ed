/* burst_orders.c - the arbiter's orders to swap, as docs/reference/protocol.md describes them. Only the helper calls this, while the channels
 * of the container are suspended.
 *
 * From SWAP_OUT until all memory is back, launches and copies of the program wait in the library (activity.c): the driver refuses a copy that names
 * an address where nothing is mapped, also while the copy would wait for a suspended channel.
 *
 * Nothing here allocates pinned memory, launches, fills, or waits for the GPU: each of these would wait for the suspended channels. An order is
 * checked as a whole before its first step. An answer that cannot be sent ends the connection, and the state of the blocks is stated on
 * the next one.
 */
#include "process.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { FULL_MS = 500 }; /* so long an answer waits for an arbiter that has not read its first packets yet; guessed */

struct order {
    uint32_t seq, wire;
    struct gpu *gpu;
};

void burst_orders_end(void)
{
    for (unsigned i = 0; i < tangram.grant.gpus; i++)
        elastic_stay(&tangram.grant.gpu[i]);
    atomic_store(&tangram.hot.swapped, elastic_is_moving());
}

static bool unable(const struct order *order, enum wire_unable_reason reason)
{
    const struct wire_unable answer = {.gpu = order->wire, .reason = (uint32_t)reason};
    debug("an order to swap cannot be carried out: reason %u", (unsigned)reason);
    return burst_link_send(WIRE_UNABLE, order->seq, &answer, sizeof answer, NULL, 0);
}

/* Nothing is swapped out while something outside may have the memory, or while this process's channels are not the arbiter's to suspend. */
static bool may_leave(void)
{
    return elastic_reason() == ELASTIC_ABLE && time_link_is_there();
}

/* Blocks with a descriptor each. The program may close a number that it did not open: what is sent and closed is only what is still ours. */
struct opened {
    struct wire_blocks list;
    struct wire_end end[WIRE_BLOCKS_LIMIT + 1];
    uint64_t bytes[WIRE_BLOCKS_LIMIT + 1], id[WIRE_BLOCKS_LIMIT + 1];
    unsigned count;
};

static bool open_block(struct opened *opened, uint64_t id, uint64_t bytes)
{
    const unsigned i = opened->count;
    const int fd = elastic_export(id);
    if (fd < 0 || !wire_own(&opened->end[i], fd))
        return false;
    opened->id[i] = id;
    opened->bytes[i] = bytes;
    opened->count++;
    return true;
}

static enum wire_unable_reason why_not_opened(void)
{
    return wire_has_descriptor() ? WIRE_DRIVER : WIRE_NO_DESCRIPTOR;
}

static void close_first(struct opened *opened, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        wire_close(&opened->end[i]);
    opened->count -= count;
    memmove(opened->end, opened->end + count, opened->count * sizeof *opened->end);
    memmove(opened->id, opened->id + count, opened->count * sizeof *opened->id);
    memmove(opened->bytes, opened->bytes + count, opened->count * sizeof *opened->bytes);
}

/* An answer of thousands of blocks fills the socket, or has more descriptors on their way than the user may have open. */
static bool send_blocks(const struct order *order, const struct wire_blocks *list, unsigned count, const int *fd)
{
    const uint32_t body_bytes = (uint32_t)(offsetof(struct wire_blocks, block) + count * sizeof *list->block);
    const struct timespec moment = {0, 1000000};
    const uint64_t until_ms = now_ms() + FULL_MS;
    bool sent;
    while (!(sent = burst_link_send(WIRE_BLOCKS, order->seq, list, body_bytes, fd, count)) && (errno == EAGAIN || errno == ETOOMANYREFS) && now_ms() < until_ms)
        nanosleep(&moment, NULL);
    return sent;
}

/* The first of them. */
static bool send_opened(const struct order *order, struct opened *opened, unsigned count, bool more)
{
    int fd[WIRE_BLOCKS_LIMIT];
    bool good = true;
    opened->list.gpu = order->wire;
    opened->list.count = count | (more ? WIRE_MORE_BLOCKS : 0);
    for (unsigned i = 0; i < count; i++) {
        fd[i] = opened->end[i].fd;
        opened->list.block[i] = (struct wire_block){opened->id[i], opened->bytes[i]};
        good = good && wire_is_ours(&opened->end[i]);
    }
    good = good && send_blocks(order, &opened->list, count, fd);
    close_first(opened, count);
    return good;
}

/* So many blocks as there are descriptors for go at once. The bit that another packet follows is set only where the first block of that has its
 * descriptor already. What gets none stays. */
static bool send_chosen(const struct order *order, const struct elastic_choice *chosen, size_t count)
{
    struct opened *opened = calloc(1, sizeof *opened);
    size_t next = 0; /* to be opened */
    bool good = opened != NULL, more = good;
    while (good && more) {
        while (opened->count <= WIRE_BLOCKS_LIMIT && next < count && open_block(opened, chosen[next].id, chosen[next].bytes))
            next++;
        if (opened->count == 0)
            break;
        const bool last = opened->count == 1 || (next == count && opened->count <= WIRE_BLOCKS_LIMIT);
        more = !last;
        good = send_opened(order, opened, last ? opened->count : opened->count - 1, more);
    }
    if (next == 0) {
        elastic_stay(order->gpu);
        good = unable(order, opened != NULL ? why_not_opened() : WIRE_NO_DESCRIPTOR);
    }
    for (size_t i = next; i < count && next > 0; i++)
        elastic_stay_block(chosen[i].id);
    if (opened != NULL)
        close_first(opened, opened->count);
    free(opened);
    return good;
}

/* What an earlier order chose and no UNMAP named stays: UNMAP is of the last SWAP_OUT. */
static bool swap_out(const struct order *order, uint64_t bytes)
{
    elastic_stay(order->gpu);
    const uint64_t there = elastic_totals(order->gpu).bytes;
    const size_t most = (size_t)((bytes < there ? bytes : there) / PAGE) + 1; /* blocks are whole pages, and none could be left out */
    struct elastic_choice *chosen = may_leave() ? malloc(most * sizeof *chosen) : NULL;
    const size_t count = chosen != NULL ? elastic_choose(order->gpu, bytes, chosen, most) : 0;
    const bool good = count > 0 ? send_chosen(order, chosen, count) : unable(order, WIRE_NO_ELASTIC_MEMORY);
    free(chosen);
    return good;
}

/* Does it name 1 to 64 different blocks of that GPU, each in one of two states? */
static bool all_are(const struct order *order, const struct wire_ids *in, enum block_state one, enum block_state other)
{
    enum block_state state;
    uint64_t bytes;
    if (in->count < 1 || in->count > WIRE_BLOCKS_LIMIT)
        return false;
    for (unsigned i = 0; i < in->count; i++) {
        if (!elastic_look(order->gpu, in->id[i], &state, &bytes) || (state != one && state != other))
            return false;
        for (unsigned j = 0; j < i; j++)
            if (in->id[j] == in->id[i])
                return false;
    }
    return true;
}

/* A block is named in the answer if it is away now, also where the driver did not release its memory: its content is the arbiter's. One that is not
 * chosen any more was exported or let go by the program since; one that still is was refused by the driver. */
static bool unmap(const struct order *order, const struct wire_ids *in)
{
    struct wire_ids done = {.gpu = order->wire};
    enum block_state state;
    uint64_t bytes;
    bool refused = false;
    if (!all_are(order, in, BLOCK_CHOSEN, BLOCK_CHOSEN))
        return unable(order, WIRE_UNKNOWN_BLOCK);
    if (!may_leave()) {
        elastic_stay(order->gpu);
        return unable(order, WIRE_NO_ELASTIC_MEMORY);
    }
    for (unsigned i = 0; i < in->count; i++) {
        elastic_unmap(in->id[i]);
        const bool there = elastic_look(order->gpu, in->id[i], &state, &bytes);
        if (there && state == BLOCK_AWAY)
            done.id[done.count++] = in->id[i];
        refused = refused || (there && state == BLOCK_CHOSEN);
    }
    if (done.count == 0)
        return unable(order, refused ? WIRE_DRIVER : WIRE_UNKNOWN_BLOCK);
    return burst_link_send(WIRE_UNMAPPED, order->seq, &done, sizeof done, NULL, 0);
}

/* Makes the block, where it is not made yet, and opens it; or changes nothing. */
static bool bring(const struct order *order, struct opened *opened, uint64_t id, enum wire_unable_reason *why)
{
    enum block_state state;
    uint64_t bytes;
    *why = WIRE_DRIVER;
    if (!elastic_look(order->gpu, id, &state, &bytes) || (state == BLOCK_AWAY && !elastic_make(id)))
        return false;
    if (open_block(opened, id, bytes))
        return true;
    *why = why_not_opened();
    if (state == BLOCK_AWAY)
        elastic_unmake(id);
    return false;
}

/* Without those that were discarded before this order came. */
static void leave_out_discarded(const struct wire_ids *in, struct wire_ids *out)
{
    *out = (struct wire_ids){.gpu = in->gpu};
    for (unsigned i = 0; i < in->count && i < WIRE_BLOCKS_LIMIT; i++)
        if (!discard_has(in->id[i]))
            out->id[out->count++] = in->id[i];
    if (in->count > WIRE_BLOCKS_LIMIT)
        out->count = in->count;
}

static bool swap_in(const struct order *order, const struct wire_ids *ordered)
{
    struct wire_ids left;
    const struct wire_ids *in = &left;
    leave_out_discarded(ordered, &left);
    if (!all_are(order, in, BLOCK_AWAY, BLOCK_MADE))
        return unable(order, WIRE_UNKNOWN_BLOCK);
    struct opened *opened = calloc(1, sizeof *opened);
    enum wire_unable_reason why = WIRE_NO_DESCRIPTOR;
    for (unsigned i = 0; opened != NULL && i < in->count && bring(order, opened, in->id[i], &why);)
        i++;
    const bool good = opened != NULL && opened->count > 0 ? send_opened(order, opened, opened->count, false) : unable(order, why);
    free(opened);
    return good;
}

/* It has no answer: an arbiter that names another block knows another state than ours, and gets it on the next connection. */
static bool filled(const struct order *order, const struct wire_ids *in)
{
    if (!all_are(order, in, BLOCK_MADE, BLOCK_RESIDENT)) /* an arbiter that does not know whether it arrived sends it again */
        return false;
    for (unsigned i = 0; i < in->count; i++)
        elastic_filled(in->id[i]); /* of a resident block it changes nothing */
    return true;
}

static bool carry_out(const struct order *order, const struct wire_packet *packet)
{
    switch (packet->header.type) {
    case WIRE_SWAP_OUT:
        atomic_store(&tangram.hot.swapped, true); /* before anything is chosen */
        return swap_out(order, packet->body.amount.bytes);
    case WIRE_UNMAP:
        return unmap(order, &packet->body.ids);
    case WIRE_SWAP_IN:
        return swap_in(order, &packet->body.ids);
    case WIRE_FILLED:
        return filled(order, &packet->body.ids);
    default:
        elastic_stay(order->gpu);
        return true;
    }
}

bool burst_order(const struct wire_packet *packet, struct gpu *gpu)
{
    const struct order order = {.seq = packet->header.seq, .wire = packet->body.gpu_only.gpu, .gpu = gpu};
    if (gpu == NULL)
        return packet->header.type == WIRE_CANCEL || (packet->header.type != WIRE_FILLED && unable(&order, WIRE_NO_ELASTIC_MEMORY));
    const bool good = carry_out(&order, packet);
    atomic_store(&tangram.hot.swapped, elastic_is_moving());
    return good;
}
