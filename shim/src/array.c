/* array.c - arrays and mipmapped arrays: texture memory, whose size only the driver knows.
 *
 * The driver does not tell what an array took (cuArrayGetMemoryRequirements answers for arrays without memory only), so the
 * texels are counted, with the format's own size; a format that is newer than this library counts as the widest there is.
 * What the driver pads is found by the node, which measures the process. Sparse arrays and those that are mapped later have no
 * memory of their own: they are given blocks of cuMemCreate, which are counted.
 */
#include "hook.h"
#include "memory.h"

enum { WIDEST_BITS = 128 };

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

/* UINT64_MAX when it is too large to say. */
static uint64_t bytes_of(const CUDA_ARRAY3D_DESCRIPTOR *how, unsigned levels)
{
    uint64_t width = how->Width, height = how->Height, depth = how->Depth, bytes = 0;
    for (unsigned level = 0; level < levels; level++) {
        uint64_t texels, bits;
        if (__builtin_mul_overflow(width, or_one(height), &texels) || __builtin_mul_overflow(texels, or_one(depth), &texels) ||
            __builtin_mul_overflow(texels, bits_of(how->Format, how->NumChannels), &bits) ||
            __builtin_add_overflow(bytes, (bits / 8 + 511) / 512 * 512, &bytes))
            return UINT64_MAX;
        width = or_one(width / 2); /* a dimension of 0 is one that the array has not got */
        height = height > 0 ? or_one(height / 2) : 0;
        depth = depth > 0 ? or_one(depth / 2) : 0;
    }
    return bytes;
}

static CUDA_ARRAY3D_DESCRIPTOR flat(size_t width, size_t height, CUarray_format format, unsigned channels)
{
    return (CUDA_ARRAY3D_DESCRIPTOR){.Width = width, .Height = height, .Format = format, .NumChannels = channels};
}

/* Reserves for an array. False: refuse it. *card is NULL when there is nothing to count. */
static bool begin(const CUDA_ARRAY3D_DESCRIPTOR *how, unsigned levels, struct card **card, uint64_t *bytes)
{
    *card = NULL;
    if (how == NULL || (how->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)) != 0 || (*card = current_card()) == NULL)
        return true;
    *bytes = bytes_of(how, levels);
    return *bytes < UINT64_MAX && reserve(*card, *bytes);
}

static bool end(CUresult rc, enum owned_kind kind, const void *handle, uint64_t bytes, struct card *card)
{
    CUcontext context = NULL;
    if (card == NULL)
        return true;
    if (rc == CUDA_SUCCESS && tangram.driver.cuCtxGetCurrent != NULL)
        tangram.driver.cuCtxGetCurrent(&context);
    bool owned = rc == CUDA_SUCCESS && table_own((struct owned){OWNED_AS(kind, (uintptr_t)handle), bytes, card, context});
    if (!owned)
        lease_give_back(card, bytes);
    return owned || rc != CUDA_SUCCESS;
}

/* The descriptor is read into `how`, which is NULL for a NULL of the program: the driver's error is the answer then. */
#define CREATE_ARRAY(name, descriptor, how)                                                                                    \
    EXPORT CUresult name(CUarray *array, const descriptor *wanted)                                                             \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        CUDA_ARRAY3D_DESCRIPTOR deep = wanted != NULL ? how : (CUDA_ARRAY3D_DESCRIPTOR){.Width = 0};                           \
        struct card *card;                                                                                                     \
        uint64_t bytes = 0;                                                                                                    \
        if (!begin(wanted != NULL ? &deep : NULL, 1, &card, &bytes))                                                           \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
        CUresult rc = tangram.driver.name(array, wanted);                                                                      \
        if (end(rc, OWNED_ARRAY, rc == CUDA_SUCCESS ? *array : NULL, bytes, card))                                             \
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
    struct card *card;
    uint64_t bytes = 0;
    if (!begin(wanted, levels < 32 ? levels : 32, &card, &bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuMipmappedArrayCreate(array, wanted, levels);
    if (end(rc, OWNED_MIPMAP, rc == CUDA_SUCCESS ? *array : NULL, bytes, card))
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
