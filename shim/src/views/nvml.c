/* nvml.c - which GPU of the grant a call of the management library is about, and the memory that it shows.
 *
 * Works in a process that never starts CUDA (nvidia-smi, a metrics agent). The total is the limit that the arbiter's page shows: such a process
 * needs no connection for bursts. Used memory is what the container's processes have leased, also while it is in host memory, and what their contexts take.
 * The GPU's free memory bounds what is shown as free, but where the container may burst.
 */
#include "hooks/hook.h"
#include "process.h"

#include <string.h>

nvmlReturn_t shared_gpu(nvmlDevice_t device, struct gpu **gpu)
{
    char text[NVML_UUID_BYTES];
    uint8_t uuid[16];
    *gpu = NULL;
    if (grant_ready() == GRANT_NONE)
        return NVML_SUCCESS;
    nvmlReturn_t rc = tangram.management.nvmlDeviceGetUUID(device, text, sizeof text);
    if (rc != NVML_SUCCESS)
        return rc;
    if (!uuid_parse(text, strnlen(text, sizeof text), uuid))
        return NVML_ERROR_NOT_SUPPORTED;
    *gpu = gpu_of_uuid(uuid);
    return NVML_SUCCESS;
}

static void view(struct gpu *gpu, unsigned long long *total, unsigned long long *free_now, unsigned long long *used)
{
    uint64_t unleased;
    if (!link_unleased(gpu, &unleased)) /* nvidia-smi: no thread has connected to the arbiter yet */
        link_wait();
    const uint64_t limit = link_limit_bytes(gpu), ours = lease_free_of(gpu, limit);
    const bool bursts = limit > atomic_load_explicit(&gpu->resident_limit_bytes, memory_order_relaxed);
    *free_now += atomic_load_explicit(&gpu->kept_bytes, memory_order_relaxed);
    if (*free_now > ours || bursts)
        *free_now = ours;
    if (*free_now > limit)
        *free_now = limit;
    *total = limit;
    *used = limit - *free_now;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    NEEDS_NVML(nvmlDeviceGetMemoryInfo);
    struct gpu *gpu;
    nvmlReturn_t rc = shared_gpu(device, &gpu);
    if (rc == NVML_SUCCESS)
        rc = tangram.management.nvmlDeviceGetMemoryInfo(device, memory);
    if (rc == NVML_SUCCESS && gpu != NULL)
        view(gpu, &memory->total, &memory->free, &memory->used);
    return rc;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    NEEDS_NVML(nvmlDeviceGetMemoryInfo_v2);
    struct gpu *gpu;
    nvmlReturn_t rc = shared_gpu(device, &gpu);
    if (rc == NVML_SUCCESS)
        rc = tangram.management.nvmlDeviceGetMemoryInfo_v2(device, memory);
    if (rc == NVML_SUCCESS && gpu != NULL) {
        view(gpu, &memory->total, &memory->free, &memory->used);
        memory->reserved = 0; /* the GPU's own reserve is outside the container's limit */
    }
    return rc;
}
