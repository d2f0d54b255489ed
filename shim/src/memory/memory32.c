/* memory32.c - the forms of CUDA 2, with 32-bit sizes and pointers, which libcuda still exports.
 *
 * They repeat the steps of memory.c on purpose. A pointer to a result is 32 bits wide here and 64 there, so one function for both would have to
 * go through a pointer to the driver's function and copy each result; a macro would hide those steps from the reader. memory.c's calls are
 * on every program's path and these on almost none, and what is more than a call (reserve, settle, own) is shared.
 */
#include "hooks/hook.h"
#include "memory/memory.h"

/* Memory that cannot be zeroed is not returned. */
static CUresult cleared(CUresult rc, const CUdeviceptr_v1 *at, uint64_t bytes)
{
    if (!UNLIKELY(tangram.grant.clear) || rc != CUDA_SUCCESS)
        return rc;
    rc = clear_now(*at, bytes);
    if (rc != CUDA_SUCCESS)
        cuMemFree(*at);
    return rc;
}

EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *at, unsigned int bytes)
{
    NEEDS(cuMemAlloc);
    struct gpu *gpu = current_gpu();
    if (gpu == NULL)
        return tangram.driver.cuMemAlloc(at, bytes);
    struct taking taking;
    if (!taking_begin(&taking, gpu, PLAIN, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuMemAlloc(at, bytes);
    return cleared(taking_end(&taking, rc, rc == CUDA_SUCCESS ? *at : 0), at, bytes);
}

EXPORT CUresult cuMemAllocPitch(CUdeviceptr_v1 *at, unsigned int *pitch, unsigned int width, unsigned int height,
                                unsigned int element)
{
    NEEDS(cuMemAllocPitch);
    struct gpu *gpu = current_gpu();
    if (gpu == NULL)
        return tangram.driver.cuMemAllocPitch(at, pitch, width, height, element);
    struct taking taking;
    uint64_t planned = pitch_planned(width);
    if (!taking_begin(&taking, gpu, PLAIN, planned * height))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuMemAllocPitch(at, pitch, width, height, element);
    bool taken = rc == CUDA_SUCCESS;
    rc = taking_end_pitch(&taking, rc, taken ? *at : 0, taken ? *pitch : 0, planned, height);
    return cleared(rc, at, taken ? (uint64_t)*pitch * height : 0);
}

EXPORT CUresult cuMemFree(CUdeviceptr_v1 at)
{
    NEEDS(cuMemFree);
    struct owned was;
    if (!table_disown(at, &was))
        return tangram.driver.cuMemFree(at);
    CUresult rc = tangram.driver.cuMemFree(at);
    settle_free(rc, &was);
    return rc;
}

static unsigned int clamp(size_t bytes)
{
    return bytes > UINT32_MAX ? UINT32_MAX : (unsigned int)bytes;
}

EXPORT CUresult cuMemGetInfo(unsigned int *free_bytes, unsigned int *total_bytes)
{
    NEEDS(cuMemGetInfo);
    CUresult rc = tangram.driver.cuMemGetInfo(free_bytes, total_bytes);
    size_t free_now, total_now;
    if (rc == CUDA_SUCCESS && current_gpu() != NULL && cuMemGetInfo_v2(&free_now, &total_now) == CUDA_SUCCESS) {
        *free_bytes = clamp(free_now);
        *total_bytes = clamp(total_now);
    }
    return rc;
}

EXPORT CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device)
{
    NEEDS(cuDeviceTotalMem);
    CUresult rc = tangram.driver.cuDeviceTotalMem(bytes, device);
    struct gpu *gpu = rc == CUDA_SUCCESS ? gpu_of_device(device) : NULL;
    if (gpu != NULL)
        *bytes = clamp(atomic_load(&gpu->limit_bytes));
    return rc;
}
