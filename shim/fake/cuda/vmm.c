/* vmm.c - virtual memory management: physical memory, address ranges, and the maps between them.
 *
 * Physical memory is counted when it is created and freed when its handle is released and its last map is gone.
 */
#define _GNU_SOURCE
#include "internal.h"
#include "calls.h"

#include <sys/mman.h>

#define TOKEN_MAGIC 0x4b4f544650555147u

static bool whole(size_t bytes)
{
    return bytes > 0 && bytes % BLOCK_BYTES == 0; /* the granularity, as every GPU here answers */
}

CUresult physical_get(CUmemGenericAllocationHandle handle, struct physical **physical)
{
    *physical = (struct physical *)(uintptr_t)handle;
    return handle_is(*physical, HANDLE_PHYSICAL) && (*physical)->handles > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* One handle more, for its newest user. */
static CUresult handle_to(struct physical *physical, CUmemGenericAllocationHandle *made)
{
    CHECK(physical != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    physical->handles++;
    *made = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
}

static struct physical *physical_used(struct physical *physical)
{
    physical->users++;
    return physical;
}

static CUresult handle_create(CUmemGenericAllocationHandle *made, size_t bytes, const CUmemAllocationProp *how)
{
    struct physical *physical = physical_new(how->location.id, bytes, bytes, false);
    TRY(handle_to(physical, made));
    physical->how = *how;
    physical->touched = true; /* a mapping of it may be written by anyone */
    return CUDA_SUCCESS;
}

static CUresult handle_gone(struct physical *physical)
{
    physical->handles--;
    physical_drop(physical);
    return CUDA_SUCCESS;
}

static CUresult handle_import(CUmemGenericAllocationHandle *made, void *shareable, CUmemAllocationHandleType type)
{
    uint64_t id;
    struct physical *physical;
    TRY(token_import(shareable, type, TOKEN_MAGIC, &id));
    TRY(physical_import(id, &physical));
    physical->how = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                          .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = physical->device}};
    return handle_to(physical, made);
}

static CUresult reserve(CUdeviceptr *at, size_t bytes, size_t alignment)
{
    void *memory = bytes <= ARENA_BYTES ? addresses_take(bytes, alignment > BLOCK_BYTES ? alignment : BLOCK_BYTES) : MAP_FAILED;
    CHECK(memory != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(span_new(&cuda.reservations, &(struct span){.base = (uintptr_t)memory, .bytes = bytes, .capacity = bytes, .kind = SPAN_HOST}) != NULL,
          CUDA_ERROR_OUT_OF_MEMORY);
    *at = (uintptr_t)memory;
    return CUDA_SUCCESS;
}

/* The reserved range in which all of these are, or NULL. */
static struct span *reservation_of(CUdeviceptr at, size_t bytes)
{
    struct span *span = span_in(&cuda.reservations, (uintptr_t)at);
    return span != NULL && bytes <= span->base + span->bytes - (uintptr_t)at ? span : NULL;
}

static CUresult map(CUdeviceptr at, size_t bytes, struct physical *physical)
{
    const struct span like = {.base = (uintptr_t)at, .bytes = bytes, .kind = SPAN_MAPPED, .device = physical->device, .physical = physical_used(physical)};
    struct span *span = span_new(&cuda.spans, &like);
    if (span == NULL) {
        physical_drop(physical);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (arena_map(span->base, bytes, PROT_NONE, physical->offset))
        return CUDA_SUCCESS;
    span_gone(&cuda.spans, span);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* What is not named stays as it is. */
static void open_map(struct span *span, const CUmemAccessDesc *access, size_t count)
{
    SCOPED step = locked(&cuda.step);
    bool usable = false;
    for (size_t i = 0; i < count; i++)
        span->access[access[i].location.id] = access[i].flags;
    for (int device = 0; device < cuda.devices; device++)
        usable |= span->access[device] != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    mprotect((void *)span->base, span->bytes, usable ? PROT_READ | PROT_WRITE : PROT_NONE);
}

/* All maps in [at, at + bytes), if whole ones cover it: their access, or NULL to end them. */
static CUresult maps_change(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    struct span *span;
    for (CUdeviceptr next = at; next < at + bytes; next += span->bytes) {
        span = span_from(next, SPAN_MAPPED);
        CHECK(span != NULL && next + span->bytes <= at + bytes, CUDA_ERROR_INVALID_VALUE);
        for (size_t i = 0; i < count; i++)
            CHECK(access_possible(span->device, &access[i].location), CUDA_ERROR_INVALID_DEVICE); /* guessed */
    }
    for (CUdeviceptr next = at; next < at + bytes;) {
        span = span_from(next, SPAN_MAPPED);
        next += span->bytes;
        if (access != NULL)
            open_map(span, access, count);
        else
            span_gone(&cuda.spans, span);
    }
    return CUDA_SUCCESS;
}

#include "vmm.def"
