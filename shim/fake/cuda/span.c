/* span.c - which addresses are whose. */
#define _GNU_SOURCE
#include "internal.h"

#include <search.h>
#include <stdlib.h>
#include <sys/mman.h>

/* Ranges that overlap compare equal, so an address finds its range. */
static int by_address(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    if (x->base + x->bytes <= y->base)
        return -1;
    return y->base + y->bytes <= x->base;
}

struct span *span_new(void **tree, const struct span *like)
{
    struct span *span = malloc(sizeof *span);
    CHECK(span != NULL, NULL);
    *span = *like;
    SCOPED tables = locked(&cuda.lock);
    void *const *at = tsearch(span, tree, by_address);
    if (at == NULL || *(struct span *const *)at != span) {
        free(span);
        return NULL;
    }
    span->id = ++cuda.ids;
    return span;
}

static void unmap(const struct span *span)
{
    if (span->kind == SPAN_MAPPED) /* its addresses stay reserved */
        mmap((void *)span->base, span->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    else if (span->kind == SPAN_IPC || span->kind == SPAN_HOST)
        munmap((void *)(span->base & ~(uintptr_t)4095), span->capacity);
}

CUresult span_gone(void **tree, struct span *span)
{
    SCOPED tables = locked(&cuda.lock);
    SCOPED step = locked(&cuda.step);
    tdelete(span, tree, by_address);
    unmap(span);
    if (span->physical != NULL)
        memory_gone(span);
    free(span);
    return CUDA_SUCCESS;
}

struct span *span_in(void **tree, uintptr_t at)
{
    SCOPED tables = locked(&cuda.lock);
    const struct span key = {.base = at, .bytes = 1};
    void *const *found = tfind(&key, tree, by_address);
    return found == NULL ? NULL : *(struct span *const *)found;
}

CUresult span_get(CUdeviceptr at, unsigned kinds, CUresult otherwise, struct span **span)
{
    *span = span_find((uintptr_t)at);
    return *span != NULL && ((*span)->kind & kinds) != 0 ? CUDA_SUCCESS : otherwise;
}

struct span *span_from(CUdeviceptr at, unsigned kinds)
{
    struct span *span;
    return span_get(at, kinds, CUDA_ERROR_INVALID_VALUE, &span) == CUDA_SUCCESS && span->base == (uintptr_t)at ? span : NULL;
}

CUresult span_end(CUdeviceptr at, unsigned kinds, CUresult otherwise)
{
    CUcontext ctx;
    TRY(current(&ctx));
    SCOPED tables = locked(&cuda.lock);
    struct span *span = span_from(at, kinds);
    CHECK(span != NULL, otherwise);
    CHECK(span->opens == 0, (span->opens--, CUDA_SUCCESS));
    return span_gone(&cuda.spans, span);
}

static bool (*walk_is)(const struct span *, const void *); /* the same, for span_such */
static const void *walk_what;
static struct span *walk_found;

static void look_for(const void *node, VISIT visit, int level)
{
    struct span *span = *(struct span *const *)node;
    (void)level;
    if ((visit == postorder || visit == leaf) && walk_is(span, walk_what))
        walk_found = span;
}

struct span *span_such(bool (*is)(const struct span *, const void *), const void *what)
{
    SCOPED tables = locked(&cuda.lock);
    walk_is = is;
    walk_what = what;
    walk_found = NULL;
    twalk(cuda.spans, look_for);
    return walk_found;
}

static CUcontext walk_ctx; /* twalk has no closure; used under lock */
static struct span *walk_first;

static void collect(const void *node, VISIT visit, int level)
{
    struct span *span = *(struct span *const *)node;
    (void)level;
    if ((visit == postorder || visit == leaf) && span->ctx == walk_ctx &&
        (span->kind & (SPAN_DEVICE | SPAN_MANAGED | SPAN_IPC | SPAN_OWNED)) != 0) {
        span->next = walk_first;
        walk_first = span;
    }
}

void spans_of_context_gone(CUcontext ctx)
{
    SCOPED tables = locked(&cuda.lock);
    walk_ctx = ctx;
    walk_first = NULL;
    twalk(cuda.spans, collect);
    for (struct span *span = walk_first, *next; span != NULL; span = next) {
        next = span->next;
        span_gone(&cuda.spans, span);
    }
}

/* Maps that follow each other are one range; nothing else is. */
static bool covers(uintptr_t at, size_t bytes, CUcontext ctx, bool copies, bool touch)
{
    SCOPED tables = locked(&cuda.lock);
    for (size_t left = bytes, inside; left > 0; left -= inside, at += inside) {
        struct span *span = span_find(at);
        CHECK(span != NULL && (ctx == NULL || span_open_to(span, ctx, copies)), false);
        inside = span->base + span->bytes - at;
        inside = inside < left ? inside : left;
        CHECK(inside == left || span->kind == SPAN_MAPPED, false);
        span->touched |= touch;
        if (touch && span->physical != NULL)
            span->physical->touched = true;
    }
    return true;
}

bool span_covers(CUdeviceptr at, size_t bytes, CUcontext ctx, bool copies)
{
    return covers((uintptr_t)at, bytes, ctx, copies, false);
}

bool span_touch(CUdeviceptr at, size_t bytes, CUcontext ctx, bool copies)
{
    return covers((uintptr_t)at, bytes, ctx, copies, true);
}
