/* swap.c - exchanging the memory behind blocks: see elastic.h.
 *
 *   RESIDENT -choose-> CHOSEN -unmap-> AWAY -make-> MADE -filled-> RESIDENT
 *                        └─ stay ─> RESIDENT    └─ unmake ─> AWAY
 *
 * Only the thread that swaps moves a block out of RESIDENT, and while one is out its region is not released. So the block's own fields may be
 * read without the lock, which is not held while the driver is called. A program's thread may allocate and free in such a region: that
 * changes ranges, not blocks.
 */
#include "process.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

static struct elastic *const elastic = &tangram.elastic;

struct elastic_totals elastic_totals(struct gpu *gpu)
{
    return (struct elastic_totals){.bytes = atomic_load(&gpu->elastic_bytes), .away = atomic_load(&gpu->away_bytes)};
}

bool elastic_is_away(void)
{
    for (unsigned i = 0; i < tangram.grant.gpus; i++)
        if (atomic_load(&tangram.grant.gpu[i].away_bytes) > 0)
            return true;
    return false;
}

bool elastic_is_moving(void)
{
    return atomic_load(&elastic->moving) > 0;
}

bool elastic_look(struct gpu *gpu, uint64_t id, enum block_state *state, uint64_t *bytes)
{
    lock_acquire(&elastic->lock);
    const struct elastic_block *block = block_of(id);
    const bool there = block != NULL && block->region->gpu == gpu;
    if (there) {
        *state = block->state;
        *bytes = block->bytes;
    }
    lock_release(&elastic->lock);
    return there;
}

void block_move(struct elastic_block *block, enum block_state state)
{
    struct elastic_region *region = block->region;
    const unsigned more = (unsigned)(state != BLOCK_RESIDENT) - (unsigned)(block->state != BLOCK_RESIDENT);
    region->moving += more;
    atomic_fetch_add(&elastic->moving, more);
    block->state = state;
}

/* The block, if it is in that state. */
static struct elastic_block *find(uint64_t id, enum block_state state)
{
    lock_acquire(&elastic->lock);
    struct elastic_block *block = block_of(id);
    if (block != NULL && block->state != state)
        block = NULL;
    lock_release(&elastic->lock);
    return block;
}

static void set(struct elastic_block *block, enum block_state state)
{
    lock_acquire(&elastic->lock);
    block_move(block, state);
    lock_release(&elastic->lock);
}

/* Larger ones first: they cost least a byte. Of equal ones the older. */
static int by_size(const void *one, const void *other)
{
    const struct elastic_choice *a = one, *b = other;
    if (a->bytes != b->bytes)
        return a->bytes < b->bytes ? 1 : -1;
    return (a->id > b->id) - (a->id < b->id);
}

/* What may be chosen, in a list that is to be freed. */
static size_t candidates(const struct gpu *gpu, struct elastic_choice **list)
{
    size_t count = 0;
    lock_acquire(&elastic->lock);
    *list = malloc(elastic->blocks * sizeof **list + 1);
    for (size_t i = 0; i < elastic->blocks && *list != NULL; i++) {
        const struct elastic_block *block = elastic->block[i];
        if (block->region->gpu == gpu && block->region->live > 0 && !block->region->ipc.resident && block->state == BLOCK_RESIDENT)
            (*list)[count++] = (struct elastic_choice){block->id, block->bytes};
    }
    lock_release(&elastic->lock);
    return count;
}

/* It may have been released since it was listed. */
static bool choose(uint64_t id)
{
    lock_acquire(&elastic->lock);
    struct elastic_block *block = block_of(id);
    const bool there = block != NULL && block->state == BLOCK_RESIDENT && !block->region->ipc.resident;
    if (there)
        block_move(block, BLOCK_CHOSEN);
    lock_release(&elastic->lock);
    return there;
}

/* Sorted: all that fit into what is missing, from the largest on; then the smallest of the others, which makes up the rest, and without those
 * that are not needed beside it. What is picked is moved to the front; their number. */
static size_t pick(struct elastic_choice *list, size_t count, uint64_t bytes)
{
    size_t picked = 0, last = count, kept = 0;
    uint64_t left = bytes;
    for (size_t i = 0; i < count && left > 0; i++)
        if (list[i].bytes > left) {
            last = i; /* the smallest of them, in the end */
        } else {
            left -= list[i].bytes;
            const struct elastic_choice one = list[i];
            memmove(&list[picked + 1], &list[picked], (i - picked) * sizeof *list);
            list[picked++] = one;
            last += last < count;
        }
    if (left == 0 || last == count)
        return picked;
    const struct elastic_choice rest = list[last];
    uint64_t more = rest.bytes - left;
    for (size_t i = 0; i < picked; i++)
        if (list[i].bytes <= more)
            more -= list[i].bytes;
        else
            list[kept++] = list[i];
    list[kept++] = rest;
    return kept;
}

size_t elastic_choose(struct gpu *gpu, uint64_t bytes, struct elastic_choice *out, size_t most)
{
    struct elastic_choice *list;
    size_t count = candidates(gpu, &list), chosen = 0;
    if (list == NULL)
        return 0;
    qsort(list, count, sizeof *list, by_size);
    count = pick(list, count, bytes);
    for (size_t i = 0; i < count && chosen < most; i++)
        if (choose(list[i].id))
            out[chosen++] = list[i];
    free(list);
    return chosen;
}

void elastic_stay(struct gpu *gpu)
{
    lock_acquire(&elastic->lock);
    for (size_t i = 0; i < elastic->blocks; i++)
        if (elastic->block[i]->region->gpu == gpu && elastic->block[i]->state == BLOCK_CHOSEN)
            block_move(elastic->block[i], BLOCK_RESIDENT);
    lock_release(&elastic->lock);
    created_settle();
}

bool elastic_stay_block(uint64_t id)
{
    struct elastic_block *block = find(id, BLOCK_CHOSEN);
    if (block != NULL)
        set(block, BLOCK_RESIDENT);
    created_settle();
    return block != NULL;
}

int elastic_export(uint64_t id)
{
    struct elastic_block *block = find(id, BLOCK_CHOSEN);
    int fd = -1;
    if (block == NULL)
        block = find(id, BLOCK_MADE);
    if (block == NULL ||
        tangram.driver.cuMemExportToShareableHandle(&fd, block->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS)
        return -1;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    return fd;
}

/* Whoever opens blocks to other GPUs finds it mapped or away. */
static bool unmap(struct elastic_block *block, bool *released)
{
    struct peers_held held = peers_enter();
    const bool unmapped = tangram.driver.cuMemUnmap(block->at, block->bytes) == CUDA_SUCCESS;
    if (unmapped) {
        *released = tangram.driver.cuMemRelease(block->handle) == CUDA_SUCCESS;
        block->leaked = block->leaked || !*released;
        set(block, BLOCK_AWAY);
    }
    peers_leave(held);
    return unmapped;
}

static bool make(struct elastic_block *block)
{
    if (block_make(block, block->region->device) != CUDA_SUCCESS)
        return false;
    if (block_open(block->region, block->at, block->bytes) == CUDA_SUCCESS)
        return true;
    tangram.driver.cuMemUnmap(block->at, block->bytes);
    tangram.driver.cuMemRelease(block->handle);
    return false;
}

/* A block that was unmapped and not released has its memory still: it stays charged, and counts as away. */
bool elastic_unmap(uint64_t id)
{
    struct elastic_block *block = find(id, BLOCK_CHOSEN);
    if (block != NULL && block->region->created != NULL)
        return created_swap_out(block);
    if (block == NULL)
        return false;
    atomic_fetch_add(&block->region->gpu->away_bytes, block->bytes);
    bool released = false;
    if (!unmap(block, &released)) {
        atomic_fetch_sub(&block->region->gpu->away_bytes, block->bytes);
        return false;
    }
    return released;
}

bool elastic_make(uint64_t id)
{
    struct elastic_block *block = find(id, BLOCK_AWAY);
    if (block != NULL && block->region->created != NULL)
        return created_swap_in(block);
    if (block == NULL)
        return false;
    struct peers_held held = peers_enter();
    const bool made = make(block);
    if (made)
        set(block, BLOCK_MADE);
    peers_leave(held);
    return made;
}

bool elastic_unmake(uint64_t id)
{
    struct elastic_block *block = find(id, BLOCK_MADE);
    if (block != NULL && block->region->created != NULL)
        return created_swap_undo(block);
    bool released = false;
    return block != NULL && unmap(block, &released) && released;
}

bool elastic_filled(uint64_t id)
{
    struct elastic_block *block = find(id, BLOCK_MADE);
    if (block == NULL)
        return false;
    atomic_fetch_sub(&block->region->gpu->away_bytes, block->bytes);
    set(block, BLOCK_RESIDENT);
    created_settle();
    return true;
}
