/* vmm.c - virtual memory management: physical memory, address ranges, and the maps between them.
 *
 * Physical memory is counted when it is created and given back when its handle is released and its last map is gone.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <stdlib.h>
#include <sys/mman.h>

#define TOKEN_MAGIC 0x4b4f544650555147u

struct reservation {
    struct reservation *next;
    uintptr_t base;
    size_t bytes;
};

static bool whole(size_t bytes)
{
    return bytes > 0 && bytes % BLOCK_BYTES == 0; /* the granularity, as every card here answers */
}

CUresult physical_get(CUmemGenericAllocationHandle handle, struct physical **physical)
{
    *physical = (struct physical *)(uintptr_t)handle;
    return handle_is(*physical, HANDLE_PHYSICAL) && (*physical)->handles > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUmemGenericAllocationHandle handle_to(struct physical *physical)
{
    physical->handles++;
    return (CUmemGenericAllocationHandle)(uintptr_t)physical;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *how, unsigned long long flags)
{
    TRY(ready());
    CHECK(handle != NULL && how != NULL && flags == 0 && whole(bytes), CUDA_ERROR_INVALID_VALUE);
    CHECK(how->type == CU_MEM_ALLOCATION_TYPE_PINNED && how->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
    TRY(device_ok(how->location.id));
    struct physical *physical = physical_new(how->location.id, bytes, bytes);
    CHECK(physical != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    physical->how = *how;
    *handle = handle_to(physical);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    TRY(ready());
    SCOPED tables = hold(&cuda.lock);
    struct physical *physical;
    TRY(physical_get(handle, &physical));
    physical->handles--;
    physical_drop(physical);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags)
{
    (void)wish;
    TRY(ready());
    CHECK(at != NULL && whole(bytes) && flags == 0 && (alignment & (alignment - 1)) == 0, CUDA_ERROR_INVALID_VALUE);
    const size_t align = alignment > BLOCK_BYTES ? alignment : BLOCK_BYTES;
    struct reservation *made = bytes <= ARENA_BYTES ? malloc(sizeof *made) : NULL;
    CHECK(made != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    void *memory = addresses_take(bytes, align);
    if (memory == MAP_FAILED) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    SCOPED tables = hold(&cuda.lock);
    *made = (struct reservation){.next = cuda.reservations, .base = (uintptr_t)memory, .bytes = bytes};
    cuda.reservations = made;
    *at = (CUdeviceptr)made->base;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes)
{
    TRY(ready());
    SCOPED tables = hold(&cuda.lock);
    struct reservation **link = &cuda.reservations;
    while (*link != NULL && ((*link)->base != (uintptr_t)at || (*link)->bytes != bytes))
        link = &(*link)->next;
    struct reservation *found = *link;
    CHECK(found != NULL, CUDA_ERROR_INVALID_VALUE);
    *link = found->next;
    munmap((void *)found->base, found->bytes);
    free(found);
    return CUDA_SUCCESS;
}

static bool reserved(uintptr_t at, size_t bytes)
{
    for (const struct reservation *r = cuda.reservations; r != NULL; r = r->next)
        if (at >= r->base && at + bytes <= r->base + r->bytes)
            return true;
    return false;
}

EXPORT CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    TRY(ready());
    CHECK(flags == 0 && offset == 0 && whole(bytes), CUDA_ERROR_INVALID_VALUE); /* offset: "must be 0" */
    SCOPED tables = hold(&cuda.lock);
    struct physical *physical;
    TRY(physical_get(handle, &physical));
    CHECK(bytes <= physical->charged && reserved((uintptr_t)at, bytes), CUDA_ERROR_INVALID_VALUE);
    physical->users++;
    struct span *span = span_new(&(struct span){
        .base = (uintptr_t)at, .bytes = bytes, .kind = SPAN_MAPPED, .device = physical->device, .physical = physical});
    if (span == NULL) {
        physical_drop(physical);
        return CUDA_ERROR_INVALID_VALUE;
    }
    const int fd = physical->fd >= 0 ? physical->fd : cuda.arena_fd;
    if (mmap((void *)span->base, bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, (off_t)physical->offset) != MAP_FAILED)
        return CUDA_SUCCESS;
    span_gone(span);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static void open_map(struct span *span, CUmemAccess_flags access)
{
    span->usable = access != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    span->flags = (unsigned)access;
    mprotect((void *)span->base, span->bytes, span->usable ? PROT_READ | PROT_WRITE : PROT_NONE);
}

CUresult maps_change(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access)
{
    struct span *span;
    TRY(ready());
    CHECK(bytes > 0, CUDA_ERROR_INVALID_VALUE);
    SCOPED tables = hold(&cuda.lock);
    for (CUdeviceptr next = at; next < at + bytes; next += span->bytes) {
        span = span_from(next, SPAN_MAPPED);
        CHECK(span != NULL && next + span->bytes <= at + bytes, CUDA_ERROR_INVALID_VALUE);
    }
    for (CUdeviceptr next = at; next < at + bytes;) {
        span = span_from(next, SPAN_MAPPED);
        next += span->bytes;
        if (access != NULL)
            open_map(span, access->flags);
        else
            span_gone(span);
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *at)
{
    struct span *span;
    TRY(ready());
    CHECK(handle != NULL, CUDA_ERROR_INVALID_VALUE);
    SCOPED tables = hold(&cuda.lock);
    TRY(span_get((CUdeviceptr)(uintptr_t)at, SPAN_MAPPED, CUDA_ERROR_INVALID_VALUE, &span));
    span->physical->users++;
    *handle = handle_to(span->physical);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                             unsigned long long flags)
{
    TRY(ready());
    CHECK(flags == 0, CUDA_ERROR_INVALID_VALUE);
    SCOPED tables = hold(&cuda.lock);
    struct physical *physical;
    TRY(physical_get(handle, &physical));
    CHECK((physical->how.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0, CUDA_ERROR_INVALID_VALUE);
    CHECK(object_share(physical), CUDA_ERROR_INVALID_VALUE);
    return token_export(shareable, type, TOKEN_MAGIC, physical->object);
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, CUmemAllocationHandleType type)
{
    uint64_t id;
    struct physical *physical;
    TRY(ready());
    CHECK(handle != NULL, CUDA_ERROR_INVALID_VALUE);
    TRY(token_import(os_handle, type, TOKEN_MAGIC, &id));
    TRY(physical_import(id, &physical));
    physical->how = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                          .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = physical->device}};
    *handle = handle_to(physical);
    return CUDA_SUCCESS;
}
