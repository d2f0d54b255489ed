/* async.c - memory ordered by a stream, from the device's own pool or one of the program's, in both stream flavours.
 *
 * A pointer is counted from the call that hands it out to the call that gives it up, whenever the stream gets there. Nothing
 * here waits for a stream. Memory of a pool on another device than the current one is charged to the current one until pools
 * themselves are followed.
 */
#include "hook.h"
#include "memory.h"

#define ALLOC_ASYNC(name, params, ...)                                                                                         \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct card *card = current_card();                                                                                    \
        if (card == NULL)                                                                                                      \
            return tangram.driver.name(__VA_ARGS__);                                                                           \
        if (!lease_reserve(card, bytes))                                                                                       \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
        CUresult rc = tangram.driver.name(__VA_ARGS__);                                                                        \
        return settle(rc, rc == CUDA_SUCCESS ? *at : 0, bytes, card);                                                          \
    }

#define FREE_ASYNC(name)                                                                                                       \
    EXPORT CUresult name(CUdeviceptr at, CUstream stream)                                                                      \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct owned was;                                                                                                      \
        if (!table_disown(at, &was))                                                                                           \
            return tangram.driver.name(at, stream);                                                                            \
        CUresult rc = tangram.driver.name(at, stream);                                                                         \
        settle_free(rc, &was);                                                                                                 \
        return rc;                                                                                                             \
    }

ALLOC_ASYNC(cuMemAllocAsync, (CUdeviceptr * at, size_t bytes, CUstream stream), at, bytes, stream)
ALLOC_ASYNC(cuMemAllocAsync_ptsz, (CUdeviceptr * at, size_t bytes, CUstream stream), at, bytes, stream)
ALLOC_ASYNC(cuMemAllocFromPoolAsync, (CUdeviceptr * at, size_t bytes, CUmemoryPool pool, CUstream stream), at, bytes,
            pool, stream)
ALLOC_ASYNC(cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr * at, size_t bytes, CUmemoryPool pool, CUstream stream), at,
            bytes, pool, stream)
FREE_ASYNC(cuMemFreeAsync)
FREE_ASYNC(cuMemFreeAsync_ptsz)
