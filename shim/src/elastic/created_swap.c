/* created_swap.c - exchanging the memory behind blocks of created.c: as swap.c does it, for a block that may have many mappings, or none.
 *
 * The program's own calls and these exclude each other (created_enter), so a block is away with exactly the mappings that its records have.
 */
#include "process.h"

static struct elastic *const elastic = &tangram.elastic;

static CUresult map_one(const struct created_map *map, CUmemGenericAllocationHandle handle)
{
    CUmemAccessDesc list[PEER_DEVICES + 1];
    const unsigned count = access_list(map->of->region->device, map->access, &map->others, list);
    CUresult rc = tangram.driver.cuMemMap(map->at, map->bytes, map->offset, handle, 0);
    if (rc != CUDA_SUCCESS || count == 0)
        return rc;
    rc = tangram.driver.cuMemSetAccess(map->at, map->bytes, list, count);
    if (rc != CUDA_SUCCESS)
        tangram.driver.cuMemUnmap(map->at, map->bytes);
    return rc;
}

/* All of its mappings, or none. */
static bool map_all(const struct created *created, CUmemGenericAllocationHandle handle)
{
    for (const struct created_map *map = created->map; map != NULL; map = map->next)
        if (map_one(map, handle) != CUDA_SUCCESS) {
            for (const struct created_map *undo = created->map; undo != map; undo = undo->next)
                tangram.driver.cuMemUnmap(undo->at, undo->bytes);
            return false;
        }
    return true;
}

static bool unmap_all(const struct created *created)
{
    for (const struct created_map *map = created->map; map != NULL; map = map->next)
        if (tangram.driver.cuMemUnmap(map->at, map->bytes) != CUDA_SUCCESS) {
            for (const struct created_map *undo = created->map; undo != map; undo = undo->next)
                map_one(undo, created_block(created)->handle);
            return false;
        }
    return true;
}

static void set(struct elastic_block *block, enum block_state state)
{
    lock_acquire(&elastic->lock);
    block_move(block, state);
    lock_release(&elastic->lock);
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
    } else if (unmap_all(created)) {
        released = tangram.driver.cuMemRelease(block->handle) == CUDA_SUCCESS;
        atomic_fetch_add(&block->region->gpu->away_bytes, block->bytes);
        set(block, BLOCK_AWAY);
    }
    created_leave(quiet, ended);
    return released;
}

/* As elastic_make. */
bool created_swap_in(struct elastic_block *block)
{
    const struct created *created = block->region->created;
    struct quiet quiet = created_enter();
    CUmemAllocationProp prop = created->prop;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    bool good = tangram.driver.cuMemCreate(&block->handle, block->bytes, &prop, 0) == CUDA_SUCCESS;
    if (good && !map_all(created, block->handle)) {
        tangram.driver.cuMemRelease(block->handle);
        good = false;
    }
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
    if (unmap_all(block->region->created)) {
        released = tangram.driver.cuMemRelease(block->handle) == CUDA_SUCCESS;
        set(block, BLOCK_AWAY);
    }
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
