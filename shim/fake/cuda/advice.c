/* advice.c - calls that a program may make and that change nothing here. */
#include "internal.h"

EXPORT CUresult cuMemAdvise_v2(CUdeviceptr at, size_t bytes, CUmem_advise advice, CUmemLocation where)
{
    (void)bytes, (void)advice, (void)where;
    TRY(ready());
    return span_covers(at, 1) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemAdvise(CUdeviceptr at, size_t bytes, CUmem_advise advice, CUdevice device)
{
    (void)bytes, (void)advice, (void)device;
    TRY(ready());
    return span_covers(at, 1) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemPrefetchAsync_v2(CUdeviceptr at, size_t bytes, CUmemLocation where, unsigned flags, CUstream handle)
{
    CUstream stream;
    (void)bytes, (void)where, (void)flags;
    TRY(stream_get(handle, &stream));
    return span_covers(at, 1) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemPrefetchAsync(CUdeviceptr at, size_t bytes, CUdevice device, CUstream handle)
{
    CUstream stream;
    (void)bytes, (void)device;
    TRY(stream_get(handle, &stream));
    return span_covers(at, 1) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(flags == 0, CUDA_ERROR_INVALID_VALUE);
    return context_ok(peer) && peer != ctx ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
    CUcontext ctx;
    TRY(current(&ctx));
    return context_ok(peer) && peer != ctx ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuCtxGetCacheConfig(CUfunc_cache *config)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(config != NULL, CUDA_ERROR_INVALID_VALUE);
    *config = CU_FUNC_CACHE_PREFER_NONE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCacheConfig(CUfunc_cache config)
{
    CUcontext ctx;
    (void)config;
    return current(&ctx);
}

/* The driver's private tables, by which the CUDA runtime (libcudart) and PyTorch work, are not public: there are none here. */
EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
    CHECK(table != NULL && id != NULL, CUDA_ERROR_INVALID_VALUE);
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}
