/* pooled_free.c - cuMemFreeAsync and cuMemFree of memory of a pool that can be swapped. */
#include "memory/memory.h"
#include "memory/pool.h"

static struct elastic *const elastic = &tangram.elastic;

struct leaving {
    struct range *range;
    struct pooled *pool;
    CUcontext context; /* in which it was allocated; NULL: that is gone, or there was none */
    uint64_t number;   /* of this free */
};

/* The program freed it: a second free finds nothing. False: no live memory of a pool begins there. */
static bool leave(CUdeviceptr at, struct leaving *leaving)
{
    if (!atomic_load_explicit(&elastic->pooled.any, memory_order_acquire))
        return false;
    lock_acquire(&elastic->lock);
    struct elastic_region *region = region_of(at);
    struct range *range = region != NULL && region->pool != NULL ? region_range(region, at) : NULL;
    const bool found = range != NULL && range->at == at;
    if (found) {
        *leaving = (struct leaving){range, region->pool, range->context, atomic_fetch_add(&elastic->numbers, 1) + 1};
        pooled_leave(region->pool, range);
    }
    lock_release(&elastic->lock);
    return found;
}

/* The driver answered to its free. */
static CUresult left(const struct leaving *leaving, CUresult rc)
{
    lock_acquire(&elastic->lock);
    if (rc == CUDA_SUCCESS)
        pooled_give(leaving->pool, leaving->range);
    else
        pooled_stays(leaving->pool, leaving->range);
    lock_release(&elastic->lock);
    if (rc == CUDA_SUCCESS)
        atomic_store(&tangram.unsettled, true);
    return rc;
}

bool pooled_free(CUdeviceptr at, CUresult *rc)
{
    struct leaving leaving;
    CUcontext current = NULL;
    if (!leave(at, &leaving))
        return false;
    if (tangram.driver.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current != NULL)
        leaving.context = current;
    *rc = left(&leaving, leaving.context != NULL ? anchor_wait(leaving.context) : CUDA_SUCCESS);
    return true;
}

/* It waits in its stream. */
static bool waits(const struct leaving *leaving, unsigned long long id, CUstream stream)
{
    struct pooled_event *event = pooled_record(leaving->pool, id, stream, leaving->number);
    if (event == NULL)
        return false;
    lock_acquire(&elastic->lock);
    const bool put = pooled_put(leaving->pool, leaving->range, id, event);
    if (!put)
        pooled_event_back(leaving->pool, id, event);
    lock_release(&elastic->lock);
    if (put)
        atomic_store(&tangram.unsettled, true);
    return put;
}

/* No event could be recorded. All that was freed in the stream before is free, too. */
static CUresult waits_here(const struct leaving *leaving, unsigned long long id, CUstream stream)
{
    const CUresult rc = left(leaving, tangram.driver.cuStreamSynchronize(stream));
    lock_acquire(&elastic->lock);
    struct pooled_stream *its = rc == CUDA_SUCCESS ? pooled_stream(leaving->pool, id, false) : NULL;
    if (its != NULL)
        pooled_done(leaving->pool, its, leaving->number);
    lock_release(&elastic->lock);
    return rc;
}

bool pooled_free_async(CUdeviceptr at, CUstream stream, bool per_thread, CUresult *rc)
{
    struct leaving leaving;
    unsigned long long id;
    stream = pooled_named(stream, per_thread);
    if (!leave(at, &leaving))
        return false;
    *rc = tangram.driver.cuStreamGetId(stream, &id);
    if (*rc != CUDA_SUCCESS)
        left(&leaving, *rc);
    else if (!waits(&leaving, id, stream))
        *rc = waits_here(&leaving, id, stream);
    return true;
}
