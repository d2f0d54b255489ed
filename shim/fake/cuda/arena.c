/* arena.c - the memory of all cards: address space in one sparse memfd, mapped once.
 *
 * A card's worth costs nothing until it is written, values survive, and a piece of it can be lent to another process by
 * descriptor and offset.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define ARENA_LEAST ((uint64_t)256 << 30) /* where there is no room for more, as under a sanitizer */

void *addresses_take(uint64_t bytes, uint64_t align)
{
    char *room = mmap(NULL, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(room != MAP_FAILED, MAP_FAILED);
    char *at = (char *)rounded((uintptr_t)room, align);
    munmap(room, (size_t)(at - room));
    munmap(at + bytes, (size_t)(room + align - at));
    return at;
}

/* On a block's boundary, so that an address tells the block. */
static void *map_aligned(uint64_t bytes)
{
    void *at = addresses_take(bytes, BLOCK_BYTES);
    CHECK(at != MAP_FAILED, MAP_FAILED);
    return mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, cuda.arena_fd, 0);
}

static bool arena_open(void)
{
    cuda.arena_fd = new_memfd("fake-gpu-memory");
    CHECK(cuda.arena_fd >= 0 && ftruncate(cuda.arena_fd, (off_t)ARENA_BYTES) == 0, false);
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

/* A room of the arena that is free again, or a new one. */
static struct physical *room_take(uint64_t bytes)
{
    CHECK(cuda.arena != NULL || arena_open(), NULL);
    const uint64_t align = bytes >= BLOCK_BYTES / 2 ? BLOCK_BYTES : GRAIN;
    uint64_t room, offset = rounded(cuda.arena_used, align);
    const unsigned class = class_of(rounded(bytes, align), &room);
    struct physical *physical = cuda.arena_free[class];
    if (physical != NULL && physical->offset % align == 0) {
        cuda.arena_free[class] = physical->next_free;
        offset = physical->offset;
    } else {
        CHECK(offset + room <= cuda.arena_bytes, NULL);
        CHECK(handle_new(&physical, HANDLE_PHYSICAL, sizeof *physical) == CUDA_SUCCESS, NULL);
        cuda.arena_used = offset + room;
    }
    *physical = (struct physical){.handle.kind = HANDLE_PHYSICAL, .fd = -1, .offset = offset, .room = room, .class = class, .users = 1};
    return physical;
}

struct physical *physical_new(int device, uint64_t bytes, uint64_t charged)
{
    CHECK(bytes > 0 && bytes <= ARENA_BYTES / 2 && take(device, charged), NULL);
    SCOPED tables = hold(&cuda.lock);
    struct physical *physical = room_take(bytes);
    if (physical == NULL) {
        give(device, charged);
        return NULL;
    }
    physical->device = device;
    physical->charged = charged;
    physical->touched = arena_dirty(physical->offset, bytes);
    return physical;
}

void physical_drop(struct physical *physical)
{
    SCOPED tables = hold(&cuda.lock);
    if (--physical->users > 0)
        return;
    if (physical->object == 0)
        give(physical->device, physical->charged);
    else
        object_release(physical->object); /* the daemon gives it back when the last process lets go */
    if (physical->fd >= 0)
        close(physical->fd);
    if (physical->object != 0) { /* somebody else may still read these pages: never use them again */
        handle_free(physical);
        return;
    }
    if (physical->touched)
        arena_wipe(physical->offset, physical->room);
    physical->handle.kind = HANDLE_DEAD;
    physical->next_free = cuda.arena_free[physical->class];
    cuda.arena_free[physical->class] = physical;
}

void arena_wipe(uint64_t offset, uint64_t bytes)
{
    fallocate(cuda.arena_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes);
}

/* As a card that is not wiped between its tenants: TANGRAM_FAKE_DIRTY=1. */
bool arena_dirty(uint64_t offset, uint64_t bytes)
{
    CHECK(getenv("TANGRAM_FAKE_DIRTY") != NULL, false);
    memset(cuda.arena + offset, 0xa5, bytes < 4096 ? bytes : 4096);
    return true;
}
