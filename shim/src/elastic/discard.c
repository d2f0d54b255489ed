/* discard.c - memory that the program freed while it is away: regions without a live request, and blocks of created.c without handle and mapping.
 *
 *   kept, all away ── a second ──▶ discarding ── DISCARDED names all its blocks ──▶ addresses and lease are free
 *
 * From the first step on such memory is in no list of what this process has: it is neither used again nor made again, and SWAPPABLE does not count it. Its
 * lease stays until the arbiter has answered, for that counts it as away until then. What is not answered when a connection ends is sent again on the next
 * one, before SWAPPABLE: the arbiter compares that with what it has.
 *
 * Only the helper begins and sends. A region of a pool stays: the events of its streams do not pass while the channels are suspended.
 */
#include "link/link.h"
#include "memory/memory.h"

#include <pthread.h>
#include <stdlib.h>

enum {
    BLOCKS_MOST = 8192, /* at a time: 128 messages on a new connection; specified */
    ANSWER_MS = 2000    /* guessed: it takes milliseconds */
};

static struct elastic *const elastic = &tangram.elastic;

/* Locked. */
static bool is_all_away(const struct elastic_region *region)
{
    for (unsigned i = 0; i < region->blocks; i++)
        if (region->block[i].state != BLOCK_AWAY || region->block[i].leaked)
            return false;
    return elastic->discarding_blocks + region->blocks <= BLOCKS_MOST;
}

/* Locked. It is in no other list any more, and its blocks are. */
static void begin(struct elastic_region *region)
{
    struct gpu *gpu = region->gpu;
    for (unsigned i = 0; i < region->blocks; i++)
        block_move(&region->block[i], BLOCK_RESIDENT); /* nothing waits for it */
    atomic_fetch_sub(&gpu->away_bytes, region->bytes);
    atomic_fetch_add(&gpu->discarding_bytes, region->bytes);
    elastic->discarding_blocks += region->blocks;
    region->next_kept = elastic->discarding;
    elastic->discarding = region;
    atomic_store(&elastic->any_discarding, true);
}

static void begin_kept(struct gpu *gpu)
{
    lock_acquire(&elastic->lock);
    for (struct elastic_region *region = elastic->kept[gpu->at].oldest, *newer; region != NULL; region = newer) {
        newer = region->newer;
        if (region->rested && is_all_away(region)) {
            kept_remove(region);
            region_unlist(region);
            begin(region);
        }
        region->rested = true;
    }
    lock_release(&elastic->lock);
}

static void begin_created(void)
{
    struct created *created;
    if (!atomic_load_explicit(&elastic->created.any, memory_order_acquire))
        return;
    struct quiet quiet = created_enter();
    lock_acquire(&elastic->lock);
    while ((created = created_left_away()) != NULL && is_all_away(created->region)) {
        elastic->created.left--;
        blocks_unlist(created->region, true);
        begin(created->region);
    }
    lock_release(&elastic->lock);
    created_leave(quiet, NULL);
}

void discard_begin(void)
{
    for (unsigned i = 0; i < tangram.grant.gpus; i++)
        begin_kept(&tangram.grant.gpu[i]);
    begin_created();
}

size_t discard_next(struct gpu *gpu, uint64_t *ids, size_t most)
{
    size_t count = 0;
    lock_acquire(&elastic->lock);
    for (struct elastic_region *region = elastic->discarding; region != NULL && count < most; region = region->next_kept)
        for (unsigned i = 0; i < region->blocks && region->gpu == gpu && count < most; i++)
            if (!region->block[i].sent && !region->block[i].gone) {
                region->block[i].sent = true;
                ids[count++] = region->block[i].id;
            }
    lock_release(&elastic->lock);
    return count;
}

void discard_resend(void)
{
    lock_acquire(&elastic->lock);
    for (struct elastic_region *region = elastic->discarding; region != NULL; region = region->next_kept)
        for (unsigned i = 0; i < region->blocks; i++)
            region->block[i].sent = false;
    lock_release(&elastic->lock);
}

/* Locked. NULL: there is none such. */
static struct elastic_block *find(uint64_t id)
{
    for (struct elastic_region *region = elastic->discarding; region != NULL; region = region->next_kept)
        for (unsigned i = 0; i < region->blocks; i++)
            if (region->block[i].id == id)
                return &region->block[i];
    return NULL;
}

bool discard_has(uint64_t id)
{
    if (!atomic_load(&elastic->any_discarding))
        return false;
    lock_acquire(&elastic->lock);
    const bool there = find(id) != NULL;
    lock_release(&elastic->lock);
    return there;
}

/* Locked. One of which nothing is left, off the list. */
static struct elastic_region *take_gone(bool all)
{
    for (struct elastic_region **place = &elastic->discarding, *region; (region = *place) != NULL; place = &region->next_kept) {
        bool gone = true;
        for (unsigned i = 0; i < region->blocks; i++)
            gone = gone && (all || region->block[i].gone);
        if (!gone)
            continue;
        *place = region->next_kept;
        elastic->discarding_blocks -= region->blocks;
        return region;
    }
    atomic_store(&elastic->any_discarding, elastic->discarding != NULL);
    return NULL;
}

/* Its lease goes back at once: the arbiter counts it as away until then. It is never unused lease here, of which another thread would take some: that would
 * be memory on the GPU that the arbiter counts as away for a second. */
static void end(struct elastic_region *region)
{
    struct gpu *gpu = region->gpu;
    const uint64_t bytes = region->bytes;
    if (region->created != NULL) {
        vmm_let_go_at_once(region->created->charge);
        free(region->created);
        free(region);
    } else {
        region_end_away(region);
        link_return_used(gpu, WIRE_ELASTIC, bytes);
    }
    pthread_mutex_lock(&tangram.link.lock);
    atomic_fetch_sub(&gpu->discarding_bytes, bytes);
    pthread_cond_broadcast(&tangram.link.changed);
    pthread_mutex_unlock(&tangram.link.lock);
}

static void end_gone(bool all)
{
    for (;;) {
        lock_acquire(&elastic->lock);
        struct elastic_region *region = take_gone(all);
        lock_release(&elastic->lock);
        if (region == NULL)
            return;
        end(region);
    }
}

void discard_answered(const uint64_t *ids, size_t count)
{
    lock_acquire(&elastic->lock);
    for (size_t i = 0; i < count; i++) {
        struct elastic_block *block = find(ids[i]);
        if (block != NULL)
            block->gone = true;
    }
    lock_release(&elastic->lock);
    end_gone(false);
}

void discard_end_all(void)
{
    end_gone(true);
}

bool discard_wait(struct gpu *gpu)
{
    if (atomic_load(&gpu->discarding_bytes) == 0)
        return false;
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&tangram.link.lock);
    for (uint64_t until_ms = now_ms() + ANSWER_MS; atomic_load(&gpu->discarding_bytes) > 0 && now_ms() < until_ms && !helper_ended();)
        until_ms += link_wait_slice(until_ms, link_wait_until); /* `end` wakes it */
    pthread_mutex_unlock(&tangram.link.lock);
    quiet_end(quiet);
    return atomic_load(&gpu->discarding_bytes) == 0;
}
