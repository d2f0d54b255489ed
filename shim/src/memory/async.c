/* async.c - memory ordered by a stream, from the device's own pool or one of the program's, in both stream flavours.
 *
 * The memory is charged to the pool (pool.c). Inside a capture nothing is allocated yet: such an allocation becomes a node of a graph, and
 * is counted when the graph is launched (graph.c). Another thread may end a capture, or begin one, between our query and the call: so the
 * returned pointer is queried, and memory is charged whatever the stream was before. Nothing here waits for a stream, except that
 * a pool that grew past what could be charged frees the allocation, and has to wait for it first.
 */
#include "hooks/hook.h"
#include "memory/memory.h"
#include "memory/pool.h"

/* Not in the stream's order: a capture that has begun since would make a node of that. */
static CUresult undo(struct pool *pool, CUdeviceptr at)
{
    CUstreamCaptureMode mode = relax();
    tangram.driver.cuMemFree_v2(at);
    relax_end(mode);
    pool_trim(pool);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult settle_async(CUresult rc, struct growth *growth, CUdeviceptr *at, size_t bytes, CUstream stream, bool per_thread)
{
    struct pool *pool = growth->pool;
    if (rc == CUDA_SUCCESS)
        atomic_fetch_add(&pool->live, 1);
    bool paid = growth_end(growth);
    if (rc != CUDA_SUCCESS && !paid) /* a call that failed, and left the pool larger */
        pool_trim(pool);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (!paid || !table_own((struct owned){*at, bytes, pool->gpu, pool})) {
        pool_freed(pool);
        return undo(pool, *at);
    }
    if (UNLIKELY(tangram.grant.clear))
        clear_in_order(*at, bytes, stream, per_thread);
    return rc;
}

/* A node of a graph is of no pool that a program can name: driver 580 knows no such pointer before the graph is launched, and names no pool
 * then (measured on the H200). A pointer that cannot be queried counts as memory. */
static bool is_memory(const struct pool *pool, CUdeviceptr at)
{
    CUmemoryPool its = NULL;
    CUresult rc = tangram.driver.cuPointerGetAttribute(&its, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, at);
    return rc != CUDA_SUCCESS ? !is_drivers_answer(rc) : its == atomic_load(&pool->handle);
}

/* The stream was capturing, and nothing was taken for the call. */
static CUresult settle_captured(CUresult rc, struct pool *pool, CUdeviceptr *at, size_t bytes, CUstream stream, bool per_thread)
{
    struct growth growth = {.pool = pool};
    if (pool == NULL || pool->gpu == NULL || bytes == 0 || (rc == CUDA_SUCCESS && !is_memory(pool, *at)))
        return clear_captured(rc, at, bytes, stream, per_thread);
    return settle_async(rc, &growth, at, bytes, stream, per_thread);
}

/* find_pool sets `from`; false: it is not known which GPU is charged. */
#define ALLOC_ASYNC(name, params, find_pool, per_thread, ...)                                                                  \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct growth growth;                                                                                                  \
        CUresult rc;                                                                                                           \
        if (grant_ready() == GRANT_NONE)                                                                                       \
            return tangram.driver.name(__VA_ARGS__);                                                                           \
        struct pool *from = NULL;                                                                                              \
        if (!(find_pool))                                                                                                      \
            return CUDA_ERROR_INVALID_VALUE;                                                                                   \
        if (UNLIKELY(capturing(stream, per_thread)))                                                                           \
            return settle_captured(tangram.driver.name(__VA_ARGS__), from, at, bytes, stream, per_thread);                     \
        if (from == NULL || from->gpu == NULL || bytes == 0)                                                                   \
            return tangram.driver.name(__VA_ARGS__);                                                                           \
        if (UNLIKELY(pooled_wanted(from)) && pooled_alloc(from, at, bytes, stream, per_thread, &rc))                           \
            return rc;                                                                                                         \
        if (!growth_begin(&growth, from, bytes))                                                                               \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
        return settle_async(tangram.driver.name(__VA_ARGS__), &growth, at, bytes, stream, per_thread);                         \
    }

#define FREE_ASYNC(name, per_thread)                                                                                           \
    EXPORT CUresult name(CUdeviceptr at, CUstream stream)                                                                      \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct owned was;                                                                                                      \
        CUresult rc;                                                                                                           \
        if (!table_disown(at, &was))                                                                                           \
            return elastic_free_async(at, stream, per_thread, &rc) ? rc : tangram.driver.name(at, stream);                     \
        rc = tangram.driver.name(at, stream);                                                                                  \
        if (rc != CUDA_SUCCESS || was.of != NULL || !late_free(&was, stream, per_thread))                                      \
            settle_free(rc, &was);                                                                                             \
        return rc;                                                                                                             \
    }

ALLOC_ASYNC(cuMemAllocAsync, (CUdeviceptr * at, size_t bytes, CUstream stream), pool_of_stream(stream, &from), false, at, bytes,
            stream)
ALLOC_ASYNC(cuMemAllocAsync_ptsz, (CUdeviceptr * at, size_t bytes, CUstream stream), pool_of_stream(stream, &from), true, at,
            bytes, stream)
ALLOC_ASYNC(cuMemAllocFromPoolAsync, (CUdeviceptr * at, size_t bytes, CUmemoryPool pool, CUstream stream),
            pool_of_handle(pool, &from), false, at, bytes, pool, stream)
ALLOC_ASYNC(cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr * at, size_t bytes, CUmemoryPool pool, CUstream stream),
            pool_of_handle(pool, &from), true, at, bytes, pool, stream)
FREE_ASYNC(cuMemFreeAsync, false)
FREE_ASYNC(cuMemFreeAsync_ptsz, true)
