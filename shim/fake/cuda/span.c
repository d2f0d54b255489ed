/* span.c - which addresses are whose, and the arena behind them.
 *
 * Device memory is address space in one sparse memfd, mapped once: a card's worth costs nothing until it is written, values
 * survive, and a piece of it can be lent to another process by descriptor and offset.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <fcntl.h>
#include <search.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Ranges that overlap compare equal, so an address finds its range. */
static int by_address(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    if (x->base + x->bytes <= y->base)
        return -1;
    return y->base + y->bytes <= x->base;
}

struct span *span_find(uintptr_t at)
{
    const struct span key = {.base = at, .bytes = 1};
    void *const *found = tfind(&key, &cuda.spans, by_address);
    return found == NULL ? NULL : *(struct span *const *)found;
}

bool span_insert(struct span *span)
{
    void *const *at = tsearch(span, &cuda.spans, by_address);
    if (at == NULL || *(struct span *const *)at != span)
        return false;
    span->id = ++cuda.ids;
    return true;
}

void span_remove(struct span *span)
{
    tdelete(span, &cuda.spans, by_address);
}

/* On a block's boundary, so that an address tells the block. */
static void *map_aligned(uint64_t bytes)
{
    void *room = mmap(NULL, bytes + BLOCK_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
        return MAP_FAILED;
    void *at = (void *)rounded((uintptr_t)room, BLOCK_BYTES);
    return mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, cuda.arena_fd, 0);
}

static bool arena_open(void)
{
    cuda.arena_fd = new_memfd("fake-gpu-memory");
    if (cuda.arena_fd < 0 || ftruncate(cuda.arena_fd, (off_t)ARENA_BYTES) != 0)
        return false;
    void *at = MAP_FAILED;
    for (uint64_t bytes = ARENA_BYTES; at == MAP_FAILED && bytes >= ARENA_LEAST; bytes /= 2) {
        at = map_aligned(bytes);
        cuda.arena_bytes = bytes;
    }
    cuda.arena = at == MAP_FAILED ? NULL : at;
    return cuda.arena != NULL;
}

/* Eight classes to each power of two from 4 KiB: at most an eighth of the address space is wasted. */
static unsigned class_of(uint64_t bytes, uint64_t *room)
{
    const unsigned top = 63u - (unsigned)__builtin_clzll(bytes);
    const unsigned shift = top > 12 ? top - 3 : 9;
    *room = rounded(bytes, (uint64_t)1 << shift);
    const unsigned steps = (unsigned)(*room >> shift);
    return top > 12 ? (top - 11) * 8 + steps + 8 : steps - 1;
}

/* As a card that is not wiped between its tenants: TANGRAM_FAKE_DIRTY=1 leaves somebody's bytes at the start of all new memory. */
static void leave_dirt(struct span *span)
{
    if (getenv("TANGRAM_FAKE_DIRTY") == NULL)
        return;
    memset(cuda.arena + span->offset, 0xa5, span->bytes < 4096 ? span->bytes : 4096);
    span->touched = true;
}

struct span *arena_take(size_t bytes, size_t align)
{
    if (cuda.arena == NULL && !arena_open())
        return NULL;
    if (bytes == 0 || bytes > ARENA_BYTES / 2)
        return NULL;
    uint64_t room;
    const unsigned class = class_of(rounded(bytes, align), &room);
    struct span *span = class < ARENA_CLASSES ? cuda.arena_free[class] : NULL;
    if (span != NULL && (span->offset & (align - 1)) == 0) {
        cuda.arena_free[class] = span->next_free;
        *span = (struct span){.offset = span->offset, .room = span->room, .class = class};
    } else {
        const uint64_t offset = rounded(cuda.arena_used, align > 512 ? align : 512);
        span = offset + room <= cuda.arena_bytes ? calloc(1, sizeof *span) : NULL;
        if (span == NULL)
            return NULL;
        cuda.arena_used = offset + room;
        span->offset = offset;
        span->room = room;
        span->class = class;
    }
    span->bytes = bytes;
    arena_fill(span);
    return span;
}

void arena_fill(struct span *span)
{
    span->base = (uintptr_t)cuda.arena + span->offset;
    leave_dirt(span);
}

void arena_wipe(const struct span *span)
{
    if (span->touched)
        fallocate(cuda.arena_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)span->offset, (off_t)span->room);
}

void arena_give(struct span *span)
{
    arena_wipe(span);
    if (span->class >= ARENA_CLASSES) {
        free(span);
        return;
    }
    span->next_free = cuda.arena_free[span->class];
    cuda.arena_free[span->class] = span;
}

static bool covers(CUdeviceptr at, size_t bytes, bool write)
{
    lock();
    struct span *span = span_find((uintptr_t)at);
    const bool good = span != NULL && (span->kind != SPAN_MAPPED || span->usable) && bytes <= span->base + span->bytes - (uintptr_t)at;
    if (good && write)
        span->touched = true;
    unlock();
    return good;
}

bool span_touch(CUdeviceptr at, size_t bytes)
{
    return covers(at, bytes, true);
}

bool span_covers(CUdeviceptr at, size_t bytes)
{
    return covers(at, bytes, false);
}
