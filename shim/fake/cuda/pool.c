/* pool.c - stream-ordered memory: pools that keep what is freed until the next synchronisation, as the real ones do.
 *
 * A pool's reserved bytes are counted on the card, its used bytes are what the program holds. A pool grows by what is
 * missing, in steps of 2 MiB; synchronising lets it shrink to its release threshold.
 */
#include "internal.h"

#include <stdlib.h>

#define STEP (2 * FAKE_MIB)

CUresult pool_new(CUmemoryPool *made, int device, uint64_t most)
{
    CUmemoryPool pool = handle_new(HANDLE_POOL, sizeof *pool);
    CHECK(pool != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    pool->device = device;
    pool->most = most;
    *made = pool;
    return CUDA_SUCCESS;
}

/* A default pool is made when it is asked for. */
static CUmemoryPool made_once(CUmemoryPool *kept, int device, bool host)
{
    CUmemoryPool made = NULL;
    if (*kept == NULL && pool_new(&made, device, 0) == CUDA_SUCCESS) {
        made->host = host;
        lock();
        if (*kept == NULL)
            *kept = made;
        unlock();
    }
    return *kept;
}

static CUmemoryPool pool_default(int device)
{
    struct device *of = &cuda.device[device];
    CUmemoryPool made = made_once(&of->default_pool, device, false);
    lock();
    if (of->pool == NULL)
        of->pool = made;
    unlock();
    return made;
}

static bool pool_ok(CUmemoryPool pool)
{
    return handle_is(pool, HANDLE_POOL);
}

static bool pool_take(CUmemoryPool pool, uint64_t bytes)
{
    return pool->host || take(pool->device, bytes);
}

static void pool_give(CUmemoryPool pool, uint64_t bytes)
{
    if (!pool->host)
        give(pool->device, bytes);
}

void pool_shrink(CUmemoryPool pool, uint64_t keep)
{
    const uint64_t floor = rounded(pool->used > keep ? pool->used : keep, STEP);
    if (pool->reserved <= floor)
        return;
    pool_give(pool, pool->reserved - floor);
    pool->reserved = floor;
}

void pools_synchronized(int device)
{
    struct device *of = &cuda.device[device];
    const CUmemoryPool its[] = {of->default_pool, of->pool, of->managed_pool, of->nowhere_pool, of->host_pool};
    lock();
    for (unsigned i = 0; i < sizeof its / sizeof *its; i++)
        if (its[i] != NULL)
            pool_shrink(its[i], its[i]->threshold);
    unlock();
}

bool pool_grow(CUmemoryPool pool, uint64_t bytes)
{
    const uint64_t used = pool->used + bytes, reserved = rounded(used, STEP);
    if (pool->most != 0 && used > pool->most)
        return false;
    if (reserved > pool->reserved) {
        /* At the brim a whole step may not be left: take what is. */
        if (pool_take(pool, reserved - pool->reserved))
            pool->reserved = reserved;
        else if (used > pool->reserved && pool_take(pool, used - pool->reserved))
            pool->reserved = used;
        else if (used > pool->reserved)
            return false;
    }
    pool->used = used;
    if (used > pool->used_high)
        pool->used_high = used;
    if (pool->reserved > pool->reserved_high)
        pool->reserved_high = pool->reserved;
    return true;
}

CUresult pool_free(struct span *span)
{
    CUmemoryPool pool = span->pool;
    const uint64_t bytes = rounded(span->bytes, GRAIN);
    pool->used -= bytes < pool->used ? bytes : pool->used;
    if (span->kind == SPAN_GRAPH) { /* the address stays the graph's */
        span->usable = false;
        return CUDA_SUCCESS;
    }
    span_remove(span);
    if (span->object == 0) {
        arena_give(span);
    } else { /* somebody else may still read these pages: never use them again */
        object_release(span->object);
        free(span);
    }
    return CUDA_SUCCESS;
}

static CUresult alloc_from(CUdeviceptr *at, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    struct span *span;
    CHECK(at != NULL, CUDA_ERROR_INVALID_VALUE);
    CHECK(bytes <= ARENA_BYTES / 2, CUDA_ERROR_OUT_OF_MEMORY);
    if (bytes == 0) { /* a success without memory: measured, driver 580 */
        *at = 0;
        return CUDA_SUCCESS;
    }
    if (stream->capture != NULL)
        return capture_alloc(stream->capture, stream->ctx->device, at, bytes);
    const uint64_t counted = rounded(bytes, GRAIN);
    lock();
    const bool fits = pool_grow(pool, counted);
    unlock();
    CHECK(fits, CUDA_ERROR_OUT_OF_MEMORY);
    const CUresult rc = memory_new(SPAN_POOL, stream->ctx, pool->device, bytes, 0, &span);
    lock();
    if (rc == CUDA_SUCCESS)
        span->pool = pool;
    else
        pool->used -= counted;
    unlock();
    if (rc == CUDA_SUCCESS)
        *at = (CUdeviceptr)span->base;
    return rc;
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *at, size_t bytes, CUstream handle)
{
    CUstream stream;
    TRY(stream_get(handle, &stream));
    CHECK(pool_default(stream->ctx->device) != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    return alloc_from(at, bytes, cuda.device[stream->ctx->device].pool, stream);
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *at, size_t bytes, CUmemoryPool pool, CUstream handle)
{
    CUstream stream;
    TRY(stream_get(handle, &stream));
    CHECK(pool_ok(pool), CUDA_ERROR_INVALID_VALUE);
    return alloc_from(at, bytes, pool, stream);
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr at, CUstream handle)
{
    CUstream stream;
    TRY(stream_get(handle, &stream));
    if (stream->capture != NULL)
        return capture_free(stream->capture, at);
    if (at == 0)
        return CUDA_SUCCESS;
    lock();
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    struct span *span = span_find((uintptr_t)at);
    if (span != NULL && span->base == (uintptr_t)at) {
        if (span->kind == SPAN_POOL || (span->kind == SPAN_GRAPH && span->usable)) {
            rc = pool_free(span);
        } else if (span->kind == SPAN_DEVICE || (span->kind == SPAN_IPC && span->pool != NULL)) {
            memory_gone(span);
            rc = CUDA_SUCCESS;
        }
    }
    unlock();
    return rc;
}

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *how)
{
    TRY(ready());
    CHECK(pool != NULL && how != NULL && how->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
    TRY(device_ok(how->location.id));
    return pool_new(pool, how->location.id, how->maxSize);
}

static bool is_default(CUmemoryPool pool)
{
    const struct device *of = &cuda.device[pool->device];
    return pool == of->default_pool || pool == of->managed_pool || pool == of->nowhere_pool || pool == of->host_pool;
}

EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    TRY(ready());
    CHECK(pool_ok(pool) && !is_default(pool), CUDA_ERROR_INVALID_VALUE);
    lock();
    if (cuda.device[pool->device].pool == pool)
        cuda.device[pool->device].pool = cuda.device[pool->device].default_pool;
    pool_give(pool, pool->reserved);
    unlock();
    handle_free(pool);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device)
{
    TRY(device_ok(device));
    CHECK(pool != NULL, CUDA_ERROR_INVALID_VALUE);
    *pool = pool_default(device);
    return *pool != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device)
{
    TRY(cuDeviceGetDefaultMemPool(pool, device));
    *pool = cuda.device[device].pool;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
    CUmemoryPool first;
    TRY(cuDeviceGetDefaultMemPool(&first, device));
    CHECK(pool_ok(pool) && pool->device == device, CUDA_ERROR_INVALID_VALUE);
    cuda.device[device].pool = pool;
    return CUDA_SUCCESS;
}

/* As driver 580 does, but for managed memory of the host. */
static CUresult pool_at(CUmemoryPool *pool, const CUmemLocation *at, CUmemAllocationType kind, bool current)
{
    TRY(ready());
    CHECK(pool != NULL && at != NULL, CUDA_ERROR_INVALID_VALUE);
    const bool managed = kind == CU_MEM_ALLOCATION_TYPE_MANAGED;
    CHECK(managed || kind == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
    switch ((int)at->type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        TRY(device_ok(at->id));
        if (!managed)
            return current ? cuDeviceGetMemPool(pool, at->id) : cuDeviceGetDefaultMemPool(pool, at->id);
        *pool = made_once(&cuda.device[at->id].managed_pool, at->id, false);
        break;
    case CU_MEM_LOCATION_TYPE_NONE:
        CHECK(managed, CUDA_ERROR_INVALID_VALUE);
        *pool = made_once(&cuda.device[0].nowhere_pool, 0, false);
        break;
    case CU_MEM_LOCATION_TYPE_HOST:
        CHECK(!managed, CUDA_ERROR_NOT_SUPPORTED);
        *pool = made_once(&cuda.device[0].host_pool, 0, true);
        break;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA: return CUDA_ERROR_INVALID_VALUE; /* the host has no such nodes */
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return *pool != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *at, CUmemAllocationType kind)
{
    return pool_at(pool, at, kind, false);
}

EXPORT CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *at, CUmemAllocationType kind)
{
    return pool_at(pool, at, kind, true);
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    TRY(ready());
    CHECK(pool_ok(pool), CUDA_ERROR_INVALID_VALUE);
    lock();
    pool_shrink(pool, keep);
    unlock();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    TRY(ready());
    CHECK(pool_ok(pool) && value != NULL, CUDA_ERROR_INVALID_VALUE);
    switch ((int)attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: pool->threshold = *(cuuint64_t *)value; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: pool->used_high = pool->used; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: pool->reserved_high = pool->reserved; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        pool->attribute[attribute] = (cuuint64_t) * (int *)value;
        return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    TRY(ready());
    CHECK(pool_ok(pool) && value != NULL, CUDA_ERROR_INVALID_VALUE);
    cuuint64_t *number = value;
    switch ((int)attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: *number = pool->threshold; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: *number = pool->reserved; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: *number = pool->reserved_high; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: *number = pool->used; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: *number = pool->used_high; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: *(int *)value = (int)pool->attribute[attribute]; return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
    (void)count;
    TRY(ready());
    return pool_ok(pool) && access != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *where)
{
    TRY(ready());
    CHECK(pool_ok(pool) && flags != NULL && where != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = where->id == pool->device ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}
