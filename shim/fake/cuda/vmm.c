/* vmm.c - virtual memory management: physical memory, address ranges, and the maps between them.
 *
 * Physical memory is counted when it is created and given back when its handle is released and its last map is gone.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRANULARITY (2 * FAKE_MIB) /* as every card here answers */
#define TOKEN_MAGIC 0x4b4f544650555147u

struct physical {
    uint32_t magic;
    int device, fd; /* fd: of an imported one, else -1 = the arena */
    uint64_t bytes, offset, object;
    unsigned handles, maps;
    struct span *backing; /* NULL when imported */
    CUmemAllocationProp how;
};
#define PHYSICAL_MAGIC 0x53594850u

struct reservation {
    struct reservation *next;
    uintptr_t base;
    size_t bytes;
};

struct token { /* what an exported descriptor holds */
    uint64_t magic, id;
};

static struct physical *physical_of(CUmemGenericAllocationHandle handle)
{
    struct physical *physical = (struct physical *)(uintptr_t)handle;
    return physical != NULL && (handle & 7) == 0 && physical->magic == PHYSICAL_MAGIC && physical->handles > 0 ? physical : NULL;
}

static void physical_end(struct physical *physical) /* under lock */
{
    if (physical->handles > 0 || physical->maps > 0)
        return;
    if (physical->object != 0)
        object_release(physical->object);
    else
        give(physical->device, physical->bytes);
    if (physical->fd >= 0)
        close(physical->fd);
    if (physical->backing != NULL && physical->object == 0)
        arena_give(physical->backing);
    physical->backing = NULL; /* the struct stays: a stale handle must be recognised */
}

bool physical_hold(CUmemGenericAllocationHandle handle, struct physical **held)
{
    lock();
    *held = physical_of(handle);
    if (*held != NULL)
        (*held)->maps++;
    unlock();
    return *held != NULL;
}

void physical_let_go(struct physical *held)
{
    lock();
    held->maps--;
    physical_end(held);
    unlock();
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *how, CUmemAllocationGranularity_flags which)
{
    (void)which;
    TRY(ready());
    CHECK(bytes != NULL && how != NULL, CUDA_ERROR_INVALID_VALUE);
    *bytes = GRANULARITY;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *how, unsigned long long flags)
{
    TRY(ready());
    CHECK(handle != NULL && how != NULL && flags == 0 && bytes > 0 && bytes % GRANULARITY == 0, CUDA_ERROR_INVALID_VALUE);
    CHECK(how->type == CU_MEM_ALLOCATION_TYPE_PINNED && how->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
    TRY(device_ok(how->location.id));
    CHECK(bytes <= ARENA_BYTES / 2 && take(how->location.id, bytes), CUDA_ERROR_OUT_OF_MEMORY);
    struct physical *physical = calloc(1, sizeof *physical);
    lock();
    struct span *backing = physical != NULL ? arena_take(bytes, GRANULARITY) : NULL;
    unlock();
    if (backing == NULL) {
        free(physical);
        give(how->location.id, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    backing->touched = true;
    *physical = (struct physical){.magic = PHYSICAL_MAGIC, .device = how->location.id, .fd = -1, .bytes = bytes,
                                  .offset = backing->offset, .handles = 1, .backing = backing, .how = *how};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    TRY(ready());
    lock();
    struct physical *physical = physical_of(handle);
    if (physical != NULL) {
        physical->handles--;
        physical_end(physical);
    }
    unlock();
    return physical != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *how, CUmemGenericAllocationHandle handle)
{
    TRY(ready());
    const struct physical *physical = physical_of(handle);
    CHECK(how != NULL && physical != NULL, CUDA_ERROR_INVALID_VALUE);
    *how = physical->how;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags)
{
    (void)wish;
    TRY(ready());
    CHECK(at != NULL && bytes > 0 && bytes % GRANULARITY == 0 && flags == 0, CUDA_ERROR_INVALID_VALUE);
    CHECK((alignment & (alignment - 1)) == 0, CUDA_ERROR_INVALID_VALUE);
    const size_t align = alignment > GRANULARITY ? alignment : GRANULARITY;
    struct reservation *made = bytes <= ARENA_BYTES ? malloc(sizeof *made) : NULL;
    CHECK(made != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    void *memory = mmap(NULL, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->base = rounded((uintptr_t)memory, align);
    made->bytes = bytes;
    const size_t before = made->base - (uintptr_t)memory;
    if (before > 0)
        munmap(memory, before);
    munmap((void *)(made->base + bytes), align - before);
    lock();
    made->next = cuda.reservations;
    cuda.reservations = made;
    unlock();
    *at = (CUdeviceptr)made->base;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes)
{
    TRY(ready());
    lock();
    struct reservation **link = &cuda.reservations;
    while (*link != NULL && ((*link)->base != (uintptr_t)at || (*link)->bytes != bytes))
        link = &(*link)->next;
    struct reservation *found = *link;
    if (found != NULL) {
        *link = found->next;
        munmap((void *)found->base, found->bytes);
        free(found);
    }
    unlock();
    return found != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
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
    CHECK(flags == 0 && offset == 0 && bytes > 0 && bytes % GRANULARITY == 0, CUDA_ERROR_INVALID_VALUE); /* offset: "must be 0" */
    struct span *span = calloc(1, sizeof *span);
    CHECK(span != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    lock();
    struct physical *physical = physical_of(handle);
    if (physical != NULL && bytes <= physical->bytes && reserved((uintptr_t)at, bytes)) {
        *span = (struct span){.base = (uintptr_t)at, .bytes = bytes, .kind = SPAN_MAPPED, .device = physical->device, .physical = physical};
        if (span_insert(span)) {
            const int fd = physical->fd >= 0 ? physical->fd : cuda.arena_fd;
            void *mapped = mmap((void *)(uintptr_t)at, bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, (off_t)physical->offset);
            rc = mapped == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
            if (rc == CUDA_SUCCESS)
                physical->maps++;
            else
                span_remove(span);
        }
    }
    unlock();
    if (rc != CUDA_SUCCESS)
        free(span);
    return rc;
}

/* Whether [at, at + bytes) is covered by whole maps. */
static bool whole_maps(uintptr_t at, size_t bytes)
{
    for (uintptr_t next = at; next < at + bytes;) {
        const struct span *span = span_find(next);
        if (span == NULL || span->kind != SPAN_MAPPED || span->base != next || next + span->bytes > at + bytes)
            return false;
        next += span->bytes;
    }
    return bytes > 0;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t bytes)
{
    TRY(ready());
    lock();
    const bool good = whole_maps((uintptr_t)at, bytes);
    for (uintptr_t next = (uintptr_t)at; good && next < (uintptr_t)at + bytes;) {
        struct span *span = span_find(next);
        next += span->bytes;
        span_remove(span);
        mmap((void *)span->base, span->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        span->physical->maps--;
        physical_end(span->physical);
        free(span);
    }
    unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    TRY(ready());
    CHECK(access != NULL && count > 0, CUDA_ERROR_INVALID_VALUE);
    const bool open = access[0].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    lock();
    const bool good = whole_maps((uintptr_t)at, bytes);
    for (uintptr_t next = (uintptr_t)at; good && next < (uintptr_t)at + bytes;) {
        struct span *span = span_find(next);
        mprotect((void *)span->base, span->bytes, open ? PROT_READ | PROT_WRITE : PROT_NONE);
        span->usable = open;
        span->flags = (unsigned)access[0].flags;
        next += span->bytes;
    }
    unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *where, CUdeviceptr at)
{
    TRY(ready());
    CHECK(flags != NULL && where != NULL, CUDA_ERROR_INVALID_VALUE);
    lock();
    const struct span *span = span_find((uintptr_t)at);
    if (span != NULL)
        *flags = span->kind == SPAN_MAPPED ? span->flags : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    unlock();
    return span != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *at)
{
    TRY(ready());
    CHECK(handle != NULL, CUDA_ERROR_INVALID_VALUE);
    lock();
    const struct span *span = span_find((uintptr_t)at);
    const bool good = span != NULL && span->kind == SPAN_MAPPED;
    if (good) {
        span->physical->handles++;
        *handle = (CUmemGenericAllocationHandle)(uintptr_t)span->physical;
    }
    unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                             unsigned long long flags)
{
    TRY(ready());
    CHECK(shareable != NULL && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && flags == 0, CUDA_ERROR_INVALID_VALUE);
    lock();
    struct physical *physical = physical_of(handle);
    const bool good = physical != NULL && (physical->how.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0 &&
                      object_share(physical->offset, physical->bytes, physical->device, &physical->object);
    unlock();
    CHECK(good, CUDA_ERROR_INVALID_VALUE);
    const struct token token = {.magic = TOKEN_MAGIC, .id = physical->object};
    const int fd = new_memfd("fake-gpu-handle");
    CHECK(fd >= 0 && write(fd, &token, sizeof token) == (ssize_t)sizeof token, CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)shareable = fd;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, CUmemAllocationHandleType type)
{
    struct token token;
    struct fake_object object;
    int fd = -1;
    TRY(ready());
    CHECK(handle != NULL && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
    CHECK(pread((int)(intptr_t)os_handle, &token, sizeof token, 0) == (ssize_t)sizeof token && token.magic == TOKEN_MAGIC,
          CUDA_ERROR_INVALID_VALUE);
    struct physical *physical = calloc(1, sizeof *physical);
    CHECK(physical != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    lock();
    bool good = object_import(token.id, &object, &fd);
    if (good && device_of_unit(object.unit) < 0) {
        object_release(token.id);
        close(fd);
        good = false;
    }
    unlock();
    if (!good) {
        free(physical);
        return CUDA_ERROR_INVALID_VALUE;
    }
    *physical = (struct physical){.magic = PHYSICAL_MAGIC, .device = device_of_unit(object.unit), .fd = fd, .bytes = object.bytes,
                                  .offset = object.offset, .object = object.id, .handles = 1};
    physical->how.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    physical->how.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    physical->how.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    physical->how.location.id = physical->device;
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
}
