/* array.c - arrays and mipmapped arrays: texture memory, of which the driver reports neither size nor address.
 *
 * cuArrayGetMemoryRequirements answers for arrays without memory only. So the size is computed as the driver lays textures out, and
 * small ones share pages by the driver's own rule (pages.c). A format that is newer than this library counts as the widest there is.
 * Sparse arrays and those that are mapped later have no memory of their own: blocks of cuMemCreate are mapped into them, which are counted.
 */
#include "hooks/hook.h"
#include "memory/memory.h"

enum {
    WIDEST_BITS = 128,
    TILE_ROW = 64, /* bytes */
    TILE_ROWS = 8,
    BLOCK_MOST = 16,
    FIRST_COMPRESSED = 0x91,
    LAST_COMPRESSED = 0x9e,
};
#define TOO_MANY ((uint64_t)1 << 40)

/* Bits of one texel per channel, or of one texel with all its channels. */
struct format {
    int first, last;
    unsigned bits;
    bool whole;
};

static const struct format formats[] = {
    {0x01, 0x01, 8, false},  {0x02, 0x02, 16, false}, {0x03, 0x03, 32, false}, {0x08, 0x08, 8, false},
    {0x09, 0x09, 16, false}, {0x0a, 0x0a, 32, false}, {0x10, 0x10, 16, false}, {0x20, 0x20, 32, false},
    {0x50, 0x50, 32, true},                                                    /* 10:10:10:2 */
    {0x91, 0x92, 4, true},   {0x93, 0x96, 8, true},   {0x97, 0x98, 4, true},   {0x99, 0x9e, 8, true}, /* BC1, 2-3, 4, 5-7 */
    {0xb0, 0xb0, 12, true},  {0x9f, 0x9f, 24, true},  {0xa1, 0xa1, 24, true},  /* NV12, P010, P016 */
    {0xc0, 0xc0, 8, true},   {0xc1, 0xc1, 16, true},  {0xc2, 0xc2, 32, true},  {0xc3, 0xc3, 16, true},
    {0xc4, 0xc4, 32, true},  {0xc5, 0xc5, 64, true},  {0xc6, 0xc6, 8, true},   {0xc7, 0xc7, 16, true},
    {0xc8, 0xc8, 32, true},  {0xc9, 0xc9, 16, true},  {0xca, 0xca, 32, true},  {0xcb, 0xcb, 64, true},
};

static unsigned bits_of(CUarray_format format, unsigned channels)
{
    for (unsigned i = 0; i < sizeof formats / sizeof *formats; i++)
        if ((int)format >= formats[i].first && (int)format <= formats[i].last)
            return formats[i].bits * (formats[i].whole || channels == 0 ? 1 : channels);
    return WIDEST_BITS;
}

static uint64_t or_one(uint64_t count)
{
    return count > 0 ? count : 1;
}

static uint64_t padded(uint64_t count, uint64_t to)
{
    return (count + to - 1) / to * to;
}

/* The driver's blocks are as high, or as deep, as what is in them needs: 1, 2, 4, 8 or 16. */
static uint64_t in_blocks(uint64_t count)
{
    uint64_t block = 1;
    while (block < BLOCK_MOST && block < count)
        block *= 2;
    return padded(count, block);
}

struct extent {
    uint64_t width, height, depth; /* depth 0: it has none */
    uint64_t side, bytes;          /* of a unit: side x side texels */
};

/* One level of one layer, as it lies in memory: tiles of 64 bytes x 8 rows. A real 3D array is not padded in its height. UINT64_MAX when
 * it overflows. */
static uint64_t level_bytes(struct extent of)
{
    uint64_t high = padded(padded(of.height, of.side) / of.side, TILE_ROWS) / TILE_ROWS, bytes;
    uint64_t tiles = of.depth > 0 ? high : in_blocks(high);
    if (of.width > TOO_MANY || __builtin_mul_overflow(padded(padded(of.width, of.side) / of.side * of.bytes, TILE_ROW), tiles, &bytes) ||
        __builtin_mul_overflow(bytes, TILE_ROWS * in_blocks(or_one(of.depth)), &bytes))
        return UINT64_MAX;
    return bytes;
}

/* Compressed formats have their texels in units of 4 x 4; planes of video are bounded by two whole ones. */
static struct extent extent_of(const CUDA_ARRAY3D_DESCRIPTOR *how)
{
    unsigned bits = bits_of(how->Format, how->NumChannels);
    bool compressed = (int)how->Format >= FIRST_COMPRESSED && (int)how->Format <= LAST_COMPRESSED;
    struct extent of = {how->Width, or_one(how->Height), how->Depth, compressed ? 4 : 1, compressed ? bits * 2 : bits / 8};
    if (how->Width > TOO_MANY || how->Height > TOO_MANY || how->Depth > TOO_MANY)
        of.width = UINT64_MAX;
    if (!compressed && (bits % 8 != 0 || bits == 24))
        of.bytes = padded(bits, 8) / 8 * 2;
    return of;
}

static uint64_t halved(uint64_t count)
{
    return count > 1 ? count / 2 : count;
}

/* Measured of driver 580: bench/granularity. */
uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *how, unsigned levels)
{
    bool layered = (how->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
    struct extent of = extent_of(how);
    uint64_t layers = layered ? or_one(how->Depth) : 1, bytes = 0;
    of.depth = layered ? 0 : of.depth;
    uint64_t block = in_blocks(padded(of.height, TILE_ROWS) / TILE_ROWS);
    for (unsigned level = 0; level < (levels > 0 ? levels : 1); level++) {
        uint64_t here = level_bytes(of);
        if (here == UINT64_MAX || __builtin_add_overflow(bytes, here, &bytes))
            return UINT64_MAX;
        of.width = halved(of.width);
        of.height = halved(of.height);
        of.depth = halved(of.depth);
    }
    if (layered && levels > 1) /* each layer begins with a block of its first level's height */
        bytes = padded(bytes, TILE_ROW * TILE_ROWS * (block < BLOCK_MOST ? block : BLOCK_MOST));
    return __builtin_mul_overflow(bytes, layers, &bytes) ? UINT64_MAX : bytes;
}

static CUDA_ARRAY3D_DESCRIPTOR flat(size_t width, size_t height, CUarray_format format, unsigned channels)
{
    return (CUDA_ARRAY3D_DESCRIPTOR){.Width = width, .Height = height, .Format = format, .NumChannels = channels};
}

/* False: refuse it. */
static bool begin(const CUDA_ARRAY3D_DESCRIPTOR *how, unsigned levels, struct placing *placing)
{
    CUcontext context = NULL;
    struct gpu *gpu;
    *placing = (struct placing){.gpu = NULL};
    if (how == NULL || (how->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)) != 0 || (gpu = current_gpu()) == NULL)
        return true;
    tangram.driver.cuCtxGetCurrent(&context);
    return placing_begin(placing, &tangram.array_pages, gpu, context, array_bytes(how, levels));
}

/* The descriptor is read into `how`, which is NULL for a NULL of the program: the driver's error is the answer then. */
#define CREATE_ARRAY(name, descriptor, how)                                                                                    \
    EXPORT CUresult name(CUarray *array, const descriptor *wanted)                                                             \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        CUDA_ARRAY3D_DESCRIPTOR deep = wanted != NULL ? how : (CUDA_ARRAY3D_DESCRIPTOR){.Width = 0};                           \
        struct placing placing;                                                                                                 \
        if (!begin(wanted != NULL ? &deep : NULL, 1, &placing))                                                                \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
        CUresult rc = tangram.driver.name(array, wanted);                                                                      \
        if (placing_end(&placing, rc, OWNED_AS(OWNED_ARRAY, rc == CUDA_SUCCESS ? (uintptr_t)*array : 0)))                      \
            return rc;                                                                                                         \
        tangram.driver.cuArrayDestroy(*array);                                                                                 \
        return CUDA_ERROR_OUT_OF_MEMORY;                                                                                       \
    }

CREATE_ARRAY(cuArrayCreate, CUDA_ARRAY_DESCRIPTOR_v1, flat(wanted->Width, wanted->Height, wanted->Format, wanted->NumChannels))
CREATE_ARRAY(cuArrayCreate_v2, CUDA_ARRAY_DESCRIPTOR, flat(wanted->Width, wanted->Height, wanted->Format, wanted->NumChannels))
CREATE_ARRAY(cuArray3DCreate, CUDA_ARRAY3D_DESCRIPTOR_v1,
             ((CUDA_ARRAY3D_DESCRIPTOR){wanted->Width, wanted->Height, wanted->Depth, wanted->Format, wanted->NumChannels,
                                        wanted->Flags}))
CREATE_ARRAY(cuArray3DCreate_v2, CUDA_ARRAY3D_DESCRIPTOR, *wanted)

EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *wanted, unsigned int levels)
{
    NEEDS(cuMipmappedArrayCreate);
    struct placing placing;
    if (!begin(wanted, levels < 32 ? levels : 32, &placing))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuMipmappedArrayCreate(array, wanted, levels);
    if (placing_end(&placing, rc, OWNED_AS(OWNED_MIPMAP, rc == CUDA_SUCCESS ? (uintptr_t)*array : 0)))
        return rc;
    tangram.driver.cuMipmappedArrayDestroy(*array);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

#define DESTROY_ARRAY(name, handle, kind)                                                                                      \
    EXPORT CUresult name(handle array)                                                                                         \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct owned was;                                                                                                      \
        bool ours = table_disown(OWNED_AS(kind, (uintptr_t)array), &was);                                                      \
        CUresult rc = tangram.driver.name(array);                                                                              \
        if (rc == CUDA_SUCCESS)                                                                                                \
            sparse_forget(array);                                                                                              \
        if (ours)                                                                                                              \
            settle_handle(rc, &was);                                                                                           \
        return rc;                                                                                                             \
    }

DESTROY_ARRAY(cuArrayDestroy, CUarray, OWNED_ARRAY)
DESTROY_ARRAY(cuMipmappedArrayDestroy, CUmipmappedArray, OWNED_MIPMAP)
