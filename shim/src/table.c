/* table.c - the device pointers this process owns, and their sizes.
 *
 * Open addressing in 64 shards, each behind its own lock for the few steps of one operation. A removal moves later entries
 * back instead of leaving marks, so a table that lives for days does not slow down.
 */
#include "process.h"

#include <stdlib.h>

enum { FIRST_SLOTS = 64 };

/* Fibonacci hashing: driver pointers differ in their middle bits only. The top bits choose the shard. */
static uint64_t mix(uint64_t at)
{
    at ^= at >> 32;
    return (at >> 8 | at << 56) * UINT64_C(0x9E3779B97F4A7C15);
}

static struct shard *shard_of(uint64_t hash)
{
    return &tangram.shard[hash >> 58];
}

static size_t home(uint64_t at, size_t slots)
{
    return (size_t)(mix(at) >> 30) & (slots - 1);
}

static void place(struct owned *slot, size_t slots, struct owned entry)
{
    size_t i = home(entry.at, slots);
    while (slot[i].at != 0)
        i = (i + 1) & (slots - 1);
    slot[i] = entry;
}

static bool grow(struct shard *shard)
{
    size_t slots = shard->slots ? shard->slots * 2 : FIRST_SLOTS;
    struct owned *slot = calloc(slots, sizeof *slot);
    if (slot == NULL)
        return false;
    for (size_t i = 0; i < shard->slots; i++)
        if (shard->slot[i].at != 0)
            place(slot, slots, shard->slot[i]);
    free(shard->slot);
    shard->slot = slot;
    shard->slots = slots;
    return true;
}

/* False when there is no memory to remember it in, or the pointer is NULL. */
bool table_own(uint64_t at, uint64_t bytes, struct card *card)
{
    struct shard *shard = shard_of(mix(at));
    if (at == 0)
        return false;
    pthread_mutex_lock(&shard->lock);
    bool room = (shard->used + 1) * 4 <= shard->slots * 3 || grow(shard);
    if (room) {
        place(shard->slot, shard->slots, (struct owned){at, bytes, card});
        shard->used++;
    }
    pthread_mutex_unlock(&shard->lock);
    return room;
}

static void close_gap(struct shard *shard, size_t gap)
{
    size_t mask = shard->slots - 1;
    for (size_t i = (gap + 1) & mask; shard->slot[i].at != 0; i = (i + 1) & mask) {
        size_t from = home(shard->slot[i].at, shard->slots);
        if (((i - from) & mask) >= ((i - gap) & mask)) { /* its home is at or before the gap */
            shard->slot[gap] = shard->slot[i];
            gap = i;
        }
    }
    shard->slot[gap].at = 0;
    shard->used--;
}

/* Takes the pointer out, with what it was. False when it is none of ours. */
bool table_disown(uint64_t at, struct owned *was)
{
    struct shard *shard = shard_of(mix(at));
    bool found = false;
    if (at == 0)
        return false;
    pthread_mutex_lock(&shard->lock);
    if (shard->used > 0) {
        size_t i = home(at, shard->slots);
        while (shard->slot[i].at != 0 && shard->slot[i].at != at)
            i = (i + 1) & (shard->slots - 1);
        found = shard->slot[i].at == at;
        if (found) {
            *was = shard->slot[i];
            close_gap(shard, i);
        }
    }
    pthread_mutex_unlock(&shard->lock);
    return found;
}

/* In a forked child. The tables may be half changed by a thread that is not here, so they are left, not freed. */
void table_forget_all(void)
{
    for (unsigned i = 0; i < SHARDS; i++) {
        tangram.shard[i].slot = NULL;
        tangram.shard[i].slots = tangram.shard[i].used = 0;
    }
}
