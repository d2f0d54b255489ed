/* created_swap.c - exchanging the memory behind blocks of created.c: as swap.c does it, for a block that may have many mappings, or none.
 *
 * The program's own calls and these exclude each other (created_enter), so a block is away with exactly the mappings that its records have.
 */
#include "process.h"

static struct elastic *const elastic = &tangram.elastic;

static bool map_one(struct created_map *map, CUmemGenericAllocationHandle handle)
{
    CUmemAccessDesc list[PEER_DEVICES + 1];
    const unsigned count = access_list(map->of->region->device, map->access, &map->others, list);
    map->there = tangram.driver.cuMemMap(map->at, map->bytes, map->offset, handle, 0) == CUDA_SUCCESS;
    if (!map->there || count == 0 || tangram.driver.cuMemSetAccess(map->at, map->bytes, list, count) == CUDA_SUCCESS)
        return map->there;
    map->there = tangram.driver.cuMemUnmap(map->at, map->bytes) != CUDA_SUCCESS;
    return false;
}

/* All that are not there. False: some is not. */
static bool map_all(const struct created *created, CUmemGenericAllocationHandle handle)
{
    for (struct created_map *map = created->map; map != NULL; map = map->next)
        if (!map->there && !map_one(map, handle))
            return false;
    return true;
}

/* False: some is there still. */
static bool unmap_all(const struct created *created)
{
    for (struct created_map *map = created->map; map != NULL; map = map->next)
        if (map->there && (map->there = tangram.driver.cuMemUnmap(map->at, map->bytes) != CUDA_SUCCESS))
            return false;
    return true;
}

static void set(struct elastic_block *block, enum block_state state)
{
    lock_acquire(&elastic->lock);
    block_move(block, state);
    lock_release(&elastic->lock);
}

/* Its content is saved, or was never back. A block that is neither mapped whole nor unmapped whole must not be used: it is away, too, and keeps its
 * handle, for swap_in to map the rest again. False: it is as it was. */
static bool leave(struct elastic_block *block, bool *released)
{
    struct created *created = block->region->created;
    const bool unmapped = unmap_all(created);
    if (!unmapped && map_all(created, block->handle))
        return false;
    created->kept = !unmapped;
    *released = unmapped && tangram.driver.cuMemRelease(block->handle) == CUDA_SUCCESS;
    block->leaked = block->leaked || (unmapped && !*released);
    set(block, BLOCK_AWAY);
    return true;
}

/* As elastic_unmap. What the program let go, exported or mapped into an array since it was chosen is not away. */
bool created_swap_out(struct elastic_block *block)
{
    struct created *created = block->region->created, *ended = NULL;
    bool released = false;
    struct quiet quiet = created_enter();
    if (created->resident || created->staying || created_is_left(created)) {
        set(block, BLOCK_RESIDENT);
        created_end_all_left(&ended);
    } else if (leave(block, &released)) {
        atomic_fetch_add(&block->region->gpu->away_bytes, block->bytes);
    }
    created_leave(quiet, ended);
    return released;
}

/* Access that was set meanwhile. */
static bool open_kept(const struct created *created)
{
    bool good = true;
    for (const struct created_map *map = created->map; map != NULL && good; map = map->next) {
        CUmemAccessDesc list[PEER_DEVICES + 1];
        unsigned count = access_list(created->region->device, (CUmemAccess_flags)0, &map->others, list);
        list[count++] = (CUmemAccessDesc){.location = created->prop.location, .flags = map->access}; /* none may be new, too */
        good = !map->there || tangram.driver.cuMemSetAccess(map->at, map->bytes, list, count) == CUDA_SUCCESS;
    }
    return good;
}

static bool make(struct elastic_block *block)
{
    struct created *created = block->region->created;
    CUmemAllocationProp prop = created->prop;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (created->kept && !open_kept(created))
        return false;
    if (!created->kept && tangram.driver.cuMemCreate(&block->handle, block->bytes, &prop, 0) != CUDA_SUCCESS)
        return false;
    const bool mapped = map_all(created, block->handle);
    if (!mapped && !created->kept) {
        created->kept = !unmap_all(created);
        if (!created->kept)
            tangram.driver.cuMemRelease(block->handle);
    }
    created->kept = created->kept && !mapped;
    return mapped;
}

/* As elastic_make. */
bool created_swap_in(struct elastic_block *block)
{
    struct quiet quiet = created_enter();
    const bool good = make(block);
    if (good) {
        set(block, BLOCK_MADE);
        pthread_cond_broadcast(&elastic->created.back);
    }
    created_leave(quiet, NULL);
    return good;
}

/* As elastic_unmake. */
bool created_swap_undo(struct elastic_block *block)
{
    bool released = false;
    struct quiet quiet = created_enter();
    leave(block, &released);
    created_leave(quiet, NULL);
    return released;
}

void created_settle(void)
{
    struct created *ended = NULL;
    if (!atomic_load_explicit(&elastic->created.any, memory_order_acquire))
        return;
    struct quiet quiet = created_enter();
    created_end_all_left(&ended);
    pthread_cond_broadcast(&elastic->created.back);
    created_leave(quiet, ended);
}
