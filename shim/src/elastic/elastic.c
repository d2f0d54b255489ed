/* elastic.c - cuMemAlloc and cuMemFree from regions.
 *
 * An allocation is charged by regions: the lease is reserved before a region is made, and given back after it is released. What is free in
 * a region with other live requests costs nothing more, and what is kept (kept.c) is leased already.
 *
 *   request       region
 *   2 MiB and up  of its own, of exactly the whole pages that the driver would take
 *   less          shared by best fit; a new one has an eighth of what small requests have so far, from 2 to 32 MiB
 *
 * The one lock is never held while the driver is called: a request that is freed is RANGE_LEAVING while its thread waits for the GPU.
 */
#include "hooks/hook.h"
#include "memory/memory.h"
#include "memory/pool.h"

#include <string.h>

static struct elastic *const elastic = &tangram.elastic;

static const uint64_t SMALL_MOST = 32 * MIB;
enum { SMALL_PART = 8 };

/* A request of the program's: what it stated, and as the driver would round it. */
struct request {
    struct gpu *gpu;
    CUcontext context;
    CUdevice device;
    uint64_t requested, bytes;
};

static bool is_small(const struct request *request)
{
    return request->bytes < PAGE;
}

/* Locked. */
static struct range *take_small(const struct request *request)
{
    struct heap *heap = &elastic->heap[request->gpu->at];
    struct range *range = heap_take(heap, request->bytes);
    struct elastic_region *kept = range == NULL ? kept_of(request->gpu, request->bytes, true) : NULL;
    if (kept == NULL)
        return range;
    kept_remove(kept);
    heap_open(heap, kept->first);
    range = heap_take(heap, request->bytes);
    if (range == NULL) { /* no memory to note the rest of it */
        heap_close(heap, kept->first);
        kept_add(kept);
    }
    return range;
}

/* Locked. */
static struct range *take_large(const struct request *request)
{
    struct elastic_region *kept = kept_of(request->gpu, request->bytes, false);
    if (kept == NULL)
        return NULL;
    kept_remove(kept);
    kept->first->state = RANGE_LIVE;
    return kept->first;
}

/* Locked. From what there is; NULL: a region has to be made. */
static struct range *take(const struct request *request)
{
    struct range *range = is_small(request) ? take_small(request) : take_large(request);
    if (range == NULL)
        return NULL;
    struct elastic_region *region = region_of(range->at);
    region->live++;
    if (region->starts != NULL)
        region->starts[(range->at - region->base) / PAGE_GRAIN] = range;
    range->requested = request->requested;
    range->context = request->context;
    range->number = atomic_fetch_add(&elastic->numbers, 1) + 1;
    return range;
}

/* Locked. Where it is free now; of a region that is kept from here on: all of that. */
static struct range *give(struct range *range)
{
    struct elastic_region *region = region_of(range->at);
    struct heap *heap = &elastic->heap[region->gpu->at];
    const bool last = --region->live == 0;
    if (region->starts == NULL) {
        range->state = RANGE_FREE;
    } else {
        region->starts[(range->at - region->base) / PAGE_GRAIN] = NULL;
        range = heap_give(heap, range);
        if (last)
            heap_close(heap, range);
    }
    if (last)
        kept_add(region);
    return range;
}

/* Reserves the lease for a new region. 0: it does not fit. */
static uint64_t pay(const struct request *request)
{
    struct gpu *gpu = request->gpu;
    if (!is_small(request))
        return reserve(gpu, request->bytes) ? request->bytes : 0;
    lock_acquire(&elastic->lock);
    uint64_t bytes = elastic->small_bytes[gpu->at] / SMALL_PART / PAGE * PAGE;
    lock_release(&elastic->lock);
    bytes = bytes < SMALL_MOST ? bytes : SMALL_MOST;
    if (bytes > PAGE && lease_reserve(gpu, bytes))
        return bytes;
    return reserve(gpu, PAGE) ? PAGE : 0;
}

/* Makes a region, and takes the request from it. */
static CUresult take_new(const struct request *request, CUdeviceptr *at)
{
    const uint64_t paid = pay(request);
    if (paid == 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc;
    struct elastic_region *region = region_new(request->gpu, request->device, paid, is_small(request), &rc);
    if (region == NULL) {
        lease_give_back(request->gpu, paid);
        return rc;
    }
    lock_acquire(&elastic->lock);
    const bool listed = region_list(region);
    if (listed)
        kept_add(region);
    struct range *range = listed ? take(request) : NULL;
    if (range != NULL)
        *at = range->at;
    lock_release(&elastic->lock);
    if (!listed && region_end(region))
        lease_give_back(request->gpu, paid);
    return range != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static bool request_of(struct gpu *gpu, uint64_t bytes, struct request *request)
{
    *request = (struct request){.gpu = gpu, .requested = bytes, .bytes = pages_rounded(bytes)};
    return bytes > 0 && tangram.driver.cuCtxGetCurrent(&request->context) == CUDA_SUCCESS && request->context != NULL &&
           tangram.driver.cuCtxGetDevice(&request->device) == CUDA_SUCCESS;
}

bool elastic_alloc(struct gpu *gpu, CUdeviceptr *at, uint64_t bytes, CUresult *rc)
{
    struct request request;
    if (at == NULL || !request_of(gpu, bytes, &request))
        return false;
    lock_acquire(&elastic->lock);
    struct range *range = take(&request);
    if (range != NULL)
        *at = range->at;
    lock_release(&elastic->lock);
    *rc = range != NULL ? CUDA_SUCCESS : take_new(&request, at);
    if (*rc == CUDA_SUCCESS && range == NULL)
        anchor_drop(gpu, request.context);
    if (*rc == CUDA_SUCCESS || *rc == CUDA_ERROR_OUT_OF_MEMORY)
        return true;
    elastic_unable(ELASTIC_DRIVER_REFUSED);
    return false;
}

/* Locked. */
static struct range *live_at(CUdeviceptr at, struct elastic_region **region)
{
    *region = region_of(at);
    return *region != NULL ? region_range(*region, at) : NULL;
}

bool elastic_find(CUdeviceptr at, struct elastic_found *found)
{
    struct elastic_region *region;
    if (!atomic_load_explicit(&elastic->any, memory_order_acquire))
        return false;
    lock_acquire(&elastic->lock);
    const struct range *range = live_at(at, &region);
    if (range != NULL) {
        const struct elastic_block *block = region_block(region, at);
        *found = (struct elastic_found){.gpu = region->gpu, .device = region->device, .at = range->at, .requested = range->requested,
                                        .mapping = region->base, .mapped = region->bytes, .number = range->number, .block = block->id,
                                        .context = range->context};
    }
    lock_release(&elastic->lock);
    return range != NULL;
}

/* The program freed it: a second free finds nothing. NULL: no live request begins there. */
static struct range *leave(CUdeviceptr at, CUcontext *context)
{
    struct elastic_region *region;
    if (!atomic_load_explicit(&elastic->any, memory_order_acquire))
        return NULL;
    lock_acquire(&elastic->lock);
    struct range *range = live_at(at, &region);
    if (range != NULL && range->at == at) {
        range->state = RANGE_LEAVING;
        *context = range->context;
    } else {
        range = NULL;
    }
    lock_release(&elastic->lock);
    return range;
}

/* The driver answered to its free. */
static void left(struct range *range, CUresult rc)
{
    lock_acquire(&elastic->lock);
    if (rc == CUDA_SUCCESS)
        give(range);
    else
        range->state = RANGE_LIVE;
    lock_release(&elastic->lock);
}

bool elastic_free(CUdeviceptr at, CUresult *rc)
{
    CUcontext context;
    struct range *range = leave(at, &context);
    if (range == NULL)
        return false;
    *rc = anchor_wait(context);
    left(range, *rc);
    return true;
}

/* The driver frees plain memory in a stream's order, too, but not in a capture: its own error for this pointer is the answer there. */
bool elastic_free_async(CUdeviceptr at, CUstream stream, bool per_thread, CUresult *rc)
{
    CUcontext context;
    struct range *range = capturing(stream, per_thread) ? NULL : leave(at, &context);
    if (range == NULL)
        return false;
    *rc = CUDA_SUCCESS;
    if (late_free(&(struct owned){.at = OWNED_AS(OWNED_ELASTIC, at)}, stream, per_thread))
        return true;
    *rc = tangram.driver.cuStreamSynchronize(stream); /* no event could be recorded, perhaps because there is no such stream */
    left(range, *rc);
    return true;
}

/* A range that is leaving is in its region's list of starts until it is given. */
void elastic_gone(CUdeviceptr at)
{
    lock_acquire(&elastic->lock);
    struct elastic_region *region = region_of(at);
    struct range *range = region == NULL ? NULL : region->starts == NULL ? region->first : region->starts[(at - region->base) / PAGE_GRAIN];
    if (range != NULL && range->state == RANGE_LEAVING)
        give(range);
    lock_release(&elastic->lock);
}

/* Memory of a context ends with it. */
void elastic_forget_context(CUcontext context, struct gpu *gpu, uint64_t before)
{
    if (!atomic_load(&elastic->any))
        return;
    lock_acquire(&elastic->lock);
    anchor_forget(context);
    for (size_t i = 0; i < elastic->regions; i++) {
        struct elastic_region *region = elastic->region[i];
        for (struct range *range = gpu == NULL || region->gpu == gpu ? region->first : NULL; range != NULL; range = range->above)
            if (range->state == RANGE_LIVE && range->context == context && range->number <= before)
                range = give(range);
    }
    lock_release(&elastic->lock);
}

/* Left, not freed: a thread that is not here may have been changing it. */
void elastic_forget_all(void)
{
    memset(elastic, 0, sizeof *elastic);
}
