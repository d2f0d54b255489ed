/* array.c - arrays and mipmapped arrays: counted, described, without content.
 *
 * The size is that of a block-linear surface, by the measured sizes (bench/granularity): rows of 64 bytes, eight of them a
 * group; blocks of 1, 2, 4, 8 or 16 groups high, the lowest that the array fits into.
 */
#include "internal.h"
#include "calls.h"

#define GROUP_ROWS 8u

static uint64_t element_bytes(CUarray_format format)
{
    switch ((int)format) {
#define FORMAT(name, bytes) case CU_AD_FORMAT_##name: return bytes;
#include "formats.def"
    default: return 0;
    }
}

/* The extent of a block: so many units, doubled up to 16 times, until all fits. */
static uint64_t blocked(uint64_t extent, uint64_t unit)
{
    uint64_t block = unit;
    while (block < extent && block < 16 * unit)
        block *= 2;
    return block;
}

static bool layered(const CUDA_ARRAY3D_DESCRIPTOR *how)
{
    return (how->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
}

static uint64_t or_one(uint64_t extent)
{
    return extent > 0 ? extent : 1;
}

static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *how)
{
    const uint64_t height = or_one(how->Height), row = rounded(how->Width * how->NumChannels * element_bytes(how->Format), 64);
    if (how->Depth > 0 && !layered(how)) /* blocks are as deep as they must be, and of one group of rows */
        return row * rounded(height, GROUP_ROWS) * rounded(how->Depth, blocked(how->Depth, 1));
    return row * rounded(height, blocked(height, GROUP_ROWS));
}

static CUDA_ARRAY3D_DESCRIPTOR next_level(CUDA_ARRAY3D_DESCRIPTOR how)
{
    how.Width -= how.Width > 1 ? how.Width - how.Width / 2 : 0;
    how.Height -= how.Height > 1 ? how.Height - how.Height / 2 : 0;
    how.Depth -= how.Depth > 1 && !layered(&how) ? how.Depth - how.Depth / 2 : 0;
    return how;
}

/* All levels of a layer lie together; each layer of several levels begins at a block of the first one. */
static uint64_t bytes_of(const CUDA_ARRAY3D_DESCRIPTOR *how, unsigned levels)
{
    uint64_t bytes = 0;
    CUDA_ARRAY3D_DESCRIPTOR level = *how;
    for (unsigned i = 0; i < levels; i++, level = next_level(level))
        bytes += level_bytes(&level);
    if (!layered(how))
        return bytes;
    return (levels > 1 ? rounded(bytes, 64 * blocked(or_one(how->Height), GROUP_ROWS)) : bytes) * or_one(how->Depth);
}

static bool sparse(const CUDA_ARRAY3D_DESCRIPTOR *how)
{
    return (how->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)) != 0;
}

static bool sound(const CUDA_ARRAY3D_DESCRIPTOR *how)
{
    return how->Width > 0 && how->Width <= 131072 && how->Height <= 131072 && how->Depth <= 16384 && element_bytes(how->Format) > 0 &&
           (how->NumChannels == 1 || how->NumChannels == 2 || how->NumChannels == 4);
}

static CUresult array_new(CUarray *made, enum handle_kind kind, CUcontext ctx, const CUDA_ARRAY3D_DESCRIPTOR *how, uint64_t bytes)
{
    TRY(MAKE(made, kind, CUarray_st, .how = *how));
    const CUresult rc = memory_own(ctx, SPAN_OWNED, PAGES_ARRAYS, bytes, &(*made)->memory);
    if (rc != CUDA_SUCCESS)
        handle_free(*made);
    return rc;
}

static CUresult mipmap_new(CUarray *made, CUcontext ctx, const CUDA_ARRAY3D_DESCRIPTOR *how, unsigned levels)
{
    CUDA_ARRAY3D_DESCRIPTOR level = *how;
    TRY(array_new(made, HANDLE_MIPMAP, ctx, how, bytes_of(how, levels)));
    for (unsigned i = 0; i < levels; i++, level = next_level(level))
        if (array_new(&(*made)->level[i], HANDLE_ARRAY, ctx, &level, 0) != CUDA_SUCCESS)
            (*made)->level[i] = NULL;
    return CUDA_SUCCESS;
}

static CUresult array_end(CUarray array, enum handle_kind kind)
{
    TRY(handle_ok(array, kind, CUDA_ERROR_INVALID_HANDLE));
    for (unsigned i = 0; i < LEVELS; i++)
        if (array->level[i] != NULL)
            handle_free(array->level[i]);
    for (unsigned i = 0; i < TILES; i++)
        if (array->tile[i] != NULL)
            physical_drop(array->tile[i]);
    owned_free(&array->memory);
    handle_free(array);
    return CUDA_SUCCESS;
}

/* Tiles are distinguished by their offset's x, and have the width that is stated. */
static CUresult map_tile(const CUarrayMapInfo *info)
{
    const CUarray array = info->resource.array;
    CHECK(info->resourceType == CU_RESOURCE_TYPE_ARRAY && handle_is(array, HANDLE_ARRAY) && sparse(&array->how), CUDA_ERROR_INVALID_VALUE);
    const unsigned width = info->subresource.sparseLevel.extentWidth;
    const unsigned at = width > 0 ? info->subresource.sparseLevel.offsetX / width : TILES;
    CHECK(at < TILES, CUDA_ERROR_INVALID_VALUE);
    struct physical *next = NULL;
    if (info->memOperationType != CU_MEM_OPERATION_TYPE_UNMAP)
        TRY(physical_get(info->memHandle.memHandle, &next));
    if (next != NULL)
        next->users++;
    if (array->tile[at] != NULL)
        physical_drop(array->tile[at]);
    array->tile[at] = next;
    return CUDA_SUCCESS;
}

static CUresult map_tiles(const CUarrayMapInfo *list, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        TRY(map_tile(&list[i]));
    return CUDA_SUCCESS;
}

#include "array.def"
