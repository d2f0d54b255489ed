/* vmm_create.c - cuMemCreate: the lease of a block, its content, and whose handle the program has.
 *
 * Whether a block can be swapped is decided first: its lease is elastic then, else resident.
 *
 * Where the grant contains `clear yes`, a block is zeroed before its handle is returned: from then on it may be mapped in parts, with any access,
 * and by another process.
 */
#include "hooks/hook.h"
#include "memory/memory.h"
#include "memory/pool.h"
#include "memory/vmm.h"

#include <stdlib.h>

/* Zeroes a new block at an address of ours. */
static CUresult zero_mapped(struct block *block, CUmemGenericAllocationHandle handle, CUdevice device)
{
    const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr at;
    CUresult rc = tangram.driver.cuMemAddressReserve(&at, block->bytes, 0, 0, 0), unmapped = CUDA_SUCCESS;
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = tangram.driver.cuMemMap(at, block->bytes, 0, handle, 0);
    if (rc == CUDA_SUCCESS) {
        rc = tangram.driver.cuMemSetAccess(at, block->bytes, &access, 1);
        if (rc == CUDA_SUCCESS)
            rc = clear_on(device, at, block->bytes);
        unmapped = tangram.driver.cuMemUnmap(at, block->bytes);
    }
    if (unmapped == CUDA_SUCCESS) {
        tangram.driver.cuMemAddressFree(at, block->bytes);
    } else { /* the memory stays, so its charge does */
        vmm_keep_mapping(at, block->bytes, block);
    }
    return rc != CUDA_SUCCESS ? rc : unmapped;
}

static CUresult zero(struct block *block, CUmemGenericAllocationHandle handle, CUdevice device)
{
    CUstreamCaptureMode mode = relax(); /* the program may capture here: what is ours is no part of that */
    CUresult rc = zero_mapped(block, handle, device);
    relax_end(mode);
    return rc;
}

/* Memory that can be swapped is made so that it can be exported. Where the driver refuses that, the block is plain, and so is its lease. The driver
 * answers first: what it would refuse in any form has its error, and not one of the lease. */
static CUresult create(struct block *block, CUmemGenericAllocationHandle *made, const CUmemAllocationProp *prop, const CUmemAllocationProp *exportable,
                       unsigned long long flags)
{
    if (block->kind == WIRE_RESIDENT)
        return tangram.driver.cuMemCreate(made, block->bytes, prop, flags);
    CUresult rc = tangram.driver.cuMemCreate(made, block->bytes, exportable, flags);
    if (rc == CUDA_SUCCESS || rc == CUDA_ERROR_OUT_OF_MEMORY)
        return rc;
    rc = tangram.driver.cuMemCreate(made, block->bytes, prop, flags);
    if (rc != CUDA_SUCCESS)
        return rc;
    elastic_unable(ELASTIC_DRIVER_REFUSED); /* it is not the request that was wrong */
    if (!lease_convert(block->gpu, block->bytes)) {
        tangram.driver.cuMemRelease(*made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    block->kind = WIRE_RESIDENT;
    return rc;
}

/* What the driver made becomes the program's; `handle` is what the program has of it. */
static CUresult own(struct block *block, CUmemGenericAllocationHandle made, const CUmemAllocationProp *prop, CUmemGenericAllocationHandle *handle)
{
    CUdevice device;
    CUresult rc = CUDA_SUCCESS;
    if (UNLIKELY(tangram.grant.clear) && prop->allocFlags.usage != CU_MEM_CREATE_USAGE_TILE_POOL && device_of_location(&prop->location, &device))
        rc = zero(block, made, device); /* tiles are for arrays: they cannot be mapped, and arrays are not zeroed */
    CUmemGenericAllocationHandle programs = made;
    if (rc == CUDA_SUCCESS && !(block->kind == WIRE_ELASTIC ? created_own(block->gpu, block->bytes, prop, block, made, &programs) : vmm_own_handle(made, block)))
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    if (rc == CUDA_SUCCESS)
        *handle = programs;
    return rc;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                            unsigned long long flags)
{
    NEEDS(cuMemCreate);
    struct gpu *gpu = NULL;
    if (handle != NULL && prop != NULL)
        gpu = gpu_of_location(&prop->location);
    if (gpu == NULL) /* host memory, or a GPU that is not shared */
        return tangram.driver.cuMemCreate(handle, bytes, prop, flags);
    CUmemAllocationProp exportable;
    const enum wire_lease_kind kind = created_wanted(gpu, bytes, prop, flags, &exportable) ? WIRE_ELASTIC : WIRE_RESIDENT;
    struct block *block = malloc(sizeof *block);
    if (block == NULL || !reserve_as(gpu, kind, bytes)) {
        free(block);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *block = (struct block){.bytes = bytes, .holders = 1, .gpu = gpu, .kind = kind};
    CUmemGenericAllocationHandle made;
    CUresult rc = create(block, &made, prop, &exportable, flags);
    if (rc == CUDA_SUCCESS) {
        rc = own(block, made, prop, handle);
        if (rc != CUDA_SUCCESS)
            tangram.driver.cuMemRelease(made);
    }
    if (rc != CUDA_SUCCESS)
        vmm_let_go(block);
    return rc;
}
