/* clear.c - zeroing memory before the program gets it, where the grant contains `clear yes`.
 *
 * Memory in a stream's order is zeroed in that order. Plain memory may be used from any stream as soon as the call returns, so
 * it is zeroed on a stream of its own and waited for: a cuMemAlloc then takes as long as the GPU needs to write so much.
 */
#include "hooks/hook.h"
#include "memory/memory.h"
#include "memory/pool.h"

CUresult clear_now(CUdeviceptr at, uint64_t bytes)
{
    CUstream stream;
    activity_await_memory(); /* elastic memory beside live requests may be away */
    CUstreamCaptureMode mode = relax();
    CUresult rc = tangram.driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    if (rc == CUDA_SUCCESS) {
        rc = tangram.driver.cuMemsetD8Async(at, 0, bytes, stream);
        CUresult done = tangram.driver.cuStreamSynchronize(stream);
        rc = rc != CUDA_SUCCESS ? rc : done;
        tangram.driver.cuStreamDestroy_v2(stream);
    }
    relax_end(mode);
    return rc;
}

/* The same for memory of a device that need not be the current one, nor have a context yet: one is made by our own hook then, which counts it. */
CUresult clear_on(CUdevice device, CUdeviceptr at, uint64_t bytes)
{
    CUdevice current;
    CUcontext context;
    if (tangram.driver.cuCtxGetDevice(&current) == CUDA_SUCCESS && current == device)
        return clear_now(at, bytes);
    CUresult rc = cuDevicePrimaryCtxRetain(&context, device);
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = tangram.driver.cuCtxPushCurrent_v2(context);
    if (rc == CUDA_SUCCESS) {
        rc = clear_now(at, bytes);
        tangram.driver.cuCtxPopCurrent_v2(&context);
    }
    cuDevicePrimaryCtxRelease_v2(device);
    return rc;
}

/* The driver refuses a fill only when the context is already broken: then every later call of the program fails as well. */
void clear_in_order(CUdeviceptr at, uint64_t bytes, CUstream stream, bool per_thread)
{
    if (per_thread && HAS(cuMemsetD8Async_ptsz))
        tangram.driver.cuMemsetD8Async_ptsz(at, 0, bytes, stream);
    else
        tangram.driver.cuMemsetD8Async(at, 0, bytes, stream);
}

/* In a capture the fill becomes a node behind the allocation's. */
CUresult clear_captured(CUresult rc, CUdeviceptr *at, uint64_t bytes, CUstream stream, bool per_thread)
{
    if (rc == CUDA_SUCCESS && UNLIKELY(tangram.grant.clear) && bytes > 0)
        clear_in_order(*at, bytes, stream, per_thread);
    return rc;
}
