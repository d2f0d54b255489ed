/* vmm.c - physical memory made apart from addresses (cuMemCreate, cuMemMap), as expandable segments use it, and what another
 * process made and this one imports.
 *
 * A block is charged to the GPU it lies on, `prop->location`, when it is made, and stays charged until its last handle is released
 * and its last mapping is gone: the driver keeps the memory that long. The driver may reuse a handle's number while
 * a mapping of the old block exists, so the library identifies blocks by its own record and not by their handles. The size of an imported block is
 * not known before it is mapped: it is charged then, to this process as well as to the one that made it. A block that was exported
 * and is released here may persist in a process that imported it and maps nothing: all is measured before its memory counts as free, and
 * once more when that process releases it, for what is measured is charged until the next measure.
 * vmm_create.c makes blocks.
 */
#include "hooks/hook.h"
#include "memory/memory.h"
#include "memory/pool.h"
#include "memory/vmm.h"

#include <stdlib.h>
#include <string.h>

static struct vmm *const vmm = &tangram.vmm;

static bool grow_for_one(void **items, size_t count, size_t *capacity, size_t item_bytes)
{
    if (count < *capacity)
        return true;
    size_t more = *capacity ? *capacity * 2 : 64;
    void *moved = realloc(*items, more * item_bytes);
    if (moved == NULL)
        return false;
    *items = moved;
    *capacity = more;
    return true;
}

/* Locked. NULL when the handle is none of ours. */
static struct handle *find(uint64_t number)
{
    for (size_t i = vmm->handles; i-- > 0;) /* newest first: programs map what they just made */
        if (vmm->handle[i].handle == number)
            return &vmm->handle[i];
    return NULL;
}

/* Locked. The first mapping at or after this address. */
static size_t first_mapping(uint64_t at)
{
    size_t low = 0, high = vmm->mappings;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (vmm->mapping[middle].at < at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void let_go(struct block *block, uint64_t holders, bool at_once)
{
    if (block == NULL || holders == 0)
        return;
    pthread_mutex_lock(&vmm->lock);
    bool last = (block->holders -= holders) == 0;
    pthread_mutex_unlock(&vmm->lock);
    if (last) {
        if (block->exported || block->imported) /* a process that still has it is charged before it is free here; or it is free now */
            contexts_measure(block->gpu);
        if (at_once)
            link_return_used(block->gpu, block->kind, block->bytes);
        else
            lease_give_back_as(block->gpu, block->kind, block->bytes);
        free(block);
    }
}

struct block *vmm_retain(CUmemGenericAllocationHandle handle)
{
    pthread_mutex_lock(&vmm->lock);
    struct handle *known = find(handle);
    struct block *block = known != NULL ? known->block : NULL;
    if (block != NULL)
        block->holders++;
    pthread_mutex_unlock(&vmm->lock);
    return block;
}

void vmm_let_go(struct block *block)
{
    let_go(block, 1, false);
}

void vmm_let_go_at_once(struct block *block)
{
    let_go(block, 1, true);
}

void vmm_hold(struct block *block)
{
    pthread_mutex_lock(&vmm->lock);
    block->holders++;
    pthread_mutex_unlock(&vmm->lock);
}

void vmm_converted(struct block *block)
{
    pthread_mutex_lock(&vmm->lock);
    block->kind = WIRE_RESIDENT;
    pthread_mutex_unlock(&vmm->lock);
}

void vmm_exported(struct block *block)
{
    pthread_mutex_lock(&vmm->lock);
    block->exported = true;
    pthread_mutex_unlock(&vmm->lock);
}

/* Locked. False when it cannot be remembered. */
static bool add_handle(uint64_t number, struct block *block)
{
    if (!grow_for_one((void **)&vmm->handle, vmm->handles, &vmm->handles_capacity, sizeof *vmm->handle))
        return false;
    vmm->handle[vmm->handles++] = (struct handle){number, 1, block};
    return true;
}

bool vmm_own_handle(uint64_t number, struct block *block)
{
    pthread_mutex_lock(&vmm->lock);
    bool added = add_handle(number, block);
    pthread_mutex_unlock(&vmm->lock);
    return added;
}

/* Locked. False when it cannot be remembered. */
static bool own_mapping(uint64_t at, uint64_t bytes, struct block *block)
{
    if (!grow_for_one((void **)&vmm->mapping, vmm->mappings, &vmm->mappings_capacity, sizeof *vmm->mapping))
        return false;
    size_t i = first_mapping(at);
    memmove(&vmm->mapping[i + 1], &vmm->mapping[i], (vmm->mappings - i) * sizeof *vmm->mapping);
    vmm->mapping[i] = (struct mapping){at, bytes, block};
    vmm->mappings++;
    return true;
}

void vmm_keep_mapping(uint64_t at, uint64_t bytes, struct block *block)
{
    pthread_mutex_lock(&vmm->lock);
    block->holders++;
    own_mapping(at, bytes, block);
    pthread_mutex_unlock(&vmm->lock);
}

EXPORT CUresult cuMemExportToShareableHandle(void *os_handle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                             unsigned long long flags)
{
    NEEDS(cuMemExportToShareableHandle);
    if (created_is(handle))
        return created_export(os_handle, handle, type, flags);
    pthread_mutex_lock(&vmm->lock);
    struct handle *known = find(handle);
    if (known != NULL)
        known->block->exported = true; /* before: it may be imported as soon as the driver has named it */
    pthread_mutex_unlock(&vmm->lock);
    return tangram.driver.cuMemExportToShareableHandle(os_handle, handle, type, flags);
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, CUmemAllocationHandleType type)
{
    NEEDS(cuMemImportFromShareableHandle);
    CUmemAllocationProp prop;
    CUresult rc = tangram.driver.cuMemImportFromShareableHandle(handle, os_handle, type);
    if (rc != CUDA_SUCCESS || grant_ready() == GRANT_NONE || !HAS(cuMemGetAllocationPropertiesFromHandle))
        return rc;
    if (tangram.driver.cuMemGetAllocationPropertiesFromHandle(&prop, *handle) != CUDA_SUCCESS)
        return rc; /* a multicast object has no memory of its own */
    struct gpu *gpu = gpu_of_location(&prop.location);
    if (gpu == NULL)
        return rc;
    struct block *block = malloc(sizeof *block);
    if (block != NULL)
        *block = (struct block){.holders = 1, .gpu = gpu, .kind = WIRE_RESIDENT, .imported = true};
    if (block != NULL && vmm_own_handle(*handle, block))
        return rc;
    free(block);
    tangram.driver.cuMemRelease(*handle);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* The number may be given out again as soon as the driver has it back, so our entry goes first and returns if it fails. */
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    NEEDS(cuMemRelease);
    if (created_is(handle))
        return created_release(handle);
    struct block *block = NULL;
    pthread_mutex_lock(&vmm->lock);
    struct handle *known = find(handle);
    if (known != NULL) {
        block = known->block;
        if (--known->count == 0)
            *known = vmm->handle[--vmm->handles];
    }
    pthread_mutex_unlock(&vmm->lock);

    CUresult rc = tangram.driver.cuMemRelease(handle);
    if (block == NULL)
        return rc;
    pthread_mutex_lock(&vmm->lock);
    if (rc != CUDA_SUCCESS && (known = find(handle)) != NULL && known->block == block)
        known->count++;
    else if (rc != CUDA_SUCCESS)
        add_handle(handle, block); /* without memory for that it is charged until the process ends */
    pthread_mutex_unlock(&vmm->lock);
    if (rc == CUDA_SUCCESS)
        let_go(block, 1, false);
    return rc;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *at)
{
    NEEDS(cuMemRetainAllocationHandle);
    struct elastic_found elastic;
    if (elastic_find((uintptr_t)at, &elastic))
        return CUDA_ERROR_INVALID_VALUE; /* as for any memory of cuMemAlloc */
    CUresult rc;
    if (created_retain(handle, (uintptr_t)at, &rc))
        return rc;
    rc = tangram.driver.cuMemRetainAllocationHandle(handle, at);
    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&vmm->lock);
    struct handle *known = find(*handle);
    size_t i = first_mapping((uintptr_t)at + 1);
    struct mapping *mapping = i > 0 ? &vmm->mapping[i - 1] : NULL;
    if (known != NULL) {
        known->count++;
        known->block->holders++;
    } else if (mapping != NULL && (uintptr_t)at - mapping->at < mapping->bytes && mapping->block != NULL) {
        if (add_handle(*handle, mapping->block))
            mapping->block->holders++;
        else
            rc = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&vmm->lock);
    if (rc != CUDA_SUCCESS) /* memory that cannot be counted is not returned */
        tangram.driver.cuMemRelease(*handle);
    return rc;
}

static uint64_t charge_of(struct block *block)
{
    pthread_mutex_lock(&vmm->lock);
    uint64_t bytes = block->bytes;
    pthread_mutex_unlock(&vmm->lock);
    return bytes;
}

/* An imported block is charged as far as it is mapped. Each mapping reserves by itself what goes beyond the charge, and no failure of one
 * takes anything from another. False: refuse. */
static bool pay_begin(struct block *block, uint64_t upto, uint64_t *reserved)
{
    *reserved = 0;
    if (!block->imported)
        return true;
    uint64_t charged = charge_of(block), before;
    do {
        *reserved = upto > charged ? upto - charged : 0;
        if (*reserved == 0 || reserve(block->gpu, *reserved))
            return true;
        before = charged;
        charged = charge_of(block);
    } while (charged > before); /* another mapping was charged meanwhile: less is needed now */
    return false;
}

/* The charge only grows, so what was reserved is enough. */
static void pay_end(struct block *block, uint64_t upto, uint64_t reserved, bool mapped)
{
    pthread_mutex_lock(&vmm->lock);
    if (mapped && reserved > 0 && upto > block->bytes) {
        reserved -= upto - block->bytes;
        block->bytes = upto;
    }
    pthread_mutex_unlock(&vmm->lock);
    if (reserved > 0)
        lease_give_back(block->gpu, reserved);
}

EXPORT CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags)
{
    NEEDS(cuMemMap);
    if (UNLIKELY(elastic_in(at, bytes)))
        return CUDA_ERROR_INVALID_VALUE; /* the program has reserved no addresses there */
    if (created_is(handle) || created_in(at, bytes)) /* no handle is mapped where another one is, also if that is away */
        return created_is(handle) ? created_map(at, bytes, offset, handle, flags) : CUDA_ERROR_INVALID_VALUE;
    struct block *block = vmm_retain(handle); /* before the call: a concurrent release must not be the last */
    if (block == NULL)
        return tangram.driver.cuMemMap(at, bytes, offset, handle, flags);
    uint64_t reserved;
    if (!pay_begin(block, offset + bytes, &reserved)) {
        let_go(block, 1, false);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult rc = tangram.driver.cuMemMap(at, bytes, offset, handle, flags);
    if (rc == CUDA_SUCCESS) {
        pthread_mutex_lock(&vmm->lock);
        bool owned = own_mapping(at, bytes, block);
        pthread_mutex_unlock(&vmm->lock);
        if (!owned) {
            tangram.driver.cuMemUnmap(at, bytes);
            rc = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    pay_end(block, offset + bytes, reserved, rc == CUDA_SUCCESS);
    if (rc != CUDA_SUCCESS)
        let_go(block, 1, false);
    return rc;
}

/* One call may unmap many mappings. They are removed one by one after the driver succeeded; a thread that maps there before this
 * call returns races against the program's own unmap. */
EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t bytes)
{
    NEEDS(cuMemUnmap);
    if (UNLIKELY(elastic_in(at, bytes)))
        return CUDA_ERROR_INVALID_VALUE; /* as for any memory of cuMemAlloc */
    CUresult rc = created_in(at, bytes) ? created_unmap(at, bytes) : tangram.driver.cuMemUnmap(at, bytes);
    while (rc == CUDA_SUCCESS) {
        struct block *block = NULL;
        pthread_mutex_lock(&vmm->lock);
        size_t i = first_mapping(at);
        bool found = i < vmm->mappings && vmm->mapping[i].at - at < bytes;
        if (found) {
            block = vmm->mapping[i].block;
            vmm->mappings--;
            memmove(&vmm->mapping[i], &vmm->mapping[i + 1], (vmm->mappings - i) * sizeof *vmm->mapping);
        }
        pthread_mutex_unlock(&vmm->lock);
        if (!found)
            break;
        let_go(block, 1, false);
    }
    return rc;
}

/* In a forked child: the lists may be half changed by a thread that is not here, so they are left, not freed. */
void vmm_forget_all(void)
{
    vmm->handle = NULL;
    vmm->mapping = NULL;
    vmm->handles = vmm->handles_capacity = vmm->mappings = vmm->mappings_capacity = 0;
}
