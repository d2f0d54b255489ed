/* copy.c - copies and fills: what they mean, as jobs (jobs.h). They take no GPU time.
 *
 * Which functions there are, and which of them wait for the context's work, is in copy.def. Both ends are memory of this process: device
 * memory is mapped here. Arrays have no content.
 */
#include "internal.h"
#include "calls.h"

static bool is_known(uint64_t at)
{
    return span_find((uintptr_t)at) != NULL || span_in(&cuda.reservations, (uintptr_t)at) != NULL;
}

/* ends: which of them must be device memory that CUDA knows. */
enum { ANYWHERE, TO_DEVICE = AT_DEVICE };

static void copy_of(struct job *job, const struct area *area, unsigned ends)
{
    *job = (struct job){.kind = JOB_COPY, .area = *area, .ends = ends};
    job->ends |= (ends & AT_DEVICE) == 0 && is_known(area->at) ? AT_DEVICE : 0;
    job->ends |= (ends & FROM_DEVICE) == 0 && is_known(area->from) ? FROM_DEVICE : 0;
}

static CUresult copy(struct job *job, CUdeviceptr to, CUdeviceptr from, size_t bytes, unsigned ends)
{
    CHECK(bytes == 0 || (to != 0 && from != 0), CUDA_ERROR_INVALID_VALUE);
    copy_of(job, &(struct area){.at = to, .from = from, .width = bytes, .rows = 1}, ends);
    return CUDA_SUCCESS;
}

/* Each end is used by its context. */
static CUresult copy_peer(struct job *job, CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t bytes)
{
    TRY(copy(job, to, from, bytes, TO_DEVICE | FROM_DEVICE));
    job->at_ctx = to_ctx;
    job->from_ctx = from_ctx;
    return CUDA_SUCCESS;
}

/* One end of a 2D copy as an address, 0 for an array: arrays are not looked into. */
static uint64_t end_of(CUmemorytype type, const void *host, CUdeviceptr device, size_t pitch, size_t x, size_t y)
{
    const uint64_t base = type == CU_MEMORYTYPE_HOST ? (uintptr_t)host : device;
    return type == CU_MEMORYTYPE_ARRAY || base == 0 ? 0 : base + y * pitch + x;
}

static CUresult copy_2d(struct job *job, const CUDA_MEMCPY2D *how)
{
    CHECK(how != NULL, CUDA_ERROR_INVALID_VALUE);
    const uint64_t from = end_of(how->srcMemoryType, how->srcHost, how->srcDevice, how->srcPitch, how->srcXInBytes, how->srcY);
    const uint64_t to = end_of(how->dstMemoryType, how->dstHost, how->dstDevice, how->dstPitch, how->dstXInBytes, how->dstY);
    const struct area area = {.at = to, .from = from, .at_pitch = how->dstPitch, .from_pitch = how->srcPitch, .width = how->WidthInBytes, .rows = how->Height};
    *job = (struct job){.kind = JOB_COPY};
    if (from != 0 && to != 0)
        copy_of(job, &area, ANYWHERE);
    return CUDA_SUCCESS;
}

/* Planes that follow each other are copied; of others the values are not kept. */
static CUresult copy_3d(struct job *job, const CUDA_MEMCPY3D *how)
{
    CHECK(how != NULL, CUDA_ERROR_INVALID_VALUE);
    if (how->Depth != 1 && (how->srcHeight != how->Height || how->dstHeight != how->Height)) {
        *job = (struct job){.kind = JOB_COPY};
        return CUDA_SUCCESS;
    }
    return copy_2d(job, &(CUDA_MEMCPY2D){
        how->srcXInBytes, how->srcZ * how->srcHeight + how->srcY, how->srcMemoryType, how->srcHost, how->srcDevice, how->srcArray, how->srcPitch,
        how->dstXInBytes, how->dstZ * how->dstHeight + how->dstY, how->dstMemoryType, how->dstHost, how->dstDevice, how->dstArray, how->dstPitch,
        how->WidthInBytes, how->Height * how->Depth});
}

static CUresult copy_3d_peer(struct job *job, const CUDA_MEMCPY3D_PEER *how)
{
    TRY(copy_3d(job, (const CUDA_MEMCPY3D *)how)); /* cuda.h: the same members, the contexts are reserved there */
    CHECK((how->srcMemoryType == CU_MEMORYTYPE_ARRAY || context_ok(how->srcContext)) && (how->dstMemoryType == CU_MEMORYTYPE_ARRAY || context_ok(how->dstContext)),
          CUDA_ERROR_INVALID_CONTEXT);
    job->at_ctx = how->dstContext;
    job->from_ctx = how->srcContext;
    return CUDA_SUCCESS;
}

/* Rows of count elements of width bytes. */
static CUresult fill(struct job *job, CUdeviceptr at, size_t pitch, uint32_t value, uint32_t width, size_t count, size_t rows)
{
    CHECK(count <= SIZE_MAX / width && at % width == 0, CUDA_ERROR_INVALID_VALUE);
    *job = (struct job){.kind = JOB_FILL, .value = value, .element = width, .ends = AT_DEVICE,
                        .area = {.at = at, .at_pitch = pitch, .width = count * width, .rows = rows}};
    return CUDA_SUCCESS;
}

#include "copy.def"
