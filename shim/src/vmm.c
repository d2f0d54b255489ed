/* vmm.c - physical memory made apart from addresses (cuMemCreate, cuMemMap), as expandable segments use it.
 *
 * A block is charged to the card it lies on, `prop->location`, when it is made, and is held until its last handle is released
 * and its last mapping is gone: the driver keeps the memory that long. The driver may give a handle's number out again while
 * a mapping of the old block lives, so blocks are told apart by us and not by their handles.
 */
#include "hook.h"
#include "memory.h"

#include <stdlib.h>
#include <string.h>

struct block {
    uint64_t bytes, holders; /* handles and mappings */
    struct card *card;
};

static struct vmm *const vmm = &tangram.vmm;

static bool room_for_one(void **items, size_t count, size_t *room, size_t item_bytes)
{
    if (count < *room)
        return true;
    size_t more = *room ? *room * 2 : 64;
    void *moved = realloc(*items, more * item_bytes);
    if (moved == NULL)
        return false;
    *items = moved;
    *room = more;
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

static void let_go(struct block *block, uint64_t holders)
{
    if (block == NULL || holders == 0)
        return;
    pthread_mutex_lock(&vmm->lock);
    bool last = (block->holders -= holders) == 0;
    pthread_mutex_unlock(&vmm->lock);
    if (last) {
        lease_give_back(block->card, block->bytes);
        free(block);
    }
}

static bool own_handle(uint64_t number, struct block *block)
{
    pthread_mutex_lock(&vmm->lock);
    bool room = room_for_one((void **)&vmm->handle, vmm->handles, &vmm->handles_room, sizeof *vmm->handle);
    if (room)
        vmm->handle[vmm->handles++] = (struct handle){number, 1, block};
    pthread_mutex_unlock(&vmm->lock);
    return room;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                            unsigned long long flags)
{
    NEEDS(cuMemCreate);
    struct card *card = NULL;
    if (prop != NULL && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        card = card_of_device(prop->location.id);
    if (card == NULL) /* host memory, or a card that is not shared */
        return tangram.driver.cuMemCreate(handle, bytes, prop, flags);
    struct block *block = malloc(sizeof *block);
    if (block == NULL || !lease_reserve(card, bytes)) {
        free(block);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *block = (struct block){.bytes = bytes, .holders = 1, .card = card};
    CUresult rc = tangram.driver.cuMemCreate(handle, bytes, prop, flags);
    if (rc == CUDA_SUCCESS && !own_handle(*handle, block)) {
        tangram.driver.cuMemRelease(*handle);
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (rc != CUDA_SUCCESS)
        let_go(block, 1);
    return rc;
}

/* The number may be given out again as soon as the driver has it back, so our entry goes first and returns if it fails. */
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    NEEDS(cuMemRelease);
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
    if (rc == CUDA_SUCCESS) {
        let_go(block, 1);
    } else if (block != NULL) {
        pthread_mutex_lock(&vmm->lock);
        known = find(handle);
        if (known != NULL)
            known->count++;
        else
            vmm->handle[vmm->handles++] = (struct handle){handle, 1, block}; /* the place it had is still there */
        pthread_mutex_unlock(&vmm->lock);
    }
    return rc;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *at)
{
    NEEDS(cuMemRetainAllocationHandle);
    CUresult rc = tangram.driver.cuMemRetainAllocationHandle(handle, at);
    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&vmm->lock);
    struct handle *known = find(*handle);
    size_t i = first_mapping((uintptr_t)at + 1);
    struct mapping *mapping = i > 0 ? &vmm->mapping[i - 1] : NULL;
    if (known != NULL) {
        known->count++;
        known->block->holders++;
    } else if (mapping != NULL && (uintptr_t)at - mapping->at < mapping->bytes && mapping->block != NULL &&
               room_for_one((void **)&vmm->handle, vmm->handles, &vmm->handles_room, sizeof *vmm->handle)) {
        vmm->handle[vmm->handles++] = (struct handle){*handle, 1, mapping->block};
        mapping->block->holders++;
    }
    pthread_mutex_unlock(&vmm->lock);
    return rc;
}

/* Locked. False when it cannot be remembered. */
static bool own_mapping(uint64_t at, uint64_t bytes, struct block *block)
{
    if (!room_for_one((void **)&vmm->mapping, vmm->mappings, &vmm->mappings_room, sizeof *vmm->mapping))
        return false;
    size_t i = first_mapping(at);
    memmove(&vmm->mapping[i + 1], &vmm->mapping[i], (vmm->mappings - i) * sizeof *vmm->mapping);
    vmm->mapping[i] = (struct mapping){at, bytes, block};
    vmm->mappings++;
    return true;
}

EXPORT CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags)
{
    NEEDS(cuMemMap);
    struct block *block = NULL;
    pthread_mutex_lock(&vmm->lock);
    struct handle *known = find(handle);
    if (known != NULL) {
        block = known->block;
        block->holders++; /* before the call: a release that passes us must not be the last */
    }
    pthread_mutex_unlock(&vmm->lock);

    CUresult rc = tangram.driver.cuMemMap(at, bytes, offset, handle, flags);
    if (block == NULL)
        return rc;
    bool owned = false;
    if (rc == CUDA_SUCCESS) {
        pthread_mutex_lock(&vmm->lock);
        owned = own_mapping(at, bytes, block);
        pthread_mutex_unlock(&vmm->lock);
        if (!owned) {
            tangram.driver.cuMemUnmap(at, bytes);
            rc = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    if (!owned)
        let_go(block, 1);
    return rc;
}

/* One call may unmap many mappings. They are taken out one by one after the driver agreed; nobody can map there before this
 * call returns without racing against the program's own unmap. */
EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t bytes)
{
    NEEDS(cuMemUnmap);
    CUresult rc = tangram.driver.cuMemUnmap(at, bytes);
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
        let_go(block, 1);
    }
    return rc;
}

/* In a forked child: the lists may be half changed by a thread that is not here, so they are left, not freed. */
void vmm_forget_all(void)
{
    vmm->handle = NULL;
    vmm->mapping = NULL;
    vmm->handles = vmm->handles_room = vmm->mappings = vmm->mappings_room = 0;
}
