/* memory.c - device memory by cuMemAlloc and its kin.
 *
 * The GPU loses pages of 2 MiB, as a real one does: small requests share them, larger ones have their own.
 * Managed memory shares none with plain memory, and is counted at the call. The addresses come from the arena (arena.c).
 */
#include "internal.h"
#include "calls.h"

#include <stdlib.h>

/* What small requests lose on the GPU: 2 MiB blocks, shared by best fit.
 *
 * Measured (H200, driver 580.159.04; bench/granularity). Sizes are multiples of 512 bytes. A request of 2 MiB or more has
 * pages of its own. A smaller one takes the start of the smallest free range that fits; of several equal ones, the range
 * that has had its extent for longest. Only if none fits, a new block is allocated, and a block is freed with its last request.
 *
 * This is written from the measurements alone and shares nothing with the library's account of the same pages: a mistake
 * in one of them shows as a difference.
 */
struct range {
    struct physical *block;
    uint64_t at, bytes; /* in the block */
    struct range *next;
};

static void append(struct range **list, struct range *range)
{
    while (*list != NULL)
        list = &(*list)->next;
    range->next = NULL;
    *list = range;
}

/* Takes it off the list; NULL: none fits. */
static struct range *best_fit(struct range **list, uint64_t bytes)
{
    struct range **best = NULL;
    for (; *list != NULL; list = &(*list)->next)
        if ((*list)->bytes >= bytes && (best == NULL || (*list)->bytes < (*best)->bytes))
            best = list;
    struct range *found = best != NULL ? *best : NULL;
    if (found != NULL)
        *best = found->next;
    return found;
}

static struct range *block_new(int device, bool managed)
{
    struct range *range = calloc(1, sizeof *range);
    struct physical *block = range != NULL ? physical_new(device, BLOCK_BYTES, BLOCK_BYTES, managed) : NULL;
    if (block == NULL) {
        free(range);
        return NULL;
    }
    *range = (struct range){.block = block, .bytes = BLOCK_BYTES};
    return range;
}

/* A range of one of the blocks behind that list, which is at `at` there. NULL: the GPU is full. */
static struct physical *range_take(struct range **list, int device, bool managed, uint64_t bytes, uint64_t *at)
{
    struct range *range = best_fit(list, bytes);
    if (range == NULL)
        range = block_new(device, managed);
    CHECK(range != NULL, NULL);
    struct physical *block = range->block;
    *at = range->at;
    range->at += bytes;
    range->bytes -= bytes;
    if (range->bytes > 0)
        append(list, range);
    else
        free(range);
    return block;
}

static void range_give(struct range **list, struct physical *block, uint64_t at, uint64_t bytes)
{
    struct range *whole = NULL;
    for (struct range **link = list, *other = *link; other != NULL; other = *link) {
        const bool below = other->at + other->bytes == at, above = at + bytes == other->at;
        if (other->block != block || !(below || above)) {
            link = &other->next;
            continue;
        }
        at = below ? other->at : at;
        bytes += other->bytes;
        *link = other->next;
        free(whole);
        whole = other;
    }
    if (bytes < BLOCK_BYTES && whole == NULL)
        whole = malloc(sizeof *whole);
    if (bytes == BLOCK_BYTES) {
        physical_drop(block);
        free(whole);
    } else if (whole != NULL) { /* else there is no memory to remember it: the block stays taken */
        *whole = (struct range){.block = block, .at = at, .bytes = bytes};
        append(list, whole);
    }
}

/* Memory of all kinds. */

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
    CHECK(atomic_load(&gpu_of(span.device)->lost) == 0, CUDA_ERROR_DEVICE_UNAVAILABLE);
    SCOPED tables = locked(&cuda.lock);
    span.capacity = rounded(span.bytes, GRAIN);
    if (span.pages >= PAGES_LINEAR && span.capacity < BLOCK_BYTES) {
        span.physical = range_take(&span.ctx->free[span.pages], span.device, span.kind == SPAN_MANAGED, span.capacity, &at);
    } else {
        span.physical = physical_new(span.device, span.bytes, span.pages == PAGES_POOL ? 0 : rounded(span.bytes, BLOCK_BYTES), span.kind == SPAN_MANAGED);
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
        arena_wipe(span->offset, span->capacity);
    range_give(&span->ctx->free[span->pages], span->physical, span->offset - span->physical->offset, span->capacity);
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

CUresult owned_free(struct owned *owned)
{
    SCOPED tables = locked(&cuda.lock);
    return owned->span != NULL && owner_lives(owned) ? span_gone(&cuda.spans, owned->span) : CUDA_SUCCESS;
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
    SCOPED tables = locked(&cuda.lock);
    struct span *span = span_from(at, kinds | SPAN_POOL | SPAN_GRAPH | SPAN_IPC);
    CHECK(span != NULL, CUDA_ERROR_INVALID_VALUE);
    CHECK(span->kind != SPAN_IPC || span->pool != NULL, CUDA_ERROR_INVALID_VALUE); /* else cuIpcCloseMemHandle's */
    CHECK(span->kind != SPAN_GRAPH || span->usable, CUDA_ERROR_INVALID_VALUE);
    if (span->kind == SPAN_POOL || span->kind == SPAN_GRAPH)
        pool_less(span->pool, span->bytes);
    span->usable = false;
    return span->kind != SPAN_GRAPH ? span_gone(&cuda.spans, span) : CUDA_SUCCESS; /* its address stays the graph's */
}

CUresult free_behind(CUstream stream, CUdeviceptr at)
{
    if (!jobs_before(stream))
        return memory_free(at, SPAN_DEVICE);
    CHECK(span_from(at, SPAN_DEVICE | SPAN_POOL | SPAN_GRAPH | SPAN_IPC) != NULL, CUDA_ERROR_INVALID_VALUE);
    return job_submit(stream, &(struct job){.kind = JOB_FREE, .area.at = at});
}

#include "memory.def"
