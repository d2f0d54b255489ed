/* copy.c - copies and fills. They take no GPU time, happen when they are called, and keep values.
 *
 * Of more than COPY_MOST bytes only so many are moved: no test looks further. Which functions there are, and which of them
 * wait for the context's work, is in copy.def. Both ends are memory of this process: device memory is mapped here.
 */
#include "internal.h"
#include "calls.h"

#define COPY_MOST (64 * FAKE_MIB)

static void *place(CUdeviceptr at)
{
    return (void *)(uintptr_t)at;
}

/* ends: which of them must be device memory that CUDA knows. */
enum { ANYWHERE, TO_DEVICE = 1, FROM_DEVICE = 2 };
static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, unsigned ends)
{
    if (bytes == 0)
        return CUDA_SUCCESS;
    CHECK(to != 0 && from != 0, CUDA_ERROR_INVALID_VALUE);
    const bool known = span_touch(to, bytes);
    CHECK(known || (ends & TO_DEVICE) == 0, CUDA_ERROR_INVALID_VALUE);
    CHECK(span_covers(from, bytes) || (ends & FROM_DEVICE) == 0, CUDA_ERROR_INVALID_VALUE);
    memmove(place(to), place(from), bytes < COPY_MOST ? bytes : COPY_MOST);
    return CUDA_SUCCESS;
}

/* One end of a 2D copy as bytes in this process, or NULL: arrays are not looked into. */
static unsigned char *end_of(CUmemorytype type, const void *host, CUdeviceptr device, size_t pitch, size_t x, size_t y)
{
    unsigned char *base = type == CU_MEMORYTYPE_HOST ? (unsigned char *)(uintptr_t)host : place(device);
    return type == CU_MEMORYTYPE_ARRAY || base == NULL ? NULL : base + y * pitch + x;
}

static CUresult copy_2d(const CUDA_MEMCPY2D *how)
{
    CHECK(how != NULL, CUDA_ERROR_INVALID_VALUE);
    const unsigned char *from = end_of(how->srcMemoryType, how->srcHost, how->srcDevice, how->srcPitch, how->srcXInBytes, how->srcY);
    unsigned char *to = end_of(how->dstMemoryType, how->dstHost, how->dstDevice, how->dstPitch, how->dstXInBytes, how->dstY);
    if (from == NULL || to == NULL)
        return CUDA_SUCCESS;
    size_t left = COPY_MOST;
    span_touch((CUdeviceptr)(uintptr_t)to, 1);
    for (size_t row = 0; row < how->Height && left >= how->WidthInBytes; row++, left -= how->WidthInBytes)
        memmove(to + row * how->dstPitch, from + row * how->srcPitch, how->WidthInBytes);
    return CUDA_SUCCESS;
}

/* Rows of count elements of width bytes. */
static CUresult fill(CUdeviceptr at, size_t pitch, uint32_t value, size_t width, size_t count, size_t rows)
{
    if (count == 0 || rows == 0)
        return CUDA_SUCCESS;
    CHECK(count <= SIZE_MAX / width && at % width == 0, CUDA_ERROR_INVALID_VALUE);
    CHECK(span_touch(at, (rows - 1) * pitch + count * width), CUDA_ERROR_INVALID_VALUE);
    size_t left = COPY_MOST;
    for (size_t row = 0; row < rows && left > 0; row++) {
        unsigned char *to = (unsigned char *)place(at) + row * pitch;
        const size_t bytes = count * width < left ? count * width : left;
        left -= bytes;
        if (width == 1)
            memset(to, (int)(value & 0xff), bytes);
        for (size_t i = 0; width > 1 && i + width <= bytes; i += width)
            memcpy(to + i, &value, width); /* little-endian: the low bytes */
    }
    return CUDA_SUCCESS;
}

#include "copy.def"
