/* anchor.c - waiting as cuMemFree does.
 *
 * The driver's cuMemFree waits for all work of the context, also in a relaxed capture. In any other capture it answers
 * CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and ends the capture, frees nothing, and so do cuMemAlloc and, in a relaxed one, too,
 * cuCtxSynchronize (measured: H200, driver 580). A program may rely on each of these. So the driver itself answers: a small plain allocation
 * is made and freed. That takes 2 us where the page that it is in has another request, else 60 (H200): the anchor, 512 bytes that are
 * allocated once, keeps such a page. It is charged as any plain memory.
 */
#include "memory/memory.h"
#include "memory/pool.h"

static struct elastic *const elastic = &tangram.elastic;

static CUresult wait_here(void)
{
    CUdeviceptr at;
    CUresult rc = tangram.driver.cuMemAlloc_v2(&at, 1);
    if (rc == CUDA_SUCCESS)
        return tangram.driver.cuMemFree_v2(at);
    return rc == CUDA_ERROR_OUT_OF_MEMORY ? tangram.driver.cuCtxSynchronize() : rc; /* a full GPU is no reason not to free */
}

CUresult anchor_wait(CUcontext context)
{
    CUcontext current = NULL;
    if (tangram.driver.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context)
        return wait_here();
    CUresult rc = tangram.driver.cuCtxPushCurrent_v2(context);
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = wait_here();
    tangram.driver.cuCtxPopCurrent_v2(&current);
    return rc;
}

void anchor_drop(struct gpu *gpu, CUcontext context)
{
    CUdeviceptr at = 0;
    struct taking taking;
    lock_acquire(&elastic->lock);
    const bool first = elastic->anchored[gpu->at] == NULL;
    if (first)
        elastic->anchored[gpu->at] = context;
    lock_release(&elastic->lock);
    if (!first || !taking_begin(&taking, gpu, PLAIN, 1))
        return;
    CUstreamCaptureMode mode = relax(); /* the program's own capture goes on */
    CUresult rc = tangram.driver.cuMemAlloc_v2(&at, 1);
    relax_end(mode);
    taking_end(&taking, rc, rc == CUDA_SUCCESS ? at : 0);
}

void anchor_forget(CUcontext context)
{
    for (unsigned i = 0; i < CONTEXT_GPUS; i++)
        if (elastic->anchored[i] == context)
            elastic->anchored[i] = NULL;
}
