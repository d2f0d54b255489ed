/* array.c - arrays and mipmapped arrays: counted, described, without content.
 *
 * The size is that of a block-linear surface, by the measured sizes (bench/granularity): rows of 64 bytes, eight of them a
 * group; blocks of 1, 2, 4, 8 or 16 groups high, the lowest that holds the array.
 */
#include "internal.h"

#define TILES 64u
struct CUarray_st {
    struct handle handle;
    CUcontext ctx;
    unsigned long long ctx_id;
    struct place *place; /* NULL: sparse, or a level of a mipmapped array, which is counted as a whole */
    CUDA_ARRAY3D_DESCRIPTOR how;
    struct physical *tile[TILES]; /* of a sparse array: what is mapped, at tile x of its first row */
};

#define LEVELS 17u
struct CUmipmappedArray_st {
    struct handle handle;
    CUcontext ctx;
    unsigned long long ctx_id;
    struct place *place;
    unsigned levels;
    CUarray level[LEVELS];
};

static uint64_t element_bytes(CUarray_format format)
{
    switch ((int)format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8: return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF: return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT: return 4;
    default: return 0;
    }
}

#define GROUP_ROWS 8u
/* The extent of a block: so many units, doubled up to 16 times, until it holds all. */
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

static struct place *room_new(CUcontext ctx, uint64_t bytes)
{
    lock();
    struct place *place = place_new(&ctx->pages[PAGES_ARRAYS], ctx->device, bytes);
    unlock();
    return place;
}

/* With its context, all of its room is gone already; another one may have the handle now. */
static void room_free(CUcontext ctx, unsigned long long ctx_id, struct place *place)
{
    lock();
    if (place != NULL && context_ok(ctx) && ctx->id == ctx_id)
        place_free(&ctx->pages[PAGES_ARRAYS], ctx->device, place);
    unlock();
}

static CUresult array_new(CUarray *made, CUcontext ctx, const CUDA_ARRAY3D_DESCRIPTOR *how, uint64_t bytes)
{
    struct place *place = bytes > 0 ? room_new(ctx, bytes) : NULL;
    CHECK(bytes == 0 || place != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    CUarray array = handle_new(HANDLE_ARRAY, sizeof *array);
    if (array == NULL) {
        room_free(ctx, ctx->id, place);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    array->ctx = ctx;
    array->ctx_id = ctx->id;
    array->place = place;
    array->how = *how;
    *made = array;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *how)
{
    FAULT(cuArray3DCreate_v2, 0);
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(array != NULL && how != NULL && sound(how), CUDA_ERROR_INVALID_VALUE);
    return array_new(array, ctx, how, sparse(how) ? 0 : bytes_of(how, 1));
}

EXPORT CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *how)
{
    CHECK(how != NULL, CUDA_ERROR_INVALID_VALUE);
    const CUDA_ARRAY3D_DESCRIPTOR deep = {.Width = how->Width, .Height = how->Height, .Format = how->Format, .NumChannels = how->NumChannels};
    return cuArray3DCreate_v2(array, &deep);
}

EXPORT CUresult cuArrayDestroy(CUarray array)
{
    TRY(ready());
    CHECK(handle_is(array, HANDLE_ARRAY), CUDA_ERROR_INVALID_HANDLE);
    for (unsigned i = 0; i < TILES; i++)
        if (array->tile[i] != NULL)
            physical_let_go(array->tile[i]);
    room_free(array->ctx, array->ctx_id, array->place);
    handle_free(array);
    return CUDA_SUCCESS;
}

/* Tiles are told apart by their offset's x, and are as wide as they say. */
EXPORT CUresult cuMemMapArrayAsync(CUarrayMapInfo *info, unsigned count, CUstream handle)
{
    CUstream stream;
    TRY(stream_get(handle, &stream));
    CHECK(info != NULL, CUDA_ERROR_INVALID_VALUE);
    for (unsigned i = 0; i < count; i++) {
        const CUarray array = info[i].resource.array;
        CHECK(info[i].resourceType == CU_RESOURCE_TYPE_ARRAY && handle_is(array, HANDLE_ARRAY) && sparse(&array->how), CUDA_ERROR_INVALID_VALUE);
        const unsigned width = info[i].subresource.sparseLevel.extentWidth;
        const unsigned at = width > 0 ? info[i].subresource.sparseLevel.offsetX / width : TILES;
        CHECK(at < TILES, CUDA_ERROR_INVALID_VALUE);
        struct physical *next = NULL;
        CHECK(info[i].memOperationType == CU_MEM_OPERATION_TYPE_UNMAP || physical_hold(info[i].memHandle.memHandle, &next), CUDA_ERROR_INVALID_VALUE);
        if (array->tile[at] != NULL)
            physical_let_go(array->tile[at]);
        array->tile[at] = next;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *how, CUarray array)
{
    TRY(ready());
    CHECK(handle_is(array, HANDLE_ARRAY), CUDA_ERROR_INVALID_HANDLE);
    CHECK(how != NULL, CUDA_ERROR_INVALID_VALUE);
    *how = array->how;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *how, CUarray array)
{
    CUDA_ARRAY3D_DESCRIPTOR deep;
    CHECK(how != NULL, CUDA_ERROR_INVALID_VALUE);
    TRY(cuArray3DGetDescriptor_v2(&deep, array));
    *how = (CUDA_ARRAY_DESCRIPTOR){.Width = deep.Width, .Height = deep.Height, .Format = deep.Format, .NumChannels = deep.NumChannels};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *made, const CUDA_ARRAY3D_DESCRIPTOR *how, unsigned levels)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(made != NULL && how != NULL && sound(how) && levels > 0 && levels <= LEVELS, CUDA_ERROR_INVALID_VALUE);
    struct place *place = room_new(ctx, bytes_of(how, levels));
    CHECK(place != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    CUmipmappedArray array = handle_new(HANDLE_MIPMAP, sizeof *array);
    if (array == NULL) {
        room_free(ctx, ctx->id, place);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    array->ctx = ctx;
    array->ctx_id = ctx->id;
    array->place = place;
    array->levels = levels;
    CUDA_ARRAY3D_DESCRIPTOR level = *how;
    for (unsigned i = 0; i < levels; i++, level = next_level(level))
        if (array_new(&array->level[i], ctx, &level, 0) != CUDA_SUCCESS)
            array->level[i] = NULL;
    *made = array;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMipmappedArrayGetLevel(CUarray *level, CUmipmappedArray array, unsigned index)
{
    TRY(ready());
    CHECK(handle_is(array, HANDLE_MIPMAP), CUDA_ERROR_INVALID_HANDLE);
    CHECK(level != NULL && index < array->levels, CUDA_ERROR_INVALID_VALUE);
    *level = array->level[index];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    TRY(ready());
    CHECK(handle_is(array, HANDLE_MIPMAP), CUDA_ERROR_INVALID_HANDLE);
    for (unsigned i = 0; i < array->levels; i++)
        if (array->level[i] != NULL)
            handle_free(array->level[i]);
    room_free(array->ctx, array->ctx_id, array->place);
    handle_free(array);
    return CUDA_SUCCESS;
}
