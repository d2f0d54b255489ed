/* arena.c - the memory of all GPUs: this process's region of the sparse file behind the page, mapped once.
 *
 * A GPU's worth costs nothing until it is written, values survive, and a piece of it can be lent to another process by
 * its offset.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>

#define ARENA_LEAST (ARENA_BYTES < (uint64_t)256 << 30 ? ARENA_BYTES : (uint64_t)256 << 30) /* where the address space allows no more, as under a sanitizer */

void *addresses_take(uint64_t bytes, uint64_t align)
{
    char *reserved = mmap(NULL, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(reserved != MAP_FAILED, MAP_FAILED);
    char *at = (char *)rounded((uintptr_t)reserved, align);
    munmap(reserved, (size_t)(at - reserved));
    munmap(at + bytes, (size_t)(reserved + align - at));
    return at;
}

bool arena_map(uintptr_t at, uint64_t bytes, int access, uint64_t offset)
{
    return mmap((void *)at, bytes, access, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, cuda.client.page_fd, (off_t)offset) != MAP_FAILED;
}

/* On a block's boundary, so that the block follows from an address. */
static bool arena_open(void)
{
    cuda.arena_fd = fcntl(cuda.client.page_fd, F_DUPFD_CLOEXEC, 0); /* without a free descriptor there is no memory */
    CHECK(cuda.arena_fd >= 0, false);
    const uint32_t region = atomic_fetch_add(&cuda.client.page->regions, 1) + 1;
    char *at = MAP_FAILED;
    CHECK(region < FAKE_REGIONS, false);
    cuda.client.page->slot[cuda.client.slot].region = region;
    cuda.arena_start = region * FAKE_REGION_BYTES;
    for (cuda.arena_bytes = ARENA_BYTES; cuda.arena_bytes >= ARENA_LEAST && at == MAP_FAILED; cuda.arena_bytes /= 2)
        at = addresses_take(cuda.arena_bytes, BLOCK_BYTES);
    cuda.arena_bytes *= 2; /* of what was found */
    cuda.arena = at != MAP_FAILED && arena_map((uintptr_t)at, cuda.arena_bytes, PROT_READ | PROT_WRITE, cuda.arena_start) ? at : NULL;
    return cuda.arena != NULL;
}

uintptr_t arena_at(uint64_t offset)
{
    return (uintptr_t)cuda.arena + (offset - cuda.arena_start);
}

/* Eight classes to each power of two from 4 KiB: at most an eighth of the address space is wasted. */
static unsigned class_of(uint64_t bytes, uint64_t *capacity)
{
    const unsigned top = 63u - (unsigned)__builtin_clzll(bytes);
    const unsigned shift = top > 12 ? top - 3 : 9;
    *capacity = rounded(bytes, (uint64_t)1 << shift);
    const unsigned steps = (unsigned)(*capacity >> shift);
    return top > 12 ? (top - 11) * 8 + steps + 8 : steps - 1;
}

/* A freed range of the arena, or a new one. */
static struct physical *physical_take(uint64_t bytes)
{
    CHECK(cuda.arena != NULL || arena_open(), NULL);
    const uint64_t align = bytes >= BLOCK_BYTES / 2 ? BLOCK_BYTES : GRAIN;
    uint64_t capacity, offset = cuda.arena_start + rounded(cuda.arena_used, align);
    const unsigned class = class_of(rounded(bytes, align), &capacity);
    struct physical *physical = cuda.arena_free[class];
    if (physical != NULL && physical->offset % align == 0) {
        cuda.arena_free[class] = physical->next_free;
        offset = physical->offset;
    } else {
        CHECK(offset + capacity <= cuda.arena_start + cuda.arena_bytes, NULL);
        CHECK(MAKE(&physical, HANDLE_PHYSICAL, physical, .users = 1) == CUDA_SUCCESS, NULL);
        cuda.arena_used = offset + capacity - cuda.arena_start;
    }
    *physical = (struct physical){.handle.kind = HANDLE_PHYSICAL, .offset = offset, .capacity = capacity, .class = class, .users = 1};
    return physical;
}

struct physical *physical_new(int device, uint64_t bytes, uint64_t charged, bool managed)
{
    CHECK(bytes > 0 && bytes <= ARENA_BYTES / 2 && take(device, charged, managed), NULL);
    SCOPED tables = locked(&cuda.lock);
    struct physical *physical = physical_take(bytes);
    if (physical == NULL) {
        give(device, charged, managed);
        return NULL;
    }
    physical->device = device;
    physical->charged = charged;
    physical->managed = managed;
    physical->touched = arena_dirty(physical->offset, bytes);
    return physical;
}

void physical_drop(struct physical *physical)
{
    SCOPED tables = locked(&cuda.lock);
    bool last = true;
    if (--physical->users > 0)
        return;
    if (physical->object != 0) {
        client_catch_up(&cuda.client);
        last = object_release(cuda.client.page, cuda.client.slot, physical->object);
    } else {
        give(physical->device, physical->charged, physical->managed);
    }
    if (last && (physical->touched || physical->object != 0)) /* others may have written there */
        file_wipe(cuda.client.page_fd, physical->offset, physical->capacity);
    if (!last || physical->imported) { /* these addresses of its maker's are never used again */
        handle_free(physical);
        return;
    }
    physical->handle.kind = HANDLE_DEAD;
    physical->next_free = cuda.arena_free[physical->class];
    cuda.arena_free[physical->class] = physical;
}

void arena_wipe(uint64_t offset, uint64_t bytes)
{
    file_wipe(cuda.arena_fd, offset, bytes);
}

/* As a GPU that is not wiped between its containers: TANGRAM_FAKE_DIRTY=1. */
bool arena_dirty(uint64_t offset, uint64_t bytes)
{
    CHECK(getenv("TANGRAM_FAKE_DIRTY") != NULL, false);
    memset((void *)arena_at(offset), 0xa5, bytes < 4096 ? bytes : 4096);
    return true;
}
