/* pooled_hooks.c - which pools are served here, and their attributes.
 *
 * Settable attributes are the driver's: it checks and keeps them. Its pool is empty, or has what was allocated while this process had no elastic
 * memory: so what a pool has reserved and used is the driver's figure and ours together.
 */
#include "hooks/hook.h"
#include "memory/memory.h"
#include "memory/pool.h"

static struct elastic *const elastic = &tangram.elastic;

void pooled_note_default(struct pool *pool)
{
    CUmemoryPool handle = NULL;
    const CUdevice device = atomic_load(&pool->device);
    if (tangram.driver.cuDeviceGetDefaultMemPool(&handle, device) == CUDA_SUCCESS && handle == atomic_load(&pool->handle))
        atomic_store(&pool->swaps, true);
}

bool pooled_may_be(const CUmemPoolProps *properties)
{
    return properties->allocType == CU_MEM_ALLOCATION_TYPE_PINNED && properties->handleTypes == CU_MEM_HANDLE_TYPE_NONE &&
           properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE && properties->win32SecurityAttributes == NULL &&
           properties->maxSize == 0 && properties->usage == 0 && properties->gpuDirectRDMACapable == 0;
}

/* Without a stream's own number nothing would distinguish it from one that has its handle later. */
bool pooled_wanted(struct pool *pool)
{
    struct gpu *gpu = atomic_load_explicit(&pool->gpu, memory_order_relaxed);
    if (!atomic_load_explicit(&gpu->bursts, memory_order_relaxed) || !atomic_load(&pool->swaps))
        return false;
    gpu_note_only(); /* it may be the process's first allocation */
    return elastic_wanted(gpu) && HAS(cuStreamGetId) && HAS(cuStreamWaitEvent) && HAS(cuMemPoolGetAttribute);
}

static uint64_t *high_of(struct pooled *pool, CUmemPool_attribute attribute)
{
    return attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH ? &pool->used_high : attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH ? &pool->reserved_high : NULL;
}

static uint64_t now_of(const struct pooled *pool, CUmemPool_attribute attribute)
{
    switch (attribute) {
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        return pool->used;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        return pooled_reserved(pool);
    default:
        return 0;
    }
}

/* Locked; NULL: the driver alone has its memory. */
static struct pooled *lock_pool(CUmemoryPool handle)
{
    struct pool *pool = atomic_load(&elastic->pooled.any) ? pool_known(handle) : NULL;
    lock_acquire(&elastic->lock);
    struct pooled *its = pool != NULL ? pooled_of(pool, false) : NULL;
    if (its == NULL)
        lock_release(&elastic->lock);
    return its;
}

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value)
{
    NEEDS(cuMemPoolGetAttribute);
    CUresult rc = tangram.driver.cuMemPoolGetAttribute(handle, attribute, value);
    struct pooled *pool = rc == CUDA_SUCCESS ? lock_pool(handle) : NULL;
    if (pool == NULL)
        return rc;
    const uint64_t *high = high_of(pool, attribute), ours = high != NULL ? *high : now_of(pool, attribute);
    lock_release(&elastic->lock);
    if (ours > 0)
        *(cuuint64_t *)value += ours;
    return rc;
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value)
{
    NEEDS(cuMemPoolSetAttribute);
    CUresult rc = tangram.driver.cuMemPoolSetAttribute(handle, attribute, value);
    struct pooled *pool = rc == CUDA_SUCCESS ? lock_pool(handle) : NULL;
    if (pool == NULL)
        return rc;
    uint64_t *high = high_of(pool, attribute);
    if (high != NULL)
        *high = now_of(pool, attribute);
    lock_release(&elastic->lock);
    return rc;
}

/* Its own device always has access. */
static bool is_for_others(const struct pool *pool, const CUmemAccessDesc *access, size_t count)
{
    for (size_t i = 0; access != NULL && i < count; i++)
        if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || access[i].location.id != pool->device)
            return true;
    return false;
}

/* Of what it has now, and will have. The driver has judged it. */
static CUresult open_own(struct pool *pool, const CUmemAccessDesc *access, size_t count)
{
    lock_acquire(&elastic->lock);
    struct pooled *its = pooled_of(pool, true);
    lock_release(&elastic->lock);
    return its != NULL ? peers_open_pool(its, access, count) : CUDA_ERROR_OUT_OF_MEMORY;
}

/* What a place that is no GPU has access to does not move. From then on the pool is the driver's; if it has memory that can be swapped, that would be
 * without the access. */
static CUresult renounce(struct pool *pool, CUmemoryPool handle, const CUmemAccessDesc *access, size_t count)
{
    const bool swaps = atomic_exchange(&pool->swaps, false);
    pooled_trim_to(pool, 0);
    struct pooled *its = lock_pool(handle);
    const bool some = its != NULL && its->regions > 0;
    if (its != NULL)
        lock_release(&elastic->lock);
    CUresult rc = some ? CUDA_ERROR_NOT_SUPPORTED : tangram.driver.cuMemPoolSetAccess(handle, access, count);
    if (some)
        warn(WARN_POOL_STAYS, "a pool that has memory that can be swapped was to be opened to a place that is no GPU: cuMemPoolSetAccess fails");
    if (rc != CUDA_SUCCESS)
        atomic_store(&pool->swaps, swaps);
    return rc;
}

EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *access, size_t count)
{
    NEEDS(cuMemPoolSetAccess);
    struct pool *pool = NULL; /* a default one may not have been seen yet */
    if (grant_ready() == GRANT_NONE || !pool_of_handle(handle, &pool) || pool == NULL || !is_for_others(pool, access, count))
        return tangram.driver.cuMemPoolSetAccess(handle, access, count);
    if (!access_can_note(access, count))
        return renounce(pool, handle, access, count);
    const CUresult rc = tangram.driver.cuMemPoolSetAccess(handle, access, count);
    return rc == CUDA_SUCCESS && atomic_load(&pool->swaps) ? open_own(pool, access, count) : rc;
}
