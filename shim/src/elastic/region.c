/* region.c - regions and their blocks: what the driver is called for, and which region an address is in. */
#include "memory/memory.h"
#include "memory/pool.h"

#include <stdlib.h>
#include <string.h>

static struct elastic *const elastic = &tangram.elastic;

enum { BLOCK_IDS_SHIFT = 16 }; /* blocks a microsecond, which no process makes */

/* A POSIX descriptor can be made of it, by which the copier imports it. */
CUresult block_make(struct elastic_block *block, CUdevice device)
{
    const CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    CUresult rc = tangram.driver.cuMemCreate(&block->handle, block->bytes, &prop, 0);
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = tangram.driver.cuMemMap(block->at, block->bytes, 0, block->handle, 0);
    if (rc != CUDA_SUCCESS)
        tangram.driver.cuMemRelease(block->handle);
    return rc;
}

CUresult block_open(const struct elastic_region *region, uint64_t at, uint64_t bytes)
{
    CUmemAccessDesc list[PEER_DEVICES + 1];
    const struct access others = peers_access(region);
    const unsigned count = access_list(region->device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, &others, list);
    return tangram.driver.cuMemSetAccess(at, bytes, list, count);
}

/* The first `blocks` of its blocks and its addresses go back to the driver. */
static bool release(struct elastic_region *region, unsigned blocks)
{
    bool whole = true;
    for (unsigned i = 0; i < blocks; i++) {
        const struct elastic_block *block = &region->block[i];
        const bool unmapped = tangram.driver.cuMemUnmap(block->at, block->bytes) == CUDA_SUCCESS;
        whole = tangram.driver.cuMemRelease(block->handle) == CUDA_SUCCESS && unmapped && whole;
    }
    return whole && tangram.driver.cuMemAddressFree(region->base, region->bytes) == CUDA_SUCCESS;
}

static void forget(struct elastic_region *region)
{
    if (region == NULL)
        return;
    free(region->first);
    free(region->starts);
    free(region);
}

static CUresult fill(struct elastic_region *region)
{
    CUresult rc = tangram.driver.cuMemAddressReserve(&region->base, region->bytes, 0, 0, 0);
    if (rc != CUDA_SUCCESS)
        return rc;
    unsigned made = 0;
    for (uint64_t at = 0; at < region->bytes; at += ELASTIC_BLOCK, made++) {
        const uint64_t left = region->bytes - at;
        struct elastic_block *block = &region->block[made];
        *block = (struct elastic_block){.at = region->base + at, .bytes = left < ELASTIC_BLOCK ? left : ELASTIC_BLOCK, .region = region};
        if ((rc = block_make(block, region->device)) != CUDA_SUCCESS)
            break;
    }
    if (rc == CUDA_SUCCESS)
        rc = block_open(region, region->base, region->bytes);
    if (rc != CUDA_SUCCESS)
        release(region, made);
    return rc;
}

/* Of what every request in it is a multiple. */
static uint64_t grain_of(const struct elastic_region *region)
{
    switch (region->kind) {
    case REGION_SMALL:
    case REGION_POOL_SMALL:
        return PAGE_GRAIN;
    case REGION_POOL:
        return POOLED_GRAIN;
    default:
        return PAGE;
    }
}

/* Its memory is reserved in the lease. */
struct elastic_region *region_new(struct gpu *gpu, CUdevice device, struct pooled *pool, uint64_t bytes, enum region_kind kind, CUresult *rc)
{
    const unsigned blocks = (unsigned)((bytes + ELASTIC_BLOCK - 1) / ELASTIC_BLOCK);
    struct elastic_region *region = calloc(1, sizeof *region + blocks * sizeof *region->block);
    *rc = CUDA_ERROR_OUT_OF_MEMORY;
    if (region == NULL)
        return NULL;
    region->gpu = gpu;
    region->device = device;
    region->pool = pool;
    region->bytes = bytes;
    region->blocks = blocks;
    region->kind = kind;
    region->starts = kind != REGION_LARGE ? calloc(bytes / grain_of(region), sizeof *region->starts) : NULL;
    region->first = heap_region(0, bytes);
    if (region->first != NULL && (region->starts != NULL || kind == REGION_LARGE)) {
        CUstreamCaptureMode mode = relax(); /* the program may capture here: what is ours is no part of that */
        *rc = fill(region);
        relax_end(mode);
    }
    if (*rc != CUDA_SUCCESS) {
        forget(region);
        return NULL;
    }
    region->first->at = region->base;
    return region;
}

/* What the driver did not take back stays charged, and is noted nowhere. */
bool region_end(struct elastic_region *region)
{
    struct peers_held held = peers_enter();
    CUstreamCaptureMode mode = relax();
    const bool whole = release(region, region->blocks);
    relax_end(mode);
    peers_leave(held);
    forget(region);
    return whole;
}

/* Without its addresses the process goes on. */
void region_end_away(struct elastic_region *region)
{
    CUstreamCaptureMode mode = relax();
    tangram.driver.cuMemAddressFree(region->base, region->bytes);
    relax_end(mode);
    forget(region);
}

bool grow_for(void **items, size_t count, size_t *capacity)
{
    if (count <= *capacity)
        return true;
    const size_t more = count * 2 > 64 ? count * 2 : 64;
    void *moved = realloc(*items, more * sizeof(void *));
    if (moved == NULL)
        return false;
    *items = moved;
    *capacity = more;
    return true;
}

/* Locked. How many regions begin at or below the address. */
static size_t regions_upto(uint64_t at)
{
    size_t low = 0, high = elastic->regions;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (elastic->region[middle]->base <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Locked. How many blocks have lower ids. */
static size_t blocks_below(uint64_t id)
{
    size_t low = 0, high = elastic->blocks;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (elastic->block[middle]->id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct elastic_block *block_of(uint64_t id)
{
    const size_t i = blocks_below(id);
    return i < elastic->blocks && elastic->block[i]->id == id ? elastic->block[i] : NULL;
}

bool blocks_list(struct elastic_region *region)
{
    if (!grow_for((void **)&elastic->block, elastic->blocks + region->blocks, &elastic->blocks_capacity))
        return false;
    if (elastic->ids == 0) /* a program that is executed anew has the process's ID and start time: its blocks are others all the same */
        elastic->ids = elastic->ids_from = now_us() << BLOCK_IDS_SHIFT;
    for (unsigned i = 0; i < region->blocks; i++) {
        region->block[i].id = ++elastic->ids; /* so the list of blocks stays sorted */
        elastic->block[elastic->blocks++] = &region->block[i];
    }
    atomic_fetch_add(&region->gpu->elastic_bytes, region->bytes);
    atomic_store(&elastic->any, true);
    return true;
}

void blocks_unlist(struct elastic_region *region, bool counted)
{
    const size_t first = blocks_below(region->block[0].id); /* its blocks follow each other */
    elastic->blocks -= region->blocks;
    memmove(&elastic->block[first], &elastic->block[first + region->blocks], (elastic->blocks - first) * sizeof(void *));
    if (counted)
        atomic_fetch_sub(&region->gpu->elastic_bytes, region->bytes);
}

bool region_list(struct elastic_region *region)
{
    if (!grow_for((void **)&elastic->region, elastic->regions + 1, &elastic->regions_capacity) || !blocks_list(region))
        return false;
    const size_t i = regions_upto(region->base);
    memmove(&elastic->region[i + 1], &elastic->region[i], (elastic->regions - i) * sizeof(void *));
    elastic->region[i] = region;
    elastic->regions++;
    if (region->kind < REGION_SHARED)
        elastic->shared_bytes[region->gpu->at][region->kind] += region->bytes;
    return true;
}

void region_unlist(struct elastic_region *region)
{
    const size_t i = regions_upto(region->base) - 1;
    elastic->regions--;
    memmove(&elastic->region[i], &elastic->region[i + 1], (elastic->regions - i) * sizeof(void *));
    blocks_unlist(region, true);
    if (region->kind < REGION_SHARED)
        elastic->shared_bytes[region->gpu->at][region->kind] -= region->bytes;
}

struct elastic_region *region_of(uint64_t at)
{
    const size_t i = regions_upto(at);
    struct elastic_region *region = i > 0 ? elastic->region[i - 1] : NULL;
    return region != NULL && at - region->base < region->bytes ? region : NULL;
}

bool regions_in(uint64_t at, uint64_t bytes)
{
    const size_t next = regions_upto(at);
    return region_of(at) != NULL || (next < elastic->regions && elastic->region[next]->base - at < bytes);
}

struct elastic_block *block_from(uint64_t at)
{
    const size_t i = regions_upto(at);
    struct elastic_region *region = i > 0 ? elastic->region[i - 1] : NULL;
    if (region != NULL)
        for (unsigned j = 0; j < region->blocks; j++)
            if (region->block[j].at >= at)
                return &region->block[j];
    return i < elastic->regions ? &elastic->region[i]->block[0] : NULL;
}

struct elastic_block *region_block(struct elastic_region *region, uint64_t at)
{
    return &region->block[(at - region->base) / ELASTIC_BLOCK];
}

struct range **region_start(struct elastic_region *region, uint64_t at)
{
    return &region->starts[(at - region->base) / grain_of(region)];
}

/* No request is longer than that, in grains. */
static size_t longest(const struct elastic_region *region)
{
    switch (region->kind) {
    case REGION_POOL:
        return region->bytes / POOLED_GRAIN;
    case REGION_MEDIUM:
        return ELASTIC_MEDIUM_MOST / PAGE;
    default:
        return PAGE_GRAINS;
    }
}

struct range *region_range(struct elastic_region *region, uint64_t at)
{
    struct range *range = region->first;
    if (region->starts != NULL) {
        struct range **start = region_start(region, at);
        for (size_t left = longest(region); left > 1 && start > region->starts && *start == NULL; left--)
            start--;
        range = *start;
    }
    return range != NULL && range->state == RANGE_LIVE && at - range->at < range->requested ? range : NULL;
}
