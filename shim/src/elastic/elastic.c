/* elastic.c - cuMemAlloc and cuMemFree from regions.
 *
 * An allocation is charged by regions: the lease is reserved before a region is made, and given back after it is released. What is free in
 * a region with other live requests costs nothing more, and what is kept (kept.c) is leased already.
 *
 *   request            region
 *   more than 32 MiB   of its own, of exactly the whole pages that the driver would take
 *   2 to 32 MiB        shared by best fit with others of these sizes
 *   less than 2 MiB    shared by best fit with others of these sizes
 *
 * A new shared region is a multiple of the request, of 128 MiB at most. It is so large that an eighth of the shared regions is free then, at
 * most (heap.h). A process that has little gets regions of exactly one request.
 *
 * The one lock is never held while the driver is called: a request that is freed is RANGE_LEAVING while its thread waits for the GPU.
 */
#include "gputime/activity.h"
#include "hooks/hook.h"
#include "memory/memory.h"
#include "memory/pool.h"

#include <string.h>

static struct elastic *const elastic = &tangram.elastic;

/* A request of the program's: what it stated, and as the driver would round it. */
struct request {
    struct gpu *gpu;
    CUcontext context;
    CUdevice device;
    uint64_t requested, bytes;
};

static enum region_kind kind_of(const struct request *request)
{
    return request->bytes < PAGE ? REGION_SMALL : request->bytes <= ELASTIC_MEDIUM_MOST ? REGION_MEDIUM : REGION_LARGE;
}

/* The smallest region in which it fits. */
static uint64_t least_bytes(const struct request *request)
{
    return request->bytes < PAGE ? PAGE : request->bytes;
}

/* Locked. `any`: also from a kept region of which more than an eighth of its kind would be free then. */
static struct range *take_shared(const struct request *request, bool any)
{
    const enum region_kind kind = kind_of(request);
    struct heap *heap = &elastic->heap[request->gpu->at][kind];
    struct range *range = heap_take(heap, request->bytes);
    struct elastic_region *kept = NULL;
    const uint64_t more = any ? UINT64_MAX : heap_spare_bytes(heap, elastic->shared_bytes[request->gpu->at][kind]);
    if (range == NULL)
        kept = kept_of(request->gpu, kind, least_bytes(request), more);
    if (kept == NULL)
        return range;
    kept_remove(kept);
    if (kept->bytes == request->bytes) {
        kept->first->state = RANGE_LIVE;
        return kept->first;
    }
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
    struct elastic_region *kept = kept_of(request->gpu, REGION_LARGE, request->bytes, 0);
    if (kept == NULL)
        return NULL;
    kept_remove(kept);
    kept->first->state = RANGE_LIVE;
    return kept->first;
}

/* Locked. From what there is; NULL: a region has to be made. */
static struct range *take(const struct request *request, bool any)
{
    struct range *range = kind_of(request) != REGION_LARGE ? take_shared(request, any) : take_large(request);
    if (range == NULL)
        return NULL;
    struct elastic_region *region = region_of(range->at);
    region->live++;
    if (region->starts != NULL)
        *region_start(region, range->at) = range;
    range->requested = request->requested;
    range->context = request->context;
    range->number = atomic_fetch_add(&elastic->numbers, 1) + 1;
    return range;
}

/* Locked. */
static struct range *give_shared(const struct elastic_region *region, struct range *range, bool last)
{
    struct heap *heap = &elastic->heap[region->gpu->at][region->kind];
    if (range->bytes == region->bytes) {
        range->state = RANGE_FREE;
        return range;
    }
    range = heap_give(heap, range);
    if (last)
        heap_close(heap, range);
    return range;
}

/* Locked. Where it is free now; of a region that is kept from here on: all of that. */
static struct range *give(struct range *range)
{
    struct elastic_region *region = region_of(range->at);
    const bool last = --region->live == 0;
    if (region->starts == NULL) {
        range->state = RANGE_FREE;
    } else {
        *region_start(region, range->at) = NULL;
        range = give_shared(region, range, last);
    }
    if (last)
        kept_add(region);
    return range;
}

static uint64_t new_bytes(const struct request *request)
{
    const enum region_kind kind = kind_of(request);
    if (kind == REGION_LARGE)
        return request->bytes;
    lock_acquire(&elastic->lock);
    const uint64_t bytes =
        heap_region_bytes(&elastic->heap[request->gpu->at][kind], elastic->shared_bytes[request->gpu->at][kind], least_bytes(request));
    lock_release(&elastic->lock);
    return bytes;
}

/* Reserves the lease for a new region. 0: it does not fit. */
static uint64_t pay(const struct request *request)
{
    struct gpu *gpu = request->gpu;
    const uint64_t bytes = new_bytes(request), least = least_bytes(request);
    if (bytes > least && lease_reserve_as(gpu, WIRE_ELASTIC, bytes))
        return bytes;
    if (reserve_as(gpu, WIRE_ELASTIC, least))
        return least;
    if (least > lease_limit_bytes(gpu, WIRE_ELASTIC) || atomic_load(&gpu->kept_bytes) == 0 || !elastic_is_moving())
        return 0;
    activity_await_memory(); /* what the program freed while it was away is leased until then */
    return reserve_as(gpu, WIRE_ELASTIC, least) ? least : 0;
}

/* Makes a region, and takes the request from it. */
static CUresult take_new(const struct request *request, CUdeviceptr *at)
{
    lease_allocation_begin();
    uint64_t paid = pay(request);
    lease_allocation_end();
    const uint64_t least = least_bytes(request);
    if (paid == 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc;
    struct peers_held held = peers_enter();
    struct elastic_region *region = region_new(request->gpu, request->device, NULL, paid, kind_of(request), &rc);
    if (region == NULL && rc == CUDA_ERROR_OUT_OF_MEMORY && paid > least) { /* the GPU has less than the lease says */
        peers_leave(held);
        lease_give_back_as(request->gpu, WIRE_ELASTIC, paid - least);
        paid = least;
        held = peers_enter();
        region = region_new(request->gpu, request->device, NULL, paid, kind_of(request), &rc);
    }
    if (region == NULL) {
        peers_leave(held);
        lease_give_back_as(request->gpu, WIRE_ELASTIC, paid);
        return rc;
    }
    lock_acquire(&elastic->lock);
    const bool listed = region_list(region);
    if (listed)
        kept_add(region);
    struct range *range = listed ? take(request, true) : NULL;
    if (range != NULL)
        *at = range->at;
    lock_release(&elastic->lock);
    peers_leave(held);
    if (!listed && region_end(region))
        lease_give_back_as(request->gpu, WIRE_ELASTIC, paid);
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
    struct range *range = take(&request, false);
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
    if (!atomic_load_explicit(&elastic->any, memory_order_acquire) && !atomic_load_explicit(&elastic->ipc.any_opened, memory_order_acquire))
        return false;
    lock_acquire(&elastic->lock);
    const struct range *range = live_at(at, &region);
    const bool opened = range == NULL && ipc_find(at, found);
    if (range != NULL) {
        const struct elastic_block *block = region_block(region, at);
        *found = (struct elastic_found){.gpu = region->gpu, .device = region->device, .at = range->at, .requested = range->requested,
                                        .mapping = region->base, .mapped = region->bytes, .number = range->number, .block = block->id,
                                        .context = range->context, .pooled = region->pool != NULL};
        found->pool = found->pooled ? region->pool->handle : NULL;
    }
    lock_release(&elastic->lock);
    return range != NULL || opened;
}

bool elastic_in(CUdeviceptr at, uint64_t bytes)
{
    if (bytes == 0 || (!atomic_load_explicit(&elastic->any, memory_order_acquire) && !atomic_load_explicit(&elastic->ipc.any_opened, memory_order_acquire)))
        return false;
    lock_acquire(&elastic->lock);
    const bool some = regions_in(at, bytes) || ipc_in(at, bytes);
    lock_release(&elastic->lock);
    return some;
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
    if (pooled_free(at, rc))
        return true;
    struct range *range = leave(at, &context);
    if (range == NULL)
        return false;
    *rc = anchor_wait(context);
    left(range, *rc);
    ipc_release_ended();
    return true;
}

/* The driver frees plain memory in a stream's order, too, but not in a capture: its own error for this pointer is the answer there. */
bool elastic_free_async(CUdeviceptr at, CUstream stream, bool per_thread, CUresult *rc)
{
    CUcontext context;
    if (capturing(stream, per_thread))
        return false;
    if (pooled_free_async(at, stream, per_thread, rc))
        return true;
    struct range *range = leave(at, &context);
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
    struct range *range = region == NULL ? NULL : region->starts == NULL ? region->first : *region_start(region, at);
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
        for (struct range *range = (gpu == NULL || region->gpu == gpu) && region->pool == NULL ? region->first : NULL; range != NULL; range = range->above)
            if (range->state == RANGE_LIVE && range->context == context && range->number <= before)
                range = give(range);
    }
    lock_release(&elastic->lock);
    pooled_forget_context(context, before);
    ipc_release_ended();
}

/* Left, not freed: a thread that is not here may have been changing it. */
void elastic_forget_all(void)
{
    memset(elastic, 0, sizeof *elastic);
    elastic->created = (struct created_all){.lock = PTHREAD_MUTEX_INITIALIZER, .back = PTHREAD_COND_INITIALIZER};
    elastic->peers = (struct peers){.lock = PTHREAD_MUTEX_INITIALIZER};
}
