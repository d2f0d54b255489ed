/* kept.c - regions without a live request, which are kept for the next one.
 *
 * What is kept is leased and not used: cuMemGetInfo counts it as free, and it is released when the lease is needed, by this process
 * (memory.c: reserve), by a sibling (a RECALL) or by nobody for a while (elastic_surplus). A large request gets a kept region of exactly
 * its size, so it is never charged more than the driver would take; it is that which makes cuMemAlloc and cuMemFree in turns cheap.
 */
#include "link/link.h"
#include "memory/memory.h"

static struct elastic *const elastic = &tangram.elastic;

enum { SMALL_SIZES = 17 }; /* lists of them, by pages; large ones share the other lists */

static unsigned list_of(uint64_t bytes, bool small)
{
    const uint64_t pages = bytes / PAGE;
    return small ? (unsigned)pages : SMALL_SIZES + (unsigned)(pages % (ELASTIC_KEPT_LISTS - SMALL_SIZES));
}

void kept_add(struct elastic_region *region)
{
    struct elastic_kept *kept = &elastic->kept[region->gpu->at];
    struct elastic_region **list = &kept->list[list_of(region->bytes, region->starts != NULL)];
    region->next_kept = *list;
    *list = region;
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
    struct elastic_region **place = &kept->list[list_of(region->bytes, region->starts != NULL)];
    while (*place != region)
        place = &(*place)->next_kept;
    *place = region->next_kept;
    *(region->older != NULL ? &region->older->newer : &kept->oldest) = region->newer;
    *(region->newer != NULL ? &region->newer->older : &kept->newest) = region->older;
    const uint64_t left = atomic_fetch_sub(&gpu->kept_bytes, region->bytes) - region->bytes;
    if (left < atomic_load(&gpu->kept_least_bytes))
        atomic_store(&gpu->kept_least_bytes, left);
}

struct elastic_region *kept_of(struct gpu *gpu, uint64_t bytes, bool small)
{
    const struct elastic_kept *kept = &elastic->kept[gpu->at];
    struct elastic_region *region = NULL;
    if (small) {
        for (unsigned i = 1; i < SMALL_SIZES && region == NULL; i++)
            region = kept->list[i];
        return region;
    }
    region = kept->list[list_of(bytes, false)];
    while (region != NULL && region->bytes != bytes)
        region = region->next_kept;
    return region;
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

uint64_t elastic_trim(struct gpu *gpu, uint64_t bytes)
{
    uint64_t released = 0;
    while (released < bytes) {
        struct elastic_region *region = take_oldest(gpu);
        if (region == NULL)
            break;
        const uint64_t its = region->bytes;
        if (region_end(region)) {
            lease_give_back(gpu, its);
            released += its;
        }
    }
    return released;
}

void elastic_surplus(void)
{
    for (unsigned i = 0; i < tangram.grant.gpus; i++) {
        struct gpu *gpu = &tangram.grant.gpu[i];
        const uint64_t idle = atomic_exchange(&gpu->kept_least_bytes, atomic_load(&gpu->kept_bytes));
        if (idle > 0)
            elastic_trim(gpu, lease_surplus_of(gpu, idle));
    }
}
