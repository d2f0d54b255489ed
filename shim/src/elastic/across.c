/* across.c - copies that involve another GPU's memory, without access to it.
 *
 * The driver copies plain memory of any GPU in any context. Of mapped memory it copies what the copying device has access to; without that only cuMemcpyPeer
 * does, which names a context for each end (so PyTorch's allocator copies what it mapped itself; not measured here). So where one end is memory that
 * can be swapped, and the copying device has no access to it, a copy within the GPUs is made by cuMemcpyPeer, and one from or to the host with the
 * memory's own context current, if it is in no stream. Not covered: copies in two and three dimensions, fills, nodes of graphs, and copies from and to the
 * host in a stream of another GPU. They need access, as for memory of cuMemCreate.
 */
#include "memory/memory.h"

static struct elastic *const elastic = &tangram.elastic;

enum where { ON_HOST, ON_GPU, ON_ITS_GPU };

struct end {
    enum where where; /* ON_ITS_GPU: plain memory, with a context */
    CUcontext context;
    bool lacks; /* it can be swapped, and the copying device has no access to it */
};

static bool has_access(CUdevice device, CUdevice own)
{
    if (device == own)
        return true;
    struct peers_held held = peers_enter();
    const bool has = own < PEER_DEVICES && device < PEER_DEVICES && (elastic->peers.opened[own] >> device & 1) != 0;
    peers_leave(held);
    return has;
}

static struct end end_of(CUdeviceptr at, CUdevice device)
{
    struct elastic_found found;
    if (!elastic_find(at, &found))
        return (struct end){ON_HOST, NULL, false}; /* or any other: `complete` looks */
    if (found.pooled || found.opened)
        return (struct end){ON_GPU, NULL, false};
    return (struct end){ON_ITS_GPU, found.context, !has_access(device, found.device)};
}

/* What the driver knows of memory that is not elastic. */
static void complete(struct end *end, CUdeviceptr at)
{
    unsigned type = 0;
    if (end->where != ON_HOST || tangram.driver.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at) != CUDA_SUCCESS ||
        type != CU_MEMORYTYPE_DEVICE)
        return;
    if (tangram.driver.cuPointerGetAttribute(&end->context, CU_POINTER_ATTRIBUTE_CONTEXT, at) != CUDA_SUCCESS)
        end->context = NULL;
    end->where = end->context != NULL ? ON_ITS_GPU : ON_GPU;
}

struct across across_look(CUdeviceptr to, CUdeviceptr from, CUstream stream)
{
    CUdevice device;
    CUcontext current = NULL;
    struct across across = {.how = ACROSS_NOT};
    if (!atomic_load_explicit(&elastic->any, memory_order_acquire) || device_of_stream(stream, &device) != CUDA_SUCCESS)
        return across;
    struct end at = end_of(to, device), source = end_of(from, device);
    if (!at.lacks && !source.lacks)
        return across;
    complete(&at, to);
    complete(&source, from);
    if (at.where == ON_HOST || source.where == ON_HOST)
        return (struct across){ACROSS_CURRENT, at.lacks ? at.context : source.context, NULL};
    if (tangram.driver.cuCtxGetCurrent(&current) != CUDA_SUCCESS)
        return across;
    return (struct across){ACROSS_PEER, at.context != NULL ? at.context : current, source.context != NULL ? source.context : current};
}

CUresult across_begin(CUcontext context, int per_thread)
{
    const CUresult rc = tangram.driver.cuStreamSynchronize((CUstream)(uintptr_t)(per_thread ? 2 : 1));
    return rc == CUDA_SUCCESS ? tangram.driver.cuCtxPushCurrent_v2(context) : rc;
}

void across_end(void)
{
    CUcontext popped;
    tangram.driver.cuCtxPopCurrent_v2(&popped);
}
