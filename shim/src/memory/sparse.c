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

/* Ties the block to the array, once. False when that cannot be remembered. */
static bool tie(const void *array, CUmemGenericAllocationHandle handle)
{
    struct block *block = vmm_retain(handle);
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

EXPORT CUresult cuMemMapArrayAsync(CUarrayMapInfo *tiles, unsigned int count, CUstream stream)
{
    NEEDS(cuMemMapArrayAsync);
    if (grant_ready() != GRANT_NONE && !tie_all(tiles, count))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return tangram.driver.cuMemMapArrayAsync(tiles, count, stream);
}

EXPORT CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *tiles, unsigned int count, CUstream stream)
{
    NEEDS(cuMemMapArrayAsync_ptsz);
    if (grant_ready() != GRANT_NONE && !tie_all(tiles, count))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return tangram.driver.cuMemMapArrayAsync_ptsz(tiles, count, stream);
}
