/* pool.c - stream-ordered memory: pools that keep what is freed until the next synchronisation, as the real ones do.
 *
 * A pool's reserved bytes are counted on the GPU, its used bytes are what the program requested (H200: to the byte). A pool grows by what is
 * missing, in steps of 2 MiB; synchronising lets it shrink to its release threshold.
 */
#include "internal.h"
#include "calls.h"

#define POOL_MAGIC 0x4c4f4f5046414b45u

CUresult pool_get(int device, enum pool_kind kind, CUmemoryPool *pool)
{
    TRY(device_ok(device));
    SCOPED tables = locked(&cuda.lock);
    CUmemoryPool *kept = &cuda.device[device].pools[kind];
    if (*kept == NULL)
        TRY(kind == POOL_CURRENT ? pool_get(device, POOL_DEFAULT, kept) :
            MAKE(kept, HANDLE_POOL, CUmemPoolHandle_st, .device = device, .host = kind == POOL_HOST, .managed = kind == POOL_MANAGED || kind == POOL_NOWHERE, POOL_REUSES));
    *pool = *kept;
    return CUDA_SUCCESS;
}

static bool pool_take(CUmemoryPool pool, uint64_t bytes)
{
    return pool->host || take(pool->device, bytes, pool->managed);
}

static void pool_give(CUmemoryPool pool, uint64_t bytes)
{
    give(pool->device, pool->host ? 0 : bytes, pool->managed);
}

static CUresult pool_trim(CUmemoryPool pool, uint64_t keep)
{
    SCOPED tables = locked(&cuda.lock);
    const uint64_t least = pool->taken > keep ? pool->taken : keep, floor = rounded(least, BLOCK_BYTES);
    if (least < pool->reserved && pool->reserved > floor) {
        pool_give(pool, pool->reserved - floor);
        pool->reserved = floor;
    }
    return CUDA_SUCCESS;
}

void pools_synchronized(int device)
{
    CUmemoryPool *const pool = cuda.device[device].pools;
    for (enum pool_kind kind = 0; kind < POOL_KINDS; kind++)
        if (kind != POOL_GRAPH && pool[kind] != NULL)
            pool_trim(pool[kind], pool[kind]->threshold);
    SCOPED tables = locked(&cuda.lock);
    for (CUmemoryPool made = cuda.device[device].made; made != NULL; made = made->next)
        pool_trim(made, made->threshold);
}

bool pool_grow(CUmemoryPool pool, uint64_t bytes)
{
    SCOPED tables = locked(&cuda.lock);
    const uint64_t taken = pool->taken + rounded(bytes, GRAIN), reserved = rounded(taken, BLOCK_BYTES);
    CHECK(pool->most == 0 || taken <= pool->most, false);
    if (reserved > pool->reserved) {
        /* Near the limit a whole step may not be left: use the rest. */
        if (pool_take(pool, reserved - pool->reserved))
            pool->reserved = reserved;
        else if (taken > pool->reserved && pool_take(pool, taken - pool->reserved))
            pool->reserved = taken;
        CHECK(taken <= pool->reserved, false);
    }
    pool->taken = taken;
    pool->used += bytes;
    pool->used_high = pool->used > pool->used_high ? pool->used : pool->used_high;
    pool->reserved_high = pool->reserved > pool->reserved_high ? pool->reserved : pool->reserved_high;
    return true;
}

void pool_less(CUmemoryPool pool, uint64_t bytes)
{
    SCOPED tables = locked(&cuda.lock);
    const uint64_t taken = rounded(bytes, GRAIN);
    pool->used -= bytes < pool->used ? bytes : pool->used;
    pool->taken -= taken < pool->taken ? taken : pool->taken;
}

static CUresult pool_alloc(CUdeviceptr *at, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    struct span *span;
    CHECK(at != NULL, CUDA_ERROR_INVALID_VALUE);
    CHECK(bytes <= ARENA_BYTES / 2, CUDA_ERROR_OUT_OF_MEMORY);
    if (bytes == 0) { /* a success without memory: measured, driver 580 */
        *at = 0;
        return CUDA_SUCCESS;
    }
    if (stream->capture != NULL)
        return node_alloc(stream->capture, stream->ctx->device, bytes, at, NULL);
    CHECK(pool_grow(pool, bytes), CUDA_ERROR_OUT_OF_MEMORY);
    const struct span like = {.kind = SPAN_POOL, .ctx = stream->ctx, .device = pool->device, .pool = pool, .pages = PAGES_POOL, .bytes = bytes};
    const CUresult rc = memory_new(&like, &span);
    if (rc == CUDA_SUCCESS)
        *at = (CUdeviceptr)span->base;
    else
        pool_less(pool, bytes);
    return rc;
}

static CUresult pool_import(CUmemoryPool *made, void *shareable, CUmemAllocationHandleType type)
{
    uint64_t device;
    TRY(token_import(shareable, type, POOL_MAGIC, &device));
    TRY(device_ok((int)device));
    return MAKE(made, HANDLE_POOL, CUmemPoolHandle_st, .device = (int)device, POOL_REUSES);
}

/* It is there without being made. */
static bool pool_stays(CUmemoryPool pool)
{
    for (enum pool_kind kind = 0; kind < POOL_KINDS; kind++)
        if (kind != POOL_CURRENT && cuda.device[pool->device].pools[kind] == pool)
            return true;
    return false;
}

static CUresult pool_listed(CUmemoryPool pool)
{
    SCOPED tables = locked(&cuda.lock);
    pool->next = cuda.device[pool->device].made;
    cuda.device[pool->device].made = pool;
    return CUDA_SUCCESS;
}

/* Of what it has and will have. Its own device keeps its access. */
static CUresult pool_open(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
    SCOPED tables = locked(&cuda.lock);
    for (size_t i = 0; i < count; i++)
        CHECK(access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || access_possible(pool->device, &access[i].location), CUDA_ERROR_INVALID_DEVICE); /* guessed */
    for (size_t i = 0; i < count; i++)
        if (access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE)
            pool->access[access[i].location.id] = access[i].flags;
    return CUDA_SUCCESS;
}

static CUresult pool_end(CUmemoryPool pool)
{
    CUmemoryPool *place = &cuda.device[pool->device].made;
    while (*place != NULL && *place != pool)
        place = &(*place)->next;
    if (*place == pool)
        *place = pool->next;
    CUmemoryPool *current = &cuda.device[pool->device].pools[POOL_CURRENT];
    *current = *current == pool ? NULL : *current;
    pool_give(pool, pool->reserved);
    handle_free(pool);
    return CUDA_SUCCESS;
}

/* As driver 580 does, but for managed memory of the host. */
static CUresult pool_at(CUmemoryPool *pool, const CUmemLocation *at, CUmemAllocationType kind, enum pool_kind of_device)
{
    TRY(ready());
    CHECK(pool != NULL && at != NULL, CUDA_ERROR_INVALID_VALUE);
    const bool managed = kind == CU_MEM_ALLOCATION_TYPE_MANAGED;
    CHECK(managed || kind == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
    switch ((int)at->type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: return pool_get(at->id, managed ? POOL_MANAGED : of_device, pool);
    case CU_MEM_LOCATION_TYPE_NONE: return managed ? pool_get(0, POOL_NOWHERE, pool) : CUDA_ERROR_INVALID_VALUE;
    case CU_MEM_LOCATION_TYPE_HOST: return managed ? CUDA_ERROR_NOT_SUPPORTED : pool_get(0, POOL_HOST, pool);
    case CU_MEM_LOCATION_TYPE_HOST_NUMA: return CUDA_ERROR_INVALID_VALUE; /* the host has no such nodes */
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

static CUresult pool_lends(CUdeviceptr at)
{
    SCOPED tables = locked(&cuda.lock);
    struct span *span;
    TRY(span_get(at, SPAN_POOL, CUDA_ERROR_INVALID_VALUE, &span));
    return must(span->pool->handles != 0, CUDA_ERROR_INVALID_VALUE);
}

enum { FIXED, SETTABLE, TO_ZERO }; /* documented: a high is reset by setting it to 0 */

static CUresult pool_attribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value, bool set)
{
    switch ((int)attribute) {
#define ATTRIBUTE(name, type, field, settable, becomes)                                                                        \
    case CU_MEMPOOL_ATTR_##name:                                                                                               \
        CHECK(!set || settable == SETTABLE || (settable == TO_ZERO && *(type *)value == 0), CUDA_ERROR_INVALID_VALUE);                                                                     \
        if (set)                                                                                                               \
            pool->field = becomes;                                                                                             \
        else                                                                                                                   \
            *(type *)value = pool->field;                                                                                      \
        return CUDA_SUCCESS;
#define OF_GRAPHS(name, field)
#include "pool_attributes.def"
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

static CUresult graph_attribute(CUmemoryPool pool, CUgraphMem_attribute attribute, void *value)
{
    switch ((int)attribute) {
#define ATTRIBUTE(name, type, field, settable, becomes)
#define OF_GRAPHS(name, field) case CU_GRAPH_MEM_ATTR_##name: *(cuuint64_t *)value = pool->field; return CUDA_SUCCESS;
#include "pool_attributes.def"
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

#include "pool.def"
