/* memory.c - device memory by cuMemAlloc and its kin.
 *
 * The card loses pages of 2 MiB, as a real one does: small requests share them (pages.c), larger ones have their own.
 * Managed memory is counted in pages of its own, too, at the call. The addresses come from the arena (span.c).
 */
#define _GNU_SOURCE
#include "internal.h"

#include <search.h>
#include <stdlib.h>
#include <sys/mman.h>

bool take(int device, uint64_t bytes)
{
    return page_take(cuda.client.page, cuda.client.slot, cuda.device[device].unit, bytes);
}

void give(int device, uint64_t bytes)
{
    page_give(cuda.client.page, cuda.client.slot, cuda.device[device].unit, bytes);
}

CUresult memory_new(enum span_kind kind, CUcontext ctx, int device, size_t bytes, uint64_t charged, struct span **made)
{
    CHECK(bytes > 0, CUDA_ERROR_INVALID_VALUE);
    CHECK(bytes <= ARENA_BYTES / 2, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(atomic_load(&card_of(device)->lost) == 0, CUDA_ERROR_DEVICE_UNAVAILABLE);
    CHECK(charged == 0 || take(device, charged), CUDA_ERROR_OUT_OF_MEMORY);
    lock();
    struct span *span = arena_take(bytes, bytes >= BLOCK_BYTES / 2 ? BLOCK_BYTES : GRAIN);
    if (span != NULL) {
        span->kind = kind;
        span->ctx = ctx;
        span->device = device;
        span->charged = charged;
        if (!span_insert(span)) {
            arena_give(span);
            span = NULL;
        }
    }
    unlock();
    if (span == NULL && charged > 0)
        give(device, charged);
    *made = span;
    return span != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void memory_gone(struct span *span)
{
    span_remove(span);
    if (span->place != NULL) {
        arena_wipe(span);
        place_free(&span->ctx->pages[span->list], span->device, span->place);
        free(span);
        return;
    }
    if (span->object != 0)
        object_release(span->object); /* the daemon gives it back when the last process lets go */
    else if (span->charged > 0)
        give(span->device, span->charged);
    if (span->kind == SPAN_IPC) {
        munmap((void *)(span->base & ~(uintptr_t)4095), span->room);
        free(span);
        return;
    }
    if (span->object == 0)
        arena_give(span);
    else
        free(span); /* somebody else may still read these pages: never use them again */
}

static CUcontext walk_ctx; /* twalk has no closure; used under lock */
static struct span *walk_first;

static void collect(const void *node, VISIT visit, int level)
{
    struct span *span = *(struct span *const *)node;
    (void)level;
    if ((visit == postorder || visit == leaf) && span->ctx == walk_ctx &&
        (span->kind == SPAN_DEVICE || span->kind == SPAN_MANAGED || span->kind == SPAN_IPC || span->kind == SPAN_VARIABLES)) {
        span->next_free = walk_first;
        walk_first = span;
    }
}

void memory_context_gone(CUcontext ctx)
{
    lock();
    walk_ctx = ctx;
    walk_first = NULL;
    twalk(cuda.spans, collect);
    for (struct span *span = walk_first, *next; span != NULL; span = next) {
        next = span->next_free;
        memory_gone(span);
    }
    for (unsigned i = 0; i < PAGES_LISTS; i++)
        pages_free(&ctx->pages[i], ctx->device);
    unlock();
}

/* A small request, in a block of its context. */
static CUresult small_new(enum span_kind kind, CUcontext ctx, unsigned list, size_t bytes, struct span **made)
{
    CHECK(atomic_load(&card_of(ctx->device)->lost) == 0, CUDA_ERROR_DEVICE_UNAVAILABLE);
    struct pages *pages = &ctx->pages[list];
    struct span *span = calloc(1, sizeof *span);
    CHECK(span != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    lock();
    struct place *place = place_new(pages, ctx->device, bytes);
    bool good = place != NULL;
    if (good) {
        *span = (struct span){.kind = kind, .ctx = ctx, .device = ctx->device, .bytes = bytes,
                              .place = place, .list = list, .offset = place_offset(place), .room = place->bytes};
        arena_fill(span);
        good = span_insert(span);
        if (!good)
            place_free(pages, ctx->device, place);
    }
    unlock();
    if (good)
        *made = span;
    else
        free(span);
    return good ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult memory_by_pages(enum span_kind kind, CUcontext ctx, unsigned list, size_t bytes, struct span **made)
{
    CHECK(bytes <= ARENA_BYTES / 2, CUDA_ERROR_OUT_OF_MEMORY);
    if (kind != SPAN_MANAGED && rounded(bytes, GRAIN) < BLOCK_BYTES)
        return small_new(kind, ctx, list, bytes, made);
    return memory_new(kind, ctx, ctx->device, bytes, rounded(bytes, BLOCK_BYTES), made);
}

static CUresult alloc(enum span_kind kind, CUdeviceptr *at, size_t bytes)
{
    CUcontext ctx;
    struct span *span;
    TRY(current(&ctx));
    CHECK(at != NULL && bytes > 0, CUDA_ERROR_INVALID_VALUE);
    TRY(memory_by_pages(kind, ctx, PAGES_LINEAR, bytes, &span));
    *at = (CUdeviceptr)span->base;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes)
{
    FAULT(cuMemAlloc_v2, bytes);
    return alloc(SPAN_DEVICE, at, bytes);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *at, size_t bytes, unsigned flags)
{
    FAULT(cuMemAllocManaged, bytes);
    CHECK(flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST, CUDA_ERROR_INVALID_VALUE);
    return alloc(SPAN_MANAGED, at, bytes);
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *at, size_t *pitch, size_t width, size_t height, unsigned element)
{
    CHECK(pitch != NULL && width > 0 && height > 0, CUDA_ERROR_INVALID_VALUE);
    CHECK(element == 4 || element == 8 || element == 16, CUDA_ERROR_INVALID_VALUE);
    const size_t row = rounded(width, GRAIN);
    CHECK(row >= width && row <= SIZE_MAX / height, CUDA_ERROR_INVALID_VALUE);
    TRY(alloc(SPAN_DEVICE, at, row * height));
    *pitch = row;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr at)
{
    FAULT(cuMemFree_v2, 0);
    CUcontext ctx;
    TRY(current(&ctx));
    if (at == 0)
        return CUDA_SUCCESS;
    work_wait(ctx->device, atomic_load(&ctx->done_ns)); /* the real one waits for the device, too */
    TRY(sticky(ctx->device));
    lock();
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    struct span *span = span_find((uintptr_t)at);
    if (span != NULL && span->base == (uintptr_t)at) {
        if (span->kind == SPAN_POOL || (span->kind == SPAN_GRAPH && span->usable)) {
            rc = pool_free(span);
        } else if (span->kind == SPAN_DEVICE || span->kind == SPAN_MANAGED || (span->kind == SPAN_IPC && span->pool != NULL)) {
            memory_gone(span);
            rc = CUDA_SUCCESS;
        }
    }
    unlock();
    return rc;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    FAULT(cuMemGetInfo_v2, 0);
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(free_bytes != NULL && total != NULL, CUDA_ERROR_INVALID_VALUE);
    const uint64_t limit = unit_of(ctx->device)->limit_bytes;
    const uint64_t used = page_unit_used(cuda.client.page, cuda.device[ctx->device].unit);
    *total = limit;
    *free_bytes = used < limit ? limit - used : 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr at)
{
    CUcontext ctx;
    TRY(current(&ctx));
    lock();
    const struct span *span = span_find((uintptr_t)at);
    const bool found = span != NULL && span->kind != SPAN_HOST && span->kind != SPAN_REGISTERED;
    if (found && base != NULL)
        *base = (CUdeviceptr)span->base;
    if (found && bytes != NULL)
        *bytes = span->bytes;
    unlock();
    return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* The API of CUDA 3.1, whose pointers and sizes had 32 bits, is exported by every driver since, and refuses the contexts of
 * today (measured, driver 580). */
static CUresult too_old(void)
{
    TRY(ready());
    return CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *at, unsigned bytes)
{
    (void)at, (void)bytes;
    return too_old();
}

EXPORT CUresult cuMemAllocPitch(CUdeviceptr_v1 *at, unsigned *pitch, unsigned width, unsigned height, unsigned element)
{
    (void)at, (void)pitch, (void)width, (void)height, (void)element;
    return too_old();
}

EXPORT CUresult cuMemFree(CUdeviceptr_v1 at)
{
    (void)at;
    return too_old();
}

EXPORT CUresult cuMemGetInfo(unsigned *free_bytes, unsigned *total)
{
    (void)free_bytes, (void)total;
    return too_old();
}
