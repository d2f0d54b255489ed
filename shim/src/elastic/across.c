/* across.c - copies that involve another GPU's memory, without access to it.
 *
 * The driver copies plain memory of any GPU in any context. Of mapped memory it copies what the copying device has access to; without that only
 * cuMemcpyPeer and cuMemcpy3DPeer do, which name a context for each end (so PyTorch's allocator copies what it mapped itself; cuMemcpyPeer measured, H200,
 * tests/gpu/results/peers.csv). So where one end is memory that can be swapped, and the copying device has no access to it, a copy within the GPUs is made
 * by these, and one from or to the host with the memory's own context current, if it is in no stream. Not covered: fills, nodes of graphs, which name one
 * context for both ends, and copies from and to the host in a stream of another GPU. They need access, as for memory of cuMemCreate.
 */
#include <string.h>

#include "memory/memory.h"

_Static_assert(sizeof(CUDA_MEMCPY2D) == 128 && sizeof(CUDA_MEMCPY3D) == 200 && sizeof(CUDA_MEMCPY3D_PEER) == sizeof(CUDA_MEMCPY3D), "cuda.h");
_Static_assert(offsetof(CUDA_MEMCPY3D, reserved0) == offsetof(CUDA_MEMCPY3D_PEER, srcContext) &&
                   offsetof(CUDA_MEMCPY3D, reserved1) == offsetof(CUDA_MEMCPY3D_PEER, dstContext) &&
                   offsetof(CUDA_MEMCPY3D, Depth) == offsetof(CUDA_MEMCPY3D_PEER, Depth),
               "cuda.h: the same but for the contexts");

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

/* The device that copies. False: no end can lack access. */
static bool copying_device(CUstream stream, CUdevice *device)
{
    return atomic_load_explicit(&elastic->any, memory_order_acquire) && device_of_stream(stream, device) == CUDA_SUCCESS;
}

static struct across judge(struct end at, struct end source)
{
    CUcontext current = NULL;
    struct across across = {.how = ACROSS_NOT};
    if (at.where == ON_HOST || source.where == ON_HOST)
        return (struct across){ACROSS_CURRENT, at.lacks ? at.context : source.context, NULL};
    if (tangram.driver.cuCtxGetCurrent(&current) != CUDA_SUCCESS)
        return across;
    return (struct across){ACROSS_PEER, at.context != NULL ? at.context : current, source.context != NULL ? source.context : current};
}

struct across across_look(CUdeviceptr to, CUdeviceptr from, CUstream stream)
{
    CUdevice device;
    const struct across not = {.how = ACROSS_NOT};
    if (!copying_device(stream, &device))
        return not;
    struct end at = end_of(to, device), source = end_of(from, device);
    if (!at.lacks && !source.lacks)
        return not;
    complete(&at, to);
    complete(&source, from);
    return judge(at, source);
}

/* An array is no memory that can be swapped, and the driver knows where it is. */
static struct end end_of_box(CUmemorytype type, CUdeviceptr at, CUdevice device)
{
    if (type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED)
        return end_of(at, device);
    return (struct end){type == CU_MEMORYTYPE_ARRAY ? ON_GPU : ON_HOST, NULL, false};
}

static void complete_box(struct end *end, CUmemorytype *type, CUdeviceptr at)
{
    if (*type != CU_MEMORYTYPE_DEVICE && *type != CU_MEMORYTYPE_UNIFIED)
        return;
    complete(end, at);
    if (end->where != ON_HOST)
        *type = CU_MEMORYTYPE_DEVICE; /* with the context beside it */
}

/* The first byte of each end decides. What is no valid copy is the driver's to refuse. */
static struct across look_box(CUDA_MEMCPY3D_PEER *box, CUstream stream)
{
    CUdevice device;
    const struct across not = {.how = ACROSS_NOT};
    const CUdeviceptr to = box->dstDevice + (box->dstZ * box->dstHeight + box->dstY) * box->dstPitch + box->dstXInBytes;
    const CUdeviceptr from = box->srcDevice + (box->srcZ * box->srcHeight + box->srcY) * box->srcPitch + box->srcXInBytes;
    if (!copying_device(stream, &device))
        return not;
    struct end at = end_of_box(box->dstMemoryType, to, device), source = end_of_box(box->srcMemoryType, from, device);
    if (!at.lacks && !source.lacks)
        return not;
    complete_box(&at, &box->dstMemoryType, to);
    complete_box(&source, &box->srcMemoryType, from);
    const struct across across = judge(at, source);
    if (across.how == ACROSS_PEER) {
        box->dstContext = across.to;
        box->srcContext = across.from;
    }
    return across;
}

struct across across_look_2d(const CUDA_MEMCPY2D *how, CUstream stream, CUDA_MEMCPY3D_PEER *peer)
{
    if (how == NULL)
        return (struct across){.how = ACROSS_NOT};
    *peer = (CUDA_MEMCPY3D_PEER){
        .srcXInBytes = how->srcXInBytes, .srcY = how->srcY, .srcMemoryType = how->srcMemoryType, .srcHost = how->srcHost,
        .srcDevice = how->srcDevice, .srcArray = how->srcArray, .srcPitch = how->srcPitch, .srcHeight = how->srcY + how->Height,
        .dstXInBytes = how->dstXInBytes, .dstY = how->dstY, .dstMemoryType = how->dstMemoryType, .dstHost = how->dstHost,
        .dstDevice = how->dstDevice, .dstArray = how->dstArray, .dstPitch = how->dstPitch, .dstHeight = how->dstY + how->Height,
        .WidthInBytes = how->WidthInBytes, .Height = how->Height, .Depth = 1};
    return look_box(peer, stream);
}

struct across across_look_3d(const CUDA_MEMCPY3D *how, CUstream stream, CUDA_MEMCPY3D_PEER *peer)
{
    if (how == NULL)
        return (struct across){.how = ACROSS_NOT};
    memcpy(peer, how, sizeof *peer); /* but for the contexts, which are its reserved fields */
    peer->srcContext = peer->dstContext = NULL;
    return look_box(peer, stream);
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
