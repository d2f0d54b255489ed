/* pools.c - making, trimming and destroying pools, and the synchronisations at which the driver shrinks them. */
#include "hooks/hook.h"
#include "memory/memory.h"
#include "memory/pool.h"

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    NEEDS(cuMemPoolCreate);
    CUresult rc = tangram.driver.cuMemPoolCreate(pool, properties);
    if (rc != CUDA_SUCCESS || grant_ready() == GRANT_NONE)
        return rc;
    bool managed = properties->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED;
    struct gpu *gpu = managed ? gpu_of_managed(&properties->location) : gpu_of_location(&properties->location);
    struct pool *made = pool_record(*pool, properties->location.id, gpu, managed);
    if (made != NULL) {
        atomic_store(&made->swaps, gpu != NULL && pooled_may_be(properties));
        return rc;
    }
    tangram.driver.cuMemPoolDestroy(*pool);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* The driver keeps what the program still has, or what a stream has yet to free, until that is freed: so it is counted. After
 * the trim the pool has nothing else. */
EXPORT CUresult cuMemPoolDestroy(CUmemoryPool handle)
{
    NEEDS(cuMemPoolDestroy);
    struct pool *pool = pool_known(handle);
    if (pool == NULL || pool->gpu == NULL) {
        CUresult rc = tangram.driver.cuMemPoolDestroy(handle);
        if (rc == CUDA_SUCCESS && pool != NULL)
            atomic_store(&pool->gone, true);
        return rc;
    }
    struct pooled *swaps = pooled_destroy(pool);
    pool_trim(pool);
    atomic_fetch_add(&pool->live, 1); /* until the driver has answered its place is not free */
    atomic_store(&pool->gone, true);  /* before the call: its number may be reused at once */
    CUresult rc = tangram.driver.cuMemPoolDestroy(handle);
    if (rc == CUDA_SUCCESS) {
        atomic_store(&tangram.unsettled, true);
    } else {
        atomic_store(&pool->gone, false);
        pooled_stayed(pool, swaps);
    }
    atomic_fetch_sub(&pool->live, 1);
    return rc;
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep)
{
    NEEDS(cuMemPoolTrimTo);
    struct pool *known = atomic_load(&tangram.elastic.pooled.any) ? pool_known(handle) : NULL;
    CUresult rc = tangram.driver.cuMemPoolTrimTo(handle, known != NULL ? pooled_trim_to(known, keep) : keep);
    struct pool *pool = rc == CUDA_SUCCESS ? pool_known(handle) : NULL;
    if (pool != NULL && pool->gpu != NULL)
        pool_settle(pool);
    return rc;
}

/* begins: what is known before the wait. */
#define WAITS(name, params, begins, ...)                                                                                       \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct activity_before before = begins;                                                                                \
        CUresult rc = tangram.driver.name(__VA_ARGS__);                                                                        \
        if (work_ended(rc))                                                                                                    \
            activity_synced(before);                                                                                           \
        if (rc == CUDA_SUCCESS)                                                                                                \
            after_synchronize();                                                                                                                     \
        return rc;                                                                                                             \
    }

WAITS(cuStreamSynchronize, (CUstream stream), activity_sync_begins(stream, 0), stream)
WAITS(cuStreamSynchronize_ptsz, (CUstream stream), activity_sync_begins(stream, 1), stream)
WAITS(cuEventSynchronize, (CUevent event), (struct activity_before){0}, event)
WAITS(cuCtxSynchronize, (void), activity_context_sync_begins(NULL))
WAITS(cuCtxSynchronize_v2, (CUcontext context), activity_context_sync_begins(context), context)
