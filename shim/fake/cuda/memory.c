/* memory.c - device memory by cuMemAlloc and its kin.
 *
 * The card loses pages of 2 MiB, as a real one does: small requests share them (pages.c), larger ones have their own.
 * Managed memory shares none with plain memory, and is counted at the call. The addresses come from the arena (arena.c).
 */
#include "internal.h"
#include "calls.h"

bool take(int device, uint64_t bytes)
{
    return page_take(cuda.client.page, cuda.client.slot, cuda.device[device].unit, bytes);
}

void give(int device, uint64_t bytes)
{
    page_give(cuda.client.page, cuda.client.slot, cuda.device[device].unit, bytes);
}

static size_t left_on(int device)
{
    const uint64_t limit = unit_of(device)->limit_bytes, used = page_unit_used(cuda.client.page, cuda.device[device].unit);
    return used < limit ? limit - used : 0;
}

CUresult memory_new(const struct span *like, struct span **made)
{
    struct span span = *like;
    uint64_t at = 0;
    CHECK(span.bytes > 0, CUDA_ERROR_INVALID_VALUE);
    CHECK(span.bytes <= ARENA_BYTES / 2, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(atomic_load(&card_of(span.device)->lost) == 0, CUDA_ERROR_DEVICE_UNAVAILABLE);
    SCOPED tables = hold(&cuda.lock);
    span.room = rounded(span.bytes, GRAIN);
    if (span.pages >= PAGES_LINEAR && span.room < BLOCK_BYTES) {
        span.physical = range_take(&span.ctx->free[span.pages], span.device, span.room, &at);
    } else {
        span.physical = physical_new(span.device, span.bytes, span.pages == PAGES_POOL ? 0 : rounded(span.bytes, BLOCK_BYTES));
        span.pages = PAGES_OWN;
    }
    CHECK(span.physical != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    span.offset = span.physical->offset + at;
    span.base = arena_at(span.offset);
    span.touched = span.pages >= PAGES_LINEAR && arena_dirty(span.offset, span.bytes);
    *made = span_new(&cuda.spans, &span);
    if (*made == NULL)
        memory_gone(&span);
    return *made != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void memory_gone(const struct span *span)
{
    if (span->pages < PAGES_LINEAR) {
        physical_drop(span->physical);
        return;
    }
    if (span->touched)
        arena_wipe(span->offset, span->room);
    range_give(&span->ctx->free[span->pages], span->physical, span->offset - span->physical->offset, span->room);
}

CUresult memory_own(CUcontext ctx, enum span_kind kind, enum pages pages, size_t bytes, struct owned *owned)
{
    *owned = (struct owned){.ctx = ctx, .ctx_id = ctx->id};
    const struct span like = {.kind = kind, .ctx = ctx, .device = ctx->device, .pages = pages, .bytes = bytes};
    return bytes > 0 ? memory_new(&like, &owned->span) : CUDA_SUCCESS;
}

bool owner_lives(const struct owned *owned)
{
    return context_ok(owned->ctx) && owned->ctx->id == owned->ctx_id;
}

void owned_free(struct owned *owned)
{
    SCOPED tables = hold(&cuda.lock);
    if (owned->span != NULL && owner_lives(owned))
        span_gone(&cuda.spans, owned->span);
}

static CUresult alloc(enum span_kind kind, enum pages pages, CUdeviceptr *at, size_t bytes)
{
    CUcontext ctx;
    struct owned made;
    TRY(current(&ctx));
    CHECK(at != NULL && bytes > 0, CUDA_ERROR_INVALID_VALUE);
    TRY(memory_own(ctx, kind, pages, bytes, &made));
    *at = (CUdeviceptr)made.span->base;
    return CUDA_SUCCESS;
}

static CUresult alloc_rows(CUdeviceptr *at, size_t *pitch, size_t width, size_t height)
{
    const size_t row = rounded(width, GRAIN);
    CHECK(row >= width && row <= SIZE_MAX / height, CUDA_ERROR_INVALID_VALUE);
    TRY(alloc(SPAN_DEVICE, PAGES_LINEAR, at, row * height));
    *pitch = row;
    return CUDA_SUCCESS;
}

CUresult memory_free(CUdeviceptr at, unsigned kinds)
{
    SCOPED tables = hold(&cuda.lock);
    struct span *span = span_from(at, kinds | SPAN_POOL | SPAN_GRAPH | SPAN_IPC);
    CHECK(span != NULL, CUDA_ERROR_INVALID_VALUE);
    CHECK(span->kind != SPAN_IPC || span->pool != NULL, CUDA_ERROR_INVALID_VALUE); /* else cuIpcCloseMemHandle's */
    CHECK(span->kind != SPAN_GRAPH || span->usable, CUDA_ERROR_INVALID_VALUE);
    if (span->kind == SPAN_POOL || span->kind == SPAN_GRAPH)
        pool_less(span->pool, rounded(span->bytes, GRAIN));
    span->usable = false;
    if (span->kind != SPAN_GRAPH) /* its address stays the graph's */
        span_gone(&cuda.spans, span);
    return CUDA_SUCCESS;
}

#include "memory.def"
