/* opened.c - memory behind emulated IPC handles of other processes: mapped at addresses of this process, as long as it has it open.
 *
 * It is resident, whatever this process's own memory is. It is charged as any memory that another process made (shared.c): by its key, once
 * in the container. It outlives the process that made it, as the driver's does.
 */
#include "memory/memory.h"
#include "memory/pool.h"

#include <stdlib.h>
#include <string.h>

static struct elastic *const elastic = &tangram.elastic;

struct ipc_opened {
    struct ipc_opened *next;
    struct ipc_handle handle;
    struct gpu *gpu;
    CUcontext context;
    CUdevice device;
    CUdeviceptr base;
    uint64_t bytes; /* of all blocks */
    uint64_t number;
    unsigned opens;  /* less closes */
    unsigned users;  /* threads that are in the driver with it: it is not freed meanwhile */
    bool left;       /* its context ended: it is in no list, and the last user frees it */
    unsigned blocks;
    uint64_t others; /* devices beside `device` that have access, a bit each */
    uint64_t block_bytes[];
};

static CUdeviceptr pointer_of(const struct ipc_opened *opened)
{
    return opened->base + opened->handle.offset;
}

static uint64_t key_of(const struct ipc_opened *opened)
{
    return OWNED_AS(OWNED_IPC, pointer_of(opened));
}

/* Locked. */
static struct ipc_opened **with_handle(const void *handle)
{
    struct ipc_opened **place = &elastic->ipc.opened;
    while (*place != NULL && memcmp(&(*place)->handle, handle, sizeof(struct ipc_handle)) != 0)
        place = &(*place)->next;
    return place;
}

/* Locked. What was closed as often as it was opened is not open, also while a thread uses it. */
static bool is_open_at(const struct ipc_opened *opened, CUdeviceptr at)
{
    return opened->opens > 0 && pointer_of(opened) == at;
}

/* Locked. NULL: nothing is open there. */
static struct ipc_opened *with_pointer(CUdeviceptr at)
{
    struct ipc_opened *opened = elastic->ipc.opened;
    while (opened != NULL && !is_open_at(opened, at))
        opened = opened->next;
    return opened;
}

/* Locked. Off the list, if nothing has it open and no thread uses it. False: it stays. */
static bool take_ended(struct ipc_opened *opened)
{
    if (opened->opens > 0 || opened->users > 0)
        return false;
    struct ipc_opened **place = &elastic->ipc.opened;
    while (!opened->left && *place != opened)
        place = &(*place)->next;
    if (!opened->left)
        *place = opened->next;
    return true;
}

bool ipc_find(CUdeviceptr at, struct elastic_found *found)
{
    const struct ipc_opened *opened = elastic->ipc.opened;
    while (opened != NULL && (opened->opens == 0 || at - pointer_of(opened) >= opened->handle.requested))
        opened = opened->next;
    if (opened != NULL)
        *found = (struct elastic_found){.gpu = opened->gpu, .device = opened->device, .at = pointer_of(opened), .requested = opened->handle.requested,
                                        .mapping = opened->base, .mapped = opened->bytes, .number = opened->number, .block = opened->number,
                                        .context = opened->context, .opened = true};
    return opened != NULL;
}

bool ipc_in(CUdeviceptr at, uint64_t bytes)
{
    const struct ipc_opened *opened = elastic->ipc.opened;
    while (opened != NULL && at - opened->base >= opened->bytes && opened->base - at >= bytes)
        opened = opened->next;
    return opened != NULL;
}

/* The first `blocks` of it. */
static void unmap(const struct ipc_opened *opened, unsigned blocks)
{
    CUdeviceptr at = opened->base;
    for (unsigned i = 0; i < blocks; at += opened->block_bytes[i++])
        tangram.driver.cuMemUnmap(at, opened->block_bytes[i]);
    tangram.driver.cuMemAddressFree(opened->base, opened->bytes);
}

static CUresult map_block(CUdeviceptr at, uint64_t bytes, int fd)
{
    CUmemGenericAllocationHandle block;
    CUresult rc =
        tangram.driver.cuMemImportFromShareableHandle(&block, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = tangram.driver.cuMemMap(at, bytes, 0, block, 0);
    tangram.driver.cuMemRelease(block); /* the mapping keeps it */
    return rc;
}

static CUresult allow(const struct ipc_opened *opened, CUdevice device)
{
    const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return tangram.driver.cuMemSetAccess(opened->base, opened->bytes, &access, 1);
}

/* With access for the device of the current context. */
static CUresult map(struct ipc_opened *opened, const struct passed_blocks *passed)
{
    CUdevice device;
    CUresult rc = tangram.driver.cuCtxGetDevice(&device);
    if (rc == CUDA_SUCCESS)
        rc = tangram.driver.cuMemAddressReserve(&opened->base, opened->bytes, 0, 0, 0);
    if (rc != CUDA_SUCCESS)
        return rc;
    unsigned mapped = 0;
    for (CUdeviceptr at = opened->base; mapped < opened->blocks && rc == CUDA_SUCCESS; at += opened->block_bytes[mapped++]) {
        rc = map_block(at, opened->block_bytes[mapped], passed->fd[mapped]);
        if (rc != CUDA_SUCCESS)
            break;
    }
    if (rc == CUDA_SUCCESS)
        rc = allow(opened, device);
    if (rc != CUDA_SUCCESS)
        unmap(opened, mapped);
    return rc;
}

/* Neither the process that has the memory nor the arbiter is believed: sizes that do not fit are refused here. NULL: they do not. */
static struct ipc_opened *described(const struct passed_blocks *passed, const void *handle, CUcontext context)
{
    struct ipc_opened *opened = calloc(1, sizeof *opened + passed->total * sizeof *opened->block_bytes);
    if (opened == NULL)
        return NULL;
    *opened = (struct ipc_opened){.gpu = passed->gpu, .context = context, .bytes = passed->bytes, .opens = 1, .blocks = passed->total};
    memcpy(&opened->handle, handle, sizeof opened->handle);
    uint64_t left = passed->bytes;
    bool fits = opened->handle.offset < passed->bytes && opened->handle.requested <= passed->bytes - opened->handle.offset;
    for (unsigned i = 0; i < opened->blocks && fits; i++) {
        opened->block_bytes[i] = passed->block_bytes[i];
        fits = passed->block_bytes[i] > 0 && passed->block_bytes[i] % PAGE == 0 && passed->block_bytes[i] <= left;
        left -= passed->block_bytes[i];
    }
    if (fits && left == 0 && tangram.driver.cuCtxGetDevice(&opened->device) == CUDA_SUCCESS)
        return opened;
    free(opened);
    return NULL;
}

/* It is in no list, and no work of this process uses it. */
static void end(struct ipc_opened *opened, bool charged)
{
    const struct owned was = {.at = key_of(opened), .bytes = opened->bytes, .gpu = opened->gpu};
    CUstreamCaptureMode mode = relax();
    unmap(opened, opened->blocks);
    relax_end(mode);
    free(opened);
    if (charged)
        shared_end_or_give_back(&was);
}

static uint64_t bit_of(CUdevice device)
{
    return device < PEER_DEVICES ? (uint64_t)1 << device : 0;
}

/* With a user counted, who ends here. False: its context ended meanwhile. */
static bool open_on(struct ipc_opened *opened, CUdevice device, CUdeviceptr *at, CUresult *rc)
{
    CUstreamCaptureMode mode = relax();
    *rc = allow(opened, device);
    relax_end(mode);
    lock_acquire(&elastic->lock);
    const bool there = !opened->left;
    opened->users--;
    if (there && *rc == CUDA_SUCCESS) {
        opened->opens++;
        opened->others |= bit_of(device);
        *at = pointer_of(opened);
    }
    const bool ends = take_ended(opened);
    lock_release(&elastic->lock);
    if (ends)
        end(opened, true);
    return there;
}

/* One more of what is open here already. On another GPU than before it gets access for that, too, and counts from then on; the driver's has an
 * address for each context. False: it is not open. */
static bool open_again(const void *handle, CUdeviceptr *at, CUresult *rc)
{
    CUdevice device;
    *rc = tangram.driver.cuCtxGetDevice(&device);
    if (*rc != CUDA_SUCCESS)
        return true;
    struct quiet quiet = quiet_begin();
    lock_acquire(&elastic->lock);
    struct ipc_opened *opened = *with_handle(handle);
    const bool more = opened != NULL && opened->device != device && (opened->others & bit_of(device)) == 0;
    if (more) {
        opened->users++;
    } else if (opened != NULL) {
        opened->opens++;
        *at = pointer_of(opened);
    }
    lock_release(&elastic->lock);
    const bool again = more ? open_on(opened, device, at, rc) : opened != NULL;
    quiet_end(quiet);
    return again;
}

/* False: another thread has opened it meanwhile. */
static bool listed(struct ipc_opened *opened, CUdeviceptr *at)
{
    lock_acquire(&elastic->lock);
    const bool first = *with_handle(&opened->handle) == NULL;
    if (first) {
        *at = pointer_of(opened);
        opened->number = atomic_fetch_add(&elastic->numbers, 1) + 1;
        opened->next = elastic->ipc.opened;
        elastic->ipc.opened = opened;
        atomic_store(&elastic->ipc.any_opened, true);
    }
    lock_release(&elastic->lock);
    return first;
}

/* Where another thread was first, this one's mapping is not needed. */
static CUresult list(struct ipc_opened *opened, CUdeviceptr *at)
{
    CUresult rc;
    while (!listed(opened, at))
        if (open_again(&opened->handle, at, &rc)) {
            end(opened, true);
            return rc;
        }
    return CUDA_SUCCESS;
}

static bool charge(const struct ipc_opened *opened)
{
    uint8_t key[WIRE_HANDLE_BYTES] = {0};
    memcpy(key, &opened->handle, WIRE_KEY_BYTES);
    return shared_opened(opened->gpu, WIRE_IPC, key_of(opened), opened->bytes, key);
}

static CUresult open_passed(CUdeviceptr *at, const struct passed_blocks *passed, const void *handle, CUcontext context)
{
    struct ipc_opened *opened = described(passed, handle, context);
    if (opened == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    CUstreamCaptureMode mode = relax();
    const CUresult rc = map(opened, passed);
    relax_end(mode);
    if (rc != CUDA_SUCCESS) {
        free(opened);
        return rc == CUDA_ERROR_OUT_OF_MEMORY ? rc : CUDA_ERROR_INVALID_HANDLE;
    }
    if (!charge(opened)) {
        end(opened, false);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return list(opened, at);
}

/* As the driver: a process does not open its own memory, and what it has open already is only counted. */
CUresult ipc_open(CUdeviceptr *at, const void *handle, unsigned int flags)
{
    CUcontext context = NULL;
    struct passed_blocks passed = {0};
    const CUresult current = tangram.driver.cuCtxGetCurrent(&context);
    if (current != CUDA_SUCCESS || context == NULL)
        return current != CUDA_SUCCESS ? current : CUDA_ERROR_INVALID_CONTEXT;
    if (at == NULL || flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    if (ipc_is_ours(handle))
        return CUDA_ERROR_INVALID_CONTEXT;
    CUresult rc;
    if (open_again(handle, at, &rc))
        return rc;
    rc = CUDA_ERROR_INVALID_HANDLE;
    const bool came = grant_ready() == GRANT_GOOD && passing_is_understood() && passing_open(handle, &passed);
    if (came)
        rc = open_passed(at, &passed, handle, context);
    if (rc != CUDA_SUCCESS)
        warn(WARN_NOT_OPENED, "an IPC handle of memory that can be swapped is not opened: %s",
             came ? "the memory does not fit into this container's limit, or the driver refused it" : passing_reason_text(passed.reason));
    passed_blocks_free(&passed);
    return rc;
}

/* False: it would be the last close, and work that uses the memory was not waited for. */
static bool closed(CUdeviceptr at, bool waited, CUresult *rc)
{
    lock_acquire(&elastic->lock);
    struct ipc_opened *opened = with_pointer(at);
    const bool closes = opened == NULL || opened->opens > 1 || waited;
    if (opened != NULL && closes)
        opened->opens--;
    const bool ends = opened != NULL && closes && take_ended(opened);
    lock_release(&elastic->lock);
    *rc = opened != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (ends)
        end(opened, true);
    return closes;
}

bool ipc_close(CUdeviceptr at, CUresult *rc)
{
    CUcontext current = NULL;
    if (!atomic_load(&elastic->ipc.any_opened))
        return false;
    lock_acquire(&elastic->lock);
    const struct ipc_opened *opened = with_pointer(at);
    CUcontext context = opened != NULL ? opened->context : NULL;
    lock_release(&elastic->lock);
    if (opened == NULL)
        return false;
    *rc = tangram.driver.cuCtxGetCurrent(&current);
    if (*rc == CUDA_SUCCESS && current == NULL)
        *rc = CUDA_ERROR_INVALID_CONTEXT;
    if (*rc == CUDA_SUCCESS && current != context)
        *rc = anchor_wait(current); /* the last close may be in the first context, and waits for that */
    if (*rc != CUDA_SUCCESS || closed(at, false, rc))
        return true;
    *rc = anchor_wait(context); /* unmapping does not wait, and work that uses it would fail */
    if (*rc == CUDA_SUCCESS)
        closed(at, true, rc);
    return true;
}

/* What was opened in a context ends with it. */
void ipc_forget_context(CUcontext context, struct gpu *gpu, uint64_t before)
{
    while (atomic_load(&elastic->ipc.any_opened)) {
        lock_acquire(&elastic->lock);
        struct ipc_opened **place = &elastic->ipc.opened;
        while (*place != NULL && ((*place)->context != context || (gpu != NULL && (*place)->gpu != gpu) || (*place)->number > before))
            place = &(*place)->next;
        struct ipc_opened *opened = *place;
        if (opened != NULL) {
            *place = opened->next;
            opened->left = true;
            opened->opens = 0;
        }
        const bool ends = opened != NULL && take_ended(opened);
        lock_release(&elastic->lock);
        if (opened == NULL)
            return;
        if (ends)
            end(opened, true);
    }
}
