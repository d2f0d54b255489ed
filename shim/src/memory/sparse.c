/* sparse.c - blocks mapped into sparse arrays: a third holder of a block, beside its handles and its mappings.
 *
 * A tile may be unmapped alone, in parts, and by mapping another one over it. That is not followed: a block that was mapped
 * into an array is counted until the array is destroyed, which is too long at times and never too short.
 */
#include "hooks/hook.h"
#include "memory/memory.h"

#include <stdlib.h>

struct tiles {
    struct tiles *next;
    struct block *block;
};

static void let_go_all(struct tiles *tiles)
{
    for (struct tiles *next; tiles != NULL; tiles = next) {
        next = tiles->next;
        vmm_let_go(tiles->block);
        free(tiles);
    }
}

static bool has(const struct tiles *tiles, const struct block *block)
{
    while (tiles != NULL && tiles->block != block)
        tiles = tiles->next;
    return tiles != NULL;
}

/* One more holder of the block; NULL where the handle is none that is counted. Memory that can be swapped becomes resident; false: it does not fit. */
static bool retain(CUmemGenericAllocationHandle handle, struct block **block)
{
    CUmemGenericAllocationHandle made;
    *block = NULL;
    if (created_is(handle))
        return created_fix(handle, &made, block) != CUDA_ERROR_OUT_OF_MEMORY;
    *block = vmm_retain(handle);
    return true;
}

/* Ties the block to the array, once. False when that cannot be remembered, or the block does not fit. */
static bool tie(const void *array, CUmemGenericAllocationHandle handle)
{
    struct block *block;
    if (!retain(handle, &block))
        return false;
    if (block == NULL)
        return true;
    struct owned entry = {.at = OWNED_AS(OWNED_TILES, (uintptr_t)array)};
    table_disown(entry.at, &entry);
    struct tiles *tiles = has(entry.of, block) ? NULL : malloc(sizeof *tiles);
    bool tied = tiles != NULL || has(entry.of, block);
    if (tiles != NULL) {
        *tiles = (struct tiles){entry.of, block};
        entry.of = tiles;
    } else {
        vmm_let_go(block);
    }
    if (entry.of == NULL || table_own(entry))
        return tied;
    let_go_all(entry.of);
    return false;
}

void sparse_forget(const void *array)
{
    struct owned was;
    if (table_disown(OWNED_AS(OWNED_TILES, (uintptr_t)array), &was))
        let_go_all(was.of);
}

/* Before the call: a release that passes us must not be the last. */
static bool tie_all(const CUarrayMapInfo *tile, unsigned int count)
{
    bool good = true;
    for (unsigned int i = 0; i < count && tile != NULL && good; i++)
        if (tile[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP)
            good = tie(tile[i].resourceType == CU_RESOURCE_TYPE_ARRAY ? (const void *)tile[i].resource.array
                                                                      : (const void *)tile[i].resource.mipmap,
                       tile[i].memHandle.memHandle);
    return good;
}

/* A copy of the list with the driver's handles, where some are the library's own; NULL: there is no memory for it. */
static CUarrayMapInfo *translated(CUarrayMapInfo *tiles, unsigned int count)
{
    unsigned int own = 0;
    for (unsigned int i = 0; i < count && tiles != NULL; i++)
        own += tiles[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP && created_is(tiles[i].memHandle.memHandle);
    if (own == 0)
        return tiles;
    CUarrayMapInfo *copy = malloc(count * sizeof *copy);
    for (unsigned int i = 0; i < count && copy != NULL; i++) {
        copy[i] = tiles[i];
        if (tiles[i].memOperationType != CU_MEM_OPERATION_TYPE_MAP || !created_is(tiles[i].memHandle.memHandle))
            continue;
        CUmemGenericAllocationHandle made = 0;
        struct block *block;
        if (created_fix(tiles[i].memHandle.memHandle, &made, &block) == CUDA_SUCCESS) /* resident already: it was tied */
            vmm_let_go(block);
        copy[i].memHandle.memHandle = made;
    }
    return copy;
}

#define MAP_ARRAY(name)                                                                                                        \
    EXPORT CUresult name(CUarrayMapInfo *tiles, unsigned int count, CUstream stream)                                           \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        if (grant_ready() == GRANT_NONE)                                                                                       \
            return tangram.driver.name(tiles, count, stream);                                                                  \
        CUarrayMapInfo *list = tie_all(tiles, count) ? translated(tiles, count) : NULL;                                        \
        if (list == NULL && tiles != NULL)                                                                                     \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
        CUresult rc = tangram.driver.name(list, count, stream);                                                                \
        if (list != tiles)                                                                                                     \
            free(list);                                                                                                        \
        return rc;                                                                                                             \
    }
MAP_ARRAY(cuMemMapArrayAsync)
MAP_ARRAY(cuMemMapArrayAsync_ptsz)
