/* defaults.c - which memory a pool has that was not made by a hooked cuMemPoolCreate.
 *
 * Such a pool is a default one of the driver, or another process's. CUDA 13 has a default pool for each place and kind of
 * memory, and driver 580 does not report a pool's place and kind: so each default one is looked up and compared, once a pool. From
 * another process's pool nothing can be allocated; a pool that is none of those that can be looked up is refused, for its
 * memory could not be charged to any process.
 */
#include "memory/memory.h"
#include "memory/pool.h"

enum { /* values of CUmemLocationType that older headers lack */
    NOWHERE = 0,
    HOST = 2,
    HOST_NODE = 3,
    PART_OF_DEVICE = 6
};
enum {
    HOST_NODES = 256,    /* guessed: nodes of a host's memory, whose numbers may have gaps */
    PARTS_OF_DEVICE = 16 /* guessed: localities of one device */
};

static bool is_default(CUmemoryPool handle, int type, int id, CUmemAllocationType kind)
{
    CUmemLocation at = {.type = (CUmemLocationType)type, .id = id};
    CUmemoryPool its;
    return tangram.driver.cuMemGetDefaultMemPool(&its, &at, kind) == CUDA_SUCCESS && its == handle;
}

static bool is_of_device(CUmemoryPool handle, CUdevice device, bool *managed)
{
    CUmemoryPool its;
    *managed = false;
    if (tangram.driver.cuDeviceGetDefaultMemPool(&its, device) == CUDA_SUCCESS && its == handle)
        return true;
    if (!HAS(cuMemGetDefaultMemPool))
        return false;
    bool its_own = *managed = is_default(handle, CU_MEM_LOCATION_TYPE_DEVICE, device, CU_MEM_ALLOCATION_TYPE_MANAGED);
    for (int part = 0; part < PARTS_OF_DEVICE && !its_own; part++)
        its_own = is_default(handle, PART_OF_DEVICE, device | part << 8, CU_MEM_ALLOCATION_TYPE_PINNED);
    return its_own;
}

static bool is_of_host(CUmemoryPool handle, CUmemAllocationType kind)
{
    bool its = is_default(handle, HOST, 0, kind);
    for (int node = 0; node < HOST_NODES && !its; node++)
        its = is_default(handle, HOST_NODE, node, kind);
    return its;
}

struct gpu *gpu_of_managed(const CUmemLocation *location)
{
    struct gpu *gpu = gpu_of_location(location);
    if (gpu == NULL)
        gpu = current_gpu();
    return gpu != NULL ? gpu : gpu_of_device(0);
}

bool pool_of_handle(CUmemoryPool handle, struct pool **pool)
{
    const CUmemLocation nowhere = {.type = (CUmemLocationType)NOWHERE};
    int devices = 0;
    bool managed;
    *pool = pool_known(handle);
    if (*pool != NULL || handle == NULL)
        return true;
    if (tangram.driver.cuDeviceGetCount(&devices) != CUDA_SUCCESS)
        devices = 0;
    for (CUdevice device = 0; device < devices; device++)
        if (is_of_device(handle, device, &managed)) {
            if ((*pool = pool_record(handle, device, gpu_of_device(device), managed)) != NULL)
                pooled_note_default(*pool);
            return *pool != NULL;
        }
    if (!HAS(cuMemGetDefaultMemPool)) /* before CUDA 13 what is left is another process's */
        return true;
    if (is_default(handle, NOWHERE, 0, CU_MEM_ALLOCATION_TYPE_MANAGED) || is_of_host(handle, CU_MEM_ALLOCATION_TYPE_MANAGED))
        return (*pool = pool_record(handle, NO_DEVICE, gpu_of_managed(&nowhere), true)) != NULL;
    return is_of_host(handle, CU_MEM_ALLOCATION_TYPE_PINNED) && (*pool = pool_record(handle, NO_DEVICE, NULL, false)) != NULL;
}
