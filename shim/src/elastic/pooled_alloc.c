/* pooled_alloc.c - cuMemAllocAsync and cuMemAllocFromPoolAsync from a pool's regions, and what releases those.
 *
 * In this order: what waits in the same stream; what is free; what other streams have got to, if the pool allows that; a new region; what waits in
 * another stream, for which this one is made to wait, if the pool allows that. The driver documents this order for its own pools.
 */
#include "gputime/activity.h"
#include "memory/memory.h"
#include "memory/pool.h"

static struct elastic *const elastic = &tangram.elastic;

static struct range *take(const struct pooled_request *request)
{
    lock_acquire(&elastic->lock);
    struct range *range = pooled_take(request);
    lock_release(&elastic->lock);
    return range;
}

/* The driver keeps the attributes. */
static bool allows(const struct pooled *pool, CUmemPool_attribute attribute)
{
    int value = 0;
    return tangram.driver.cuMemPoolGetAttribute(pool->handle, attribute, &value) == CUDA_SUCCESS && value != 0;
}

static bool has_streams(const struct pooled *pool)
{
    lock_acquire(&elastic->lock);
    const bool some = pooled_waits(pool);
    lock_release(&elastic->lock);
    return some;
}

static struct range *take_passed(const struct pooled_request *request)
{
    if (!has_streams(request->pool) || !allows(request->pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC))
        return NULL;
    pooled_settle(request->pool);
    return take(request);
}

static struct range *take_waiting(const struct pooled_request *request)
{
    CUevent event = NULL;
    if (!has_streams(request->pool) || !allows(request->pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES))
        return NULL;
    lock_acquire(&elastic->lock);
    struct range *range = pooled_take_waiting(request, &event);
    lock_release(&elastic->lock);
    if (range == NULL || pooled_wait(request, event) == CUDA_SUCCESS)
        return range;
    tangram.driver.cuEventSynchronize(event); /* the caller waits instead */
    return range;
}

/* The smallest region in which it fits. */
static uint64_t least_bytes(const struct pooled_request *request)
{
    return request->bytes < PAGE ? PAGE : pages_rounded(request->requested);
}

static uint64_t new_bytes(const struct pooled_request *request)
{
    const enum pooled_size size = request->bytes < PAGE ? POOLED_SMALL : POOLED_PAGES;
    lock_acquire(&elastic->lock);
    const uint64_t bytes = heap_region_bytes(&request->pool->heap[size], request->pool->region_bytes[size], least_bytes(request));
    lock_release(&elastic->lock);
    return bytes;
}

/* Reserves the lease for a new region. 0: it does not fit. */
static uint64_t pay(const struct pooled_request *request)
{
    struct gpu *gpu = request->pool->gpu;
    const uint64_t least = least_bytes(request), bytes = new_bytes(request);
    pooled_release(request->pool, 0, bytes); /* idle, and too small for this request */
    if (bytes > least && lease_reserve_as(gpu, WIRE_ELASTIC, bytes))
        return bytes;
    if (reserve_as(gpu, WIRE_ELASTIC, least))
        return least;
    if (least > lease_limit_bytes(gpu, WIRE_ELASTIC) || !elastic_is_moving())
        return 0;
    activity_await_memory(); /* what is idle and away is leased until then */
    return reserve_as(gpu, WIRE_ELASTIC, least) ? least : 0;
}

static struct elastic_region *region_of_pool(const struct pooled_request *request, uint64_t bytes, CUresult *rc)
{
    struct elastic_region *region =
        region_new(request->pool->gpu, request->pool->device, request->pool, bytes, request->bytes < PAGE ? REGION_POOL_SMALL : REGION_POOL, rc);
    if (region != NULL)
        region->live = 1; /* it may be swapped, as the pool stays */
    return region;
}

static CUresult take_new(const struct pooled_request *request, struct range **range)
{
    struct gpu *gpu = request->pool->gpu;
    lease_allocation_begin();
    uint64_t paid = pay(request);
    lease_allocation_end();
    const uint64_t least = least_bytes(request);
    CUresult rc;
    if (paid == 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct peers_held held = peers_enter();
    struct elastic_region *region = region_of_pool(request, paid, &rc);
    if (region == NULL && rc == CUDA_ERROR_OUT_OF_MEMORY && paid > least) { /* the GPU has less than the lease says */
        peers_leave(held);
        lease_give_back_as(gpu, WIRE_ELASTIC, paid - least);
        paid = least;
        held = peers_enter();
        region = region_of_pool(request, paid, &rc);
    }
    if (region == NULL) {
        peers_leave(held);
        lease_give_back_as(gpu, WIRE_ELASTIC, paid);
        return rc;
    }
    lock_acquire(&elastic->lock);
    const bool listed = region_list(region);
    if (listed) {
        pooled_open(request->pool, region);
        *range = pooled_take(request);
    }
    lock_release(&elastic->lock);
    peers_leave(held);
    if (!listed && region_end(region))
        lease_give_back_as(gpu, WIRE_ELASTIC, paid);
    return *range != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Leaves in `range` what serves the request. */
static CUresult serve(const struct pooled_request *request, struct range **range)
{
    CUresult rc = CUDA_SUCCESS;
    *range = take(request);
    if (*range == NULL)
        *range = take_passed(request);
    if (*range == NULL)
        rc = take_new(request, range);
    if (*range == NULL && rc == CUDA_ERROR_OUT_OF_MEMORY && (*range = take_waiting(request)) != NULL)
        rc = CUDA_SUCCESS;
    return rc;
}

static bool request_of(struct pool *from, uint64_t bytes, CUstream stream, struct pooled_request *request)
{
    *request = (struct pooled_request){.stream = stream, .requested = bytes, .bytes = pooled_rounded(bytes)};
    if (tangram.driver.cuStreamGetId(stream, &request->id) != CUDA_SUCCESS ||
        tangram.driver.cuCtxGetCurrent(&request->context) != CUDA_SUCCESS)
        return false;
    lock_acquire(&elastic->lock);
    request->pool = pooled_of(from, true);
    lock_release(&elastic->lock);
    return request->pool != NULL;
}

bool pooled_alloc(struct pool *from, CUdeviceptr *at, uint64_t bytes, CUstream stream, bool per_thread, CUresult *rc)
{
    struct pooled_request request;
    struct range *range;
    if (at == NULL || !request_of(from, bytes, pooled_named(stream, per_thread), &request))
        return false;
    *rc = serve(&request, &range);
    if (*rc != CUDA_SUCCESS && *rc != CUDA_ERROR_OUT_OF_MEMORY) {
        elastic_unable(ELASTIC_DRIVER_REFUSED);
        return false;
    }
    if (*rc != CUDA_SUCCESS)
        return true;
    *at = range->at;
    if (UNLIKELY(tangram.grant.clear)) {
        activity_await_memory(); /* it may be away beside what is live */
        clear_in_order(*at, bytes, stream, per_thread);
    }
    return true;
}

/* One idle region; adds it to what is unused lease by that. False: there is none. */
static bool release_one(struct pooled *pool, uint64_t keep, uint64_t *most, uint64_t *released)
{
    lock_acquire(&elastic->lock);
    struct elastic_region *region = pooled_take_idle(pool, keep, *most);
    lock_release(&elastic->lock);
    if (region == NULL)
        return false;
    struct gpu *gpu = region->gpu;
    const uint64_t bytes = region->bytes;
    *most -= bytes;
    if (region_end(region)) {
        lease_give_back_as(gpu, WIRE_ELASTIC, bytes);
        *released += bytes;
    }
    return true;
}

uint64_t pooled_release(struct pooled *pool, uint64_t keep, uint64_t most)
{
    uint64_t released = 0;
    while (release_one(pool, keep, &most, &released))
        continue;
    return released;
}

/* The one after it that has memory; NULL: begin. */
static struct pooled *next_pool(const struct pooled *after, bool *gone)
{
    lock_acquire(&elastic->lock);
    struct pooled *pool = after != NULL ? after->next : elastic->pooled.first;
    while (pool != NULL && pool->regions == 0)
        pool = pool->next;
    *gone = pool != NULL && pool->gone;
    lock_release(&elastic->lock);
    return pool;
}

static uint64_t reserved(const struct pooled *pool)
{
    lock_acquire(&elastic->lock);
    const uint64_t bytes = pooled_reserved(pool);
    lock_release(&elastic->lock);
    return bytes;
}

uint64_t pooled_trim(struct gpu *gpu, uint64_t bytes)
{
    uint64_t released = 0;
    bool gone;
    for (struct pooled *pool = next_pool(NULL, &gone); pool != NULL && released < bytes; pool = next_pool(pool, &gone)) {
        if (pool->gpu != gpu)
            continue;
        const uint64_t before = reserved(pool), missing = bytes - released;
        pooled_settle(pool);
        uint64_t its = pooled_release(pool, before > missing ? before - missing : 0, UINT64_MAX), most = UINT64_MAX;
        while (its < missing && release_one(pool, 0, &most, &its)) /* each is larger than what is missing */
            continue;
        released += its;
    }
    return released;
}

uint64_t pooled_trim_to(struct pool *pool, uint64_t keep_bytes)
{
    struct pooled *its = atomic_load(&pool->pooled);
    if (its == NULL)
        return keep_bytes;
    pooled_settle(its);
    pooled_release(its, keep_bytes, UINT64_MAX);
    const uint64_t left = reserved(its);
    return keep_bytes > left ? keep_bytes - left : 0;
}

struct pooled *pooled_destroy(struct pool *pool)
{
    struct pooled *its = atomic_exchange(&pool->pooled, NULL);
    if (its == NULL)
        return NULL;
    pooled_settle(its);
    lock_acquire(&elastic->lock);
    its->gone = true;
    lock_release(&elastic->lock);
    pooled_release(its, 0, UINT64_MAX);
    return its;
}

void pooled_stayed(struct pool *pool, struct pooled *its)
{
    if (its == NULL)
        return;
    lock_acquire(&elastic->lock);
    if (its->gone && its->handle == atomic_load(&pool->handle) && atomic_load(&pool->pooled) == NULL) {
        its->gone = false;
        atomic_store(&pool->pooled, its);
    }
    lock_release(&elastic->lock);
}

bool pooled_synchronized(void)
{
    bool more = false, gone;
    if (!atomic_load(&elastic->pooled.any))
        return false;
    for (struct pooled *pool = next_pool(NULL, &gone); pool != NULL; pool = next_pool(pool, &gone)) {
        cuuint64_t keep = 0;
        pooled_settle(pool);
        if (!gone && tangram.driver.cuMemPoolGetAttribute(pool->handle, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep) != CUDA_SUCCESS)
            keep = UINT64_MAX;
        pooled_release(pool, keep, UINT64_MAX);
        more |= has_streams(pool);
    }
    return more;
}
