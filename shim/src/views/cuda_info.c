/* cuda_info.c - how much memory there is, as the container may have it.
 *
 * Total is the container's limit. Free is what this process leases and does not use and what no process of the container leases, and
 * never more than the GPU itself has free. What a sibling leases and does not use is left out: it comes when it is requested. Where the container
 * may burst, the GPU's own free memory does not count: other containers make room.
 */
#include "hooks/hook.h"
#include "memory/memory.h"

/* Where the container may burst, its limit comes with the connection for bursts: it is waited for, once. */
static uint64_t total_of(struct gpu *gpu)
{
    if (UNLIKELY(atomic_load_explicit(&gpu->bursts, memory_order_relaxed)) && !atomic_load_explicit(&gpu->limits_came, memory_order_relaxed)) {
        struct quiet quiet = quiet_begin();
        burst_limits_came(gpu);
        quiet_end(quiet);
    }
    return atomic_load_explicit(&gpu->limit_bytes, memory_order_relaxed);
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    NEEDS(cuMemGetInfo_v2);
    CUresult rc = tangram.driver.cuMemGetInfo_v2(free_bytes, total_bytes);
    struct gpu *gpu = rc == CUDA_SUCCESS ? current_gpu() : NULL;
    if (gpu == NULL)
        return rc;
    *total_bytes = total_of(gpu); /* before what is free of it */
    uint64_t ours = lease_free_bytes(gpu);
    *free_bytes += atomic_load_explicit(&gpu->kept_bytes, memory_order_relaxed);
    if (*free_bytes > ours || burst_is_allowed(gpu))
        *free_bytes = ours;
    return rc;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    NEEDS(cuDeviceTotalMem_v2);
    CUresult rc = tangram.driver.cuDeviceTotalMem_v2(bytes, device);
    struct gpu *gpu = rc == CUDA_SUCCESS ? gpu_of_device(device) : NULL;
    if (gpu != NULL)
        *bytes = total_of(gpu);
    return rc;
}
