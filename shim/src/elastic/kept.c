/* kept.c - regions without a live request, which are kept for the next one.
 *
 * What is kept is leased and not used: cuMemGetInfo counts it as free, and it is released when the lease is needed, by this process
 * (memory.c: reserve), by a sibling (a RECALL) or by nobody for a while (elastic_surplus). A large request gets a kept region of exactly
 * its size, so it is never charged more than the driver would take; it is that which makes cuMemAlloc and cuMemFree in turns cheap. A request
 * that shares gets the smallest in which no more than an eighth of what its kind has is free then (heap.h).
 */
#include "link/link.h"
#include "memory/memory.h"

static struct elastic *const elastic = &tangram.elastic;

_Static_assert(HEAP_REGION_MOST / PAGE == ELASTIC_KEPT_SIZES, "a list for each size of shared regions");

static unsigned size_of(uint64_t bytes)
{
    return (unsigned)(bytes / PAGE) - 1;
}

static struct elastic_region **list_of(struct elastic_kept *kept, enum region_kind kind, uint64_t bytes)
{
    return kind == REGION_LARGE ? &kept->large[bytes / PAGE % ELASTIC_KEPT_LISTS] : &kept->shared[kind][size_of(bytes)];
}

/* What is kept is no part of the regions of which an eighth may be free. */
static void note_added(struct elastic_kept *kept, const struct elastic_region *region)
{
    if (region->kind == REGION_LARGE)
        return;
    kept->sizes[region->kind] |= UINT64_C(1) << size_of(region->bytes);
    elastic->shared_bytes[region->gpu->at][region->kind] -= region->bytes;
}

static void note_removed(struct elastic_kept *kept, const struct elastic_region *region, bool last)
{
    if (region->kind == REGION_LARGE)
        return;
    if (last)
        kept->sizes[region->kind] ^= UINT64_C(1) << size_of(region->bytes);
    elastic->shared_bytes[region->gpu->at][region->kind] += region->bytes;
}

void kept_add(struct elastic_region *region)
{
    if (region->ipc.resident || region->ipc.exporting > 0) { /* others may still use it, or may soon */
        ipc_ended(region);
        return;
    }
    struct elastic_kept *kept = &elastic->kept[region->gpu->at];
    struct elastic_region **list = list_of(kept, region->kind, region->bytes);
    region->next_kept = *list;
    *list = region;
    note_added(kept, region);
    region->rested = false;
    region->older = kept->newest;
    region->newer = NULL;
    *(kept->newest != NULL ? &kept->newest->newer : &kept->oldest) = region;
    kept->newest = region;
    atomic_fetch_add(&region->gpu->kept_bytes, region->bytes);
}

void kept_remove(struct elastic_region *region)
{
    struct gpu *gpu = region->gpu;
    struct elastic_kept *kept = &elastic->kept[gpu->at];
    struct elastic_region **const list = list_of(kept, region->kind, region->bytes), **place = list;
    while (*place != region)
        place = &(*place)->next_kept;
    *place = region->next_kept;
    note_removed(kept, region, *list == NULL);
    *(region->older != NULL ? &region->older->newer : &kept->oldest) = region->newer;
    *(region->newer != NULL ? &region->newer->older : &kept->newest) = region->older;
    const uint64_t left = atomic_fetch_sub(&gpu->kept_bytes, region->bytes) - region->bytes;
    if (left < atomic_load(&gpu->kept_least_bytes))
        atomic_store(&gpu->kept_least_bytes, left);
}

/* The first of that list and of so many bytes. Where memory is zeroed before the program gets it, none that may be away. */
static struct elastic_region *first_of(struct elastic_region *region, uint64_t bytes)
{
    while (region != NULL && (region->bytes != bytes || (tangram.grant.clear && region->moving > 0)))
        region = region->next_kept;
    return region;
}

struct elastic_region *kept_of(struct gpu *gpu, enum region_kind kind, uint64_t bytes, uint64_t more)
{
    struct elastic_kept *kept = &elastic->kept[gpu->at];
    if (kind == REGION_LARGE)
        return first_of(*list_of(kept, kind, bytes), bytes);
    struct elastic_region *least = NULL;
    for (uint64_t sizes = kept->sizes[kind] >> size_of(bytes) << size_of(bytes); sizes != 0 && least == NULL; sizes &= sizes - 1) /* and larger */
        least = first_of(kept->shared[kind][__builtin_ctzll(sizes)], ((uint64_t)__builtin_ctzll(sizes) + 1) * PAGE);
    return least != NULL && least->bytes - bytes <= more ? least : NULL;
}

/* The oldest, off all lists. One that is being swapped stays. */
static struct elastic_region *take_oldest(struct gpu *gpu)
{
    lock_acquire(&elastic->lock);
    struct elastic_region *region = elastic->kept[gpu->at].oldest;
    while (region != NULL && region->moving > 0)
        region = region->newer;
    if (region != NULL) {
        kept_remove(region);
        region_unlist(region);
    }
    lock_release(&elastic->lock);
    return region;
}

static uint64_t trim_kept(struct gpu *gpu, uint64_t bytes)
{
    uint64_t released = 0;
    while (released < bytes) {
        struct elastic_region *region = take_oldest(gpu);
        if (region == NULL)
            break;
        const uint64_t its = region->bytes;
        if (region_end(region)) {
            lease_give_back_as(gpu, WIRE_ELASTIC, its);
            released += its;
        }
    }
    return released;
}

uint64_t elastic_trim(struct gpu *gpu, uint64_t bytes)
{
    ipc_release_ended();
    const uint64_t released = trim_kept(gpu, bytes);
    return released < bytes ? released + pooled_trim(gpu, bytes - released) : released;
}

/* What is idle in pools stays: the program decides how much. */
void elastic_surplus(void)
{
    ipc_release_ended();
    for (unsigned i = 0; i < tangram.grant.gpus; i++) {
        struct gpu *gpu = &tangram.grant.gpu[i];
        const uint64_t idle = atomic_exchange(&gpu->kept_least_bytes, atomic_load(&gpu->kept_bytes));
        if (idle > 0)
            trim_kept(gpu, lease_surplus_of(gpu, idle));
    }
}
