/* copy.c - copies and fills. They take no GPU time, happen when they are called, and keep values.
 *
 * Of more than COPY_MOST bytes only so many are moved. Copies that wait (no Async in the name) wait for the context's work.
 */
#include "internal.h"

/* Both ends as the process sees them: device memory is mapped here. */
static CUresult move(void *to, const void *from, size_t bytes)
{
    memmove(to, from, bytes < COPY_MOST ? bytes : COPY_MOST);
    return CUDA_SUCCESS;
}

static void *memory(CUdeviceptr at)
{
    return (void *)(uintptr_t)at;
}

static CUresult settle(CUcontext *ctx)
{
    TRY(current(ctx));
    work_wait((*ctx)->device, atomic_load(&(*ctx)->done_ns));
    return CUDA_SUCCESS;
}

static CUresult copy_to_device(CUdeviceptr to, const void *from, size_t bytes)
{
    CHECK(bytes == 0 || (from != NULL && span_touch(to, bytes)), CUDA_ERROR_INVALID_VALUE);
    return bytes == 0 ? CUDA_SUCCESS : move(memory(to), from, bytes);
}

static CUresult copy_from_device(void *to, CUdeviceptr from, size_t bytes)
{
    CHECK(bytes == 0 || (to != NULL && span_covers(from, bytes)), CUDA_ERROR_INVALID_VALUE);
    return bytes == 0 ? CUDA_SUCCESS : move(to, memory(from), bytes);
}

static CUresult copy_device(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    CHECK(bytes == 0 || (span_touch(to, bytes) && span_covers(from, bytes)), CUDA_ERROR_INVALID_VALUE);
    return bytes == 0 ? CUDA_SUCCESS : move(memory(to), memory(from), bytes);
}

/* cuMemcpy takes host pointers, too: unified addressing. */
static CUresult copy_any(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    CHECK(bytes == 0 || (to != 0 && from != 0), CUDA_ERROR_INVALID_VALUE);
    span_touch(to, bytes);
    return bytes == 0 ? CUDA_SUCCESS : move(memory(to), memory(from), bytes);
}

/* now: waits for the context, then does it. later: adds a node to a capture, or does it at once on the stream. */
#define NOW(call)                                                                                                              \
    do {                                                                                                                       \
        CUcontext ctx_;                                                                                                        \
        TRY(settle(&ctx_));                                                                                                    \
        return call;                                                                                                           \
    } while (0)
#define LATER(handle, kind, call)                                                                                              \
    do {                                                                                                                       \
        CUstream stream_;                                                                                                      \
        TRY(stream_get(handle, &stream_));                                                                                     \
        if (stream_->capture != NULL)                                                                                          \
            return capture_add(stream_->capture, kind, 0);                                                                     \
        return call;                                                                                                           \
    } while (0)

EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) { NOW(copy_any(to, from, bytes)); }
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) { NOW(copy_to_device(to, from, bytes)); }
EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) { NOW(copy_from_device(to, from, bytes)); }
EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) { NOW(copy_device(to, from, bytes)); }
EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream on)
{
    LATER(on, NODE_COPY, copy_any(to, from, bytes));
}
EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream on)
{
    LATER(on, NODE_COPY, copy_to_device(to, from, bytes));
}
EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream on)
{
    LATER(on, NODE_COPY, copy_from_device(to, from, bytes));
}
EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream on)
{
    LATER(on, NODE_COPY, copy_device(to, from, bytes));
}

static CUresult copy_peer(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t bytes)
{
    CHECK(context_ok(to_ctx) && context_ok(from_ctx), CUDA_ERROR_INVALID_CONTEXT);
    return copy_device(to, from, bytes);
}

EXPORT CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t bytes)
{
    NOW(copy_peer(to, to_ctx, from, from_ctx, bytes));
}
EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t bytes, CUstream on)
{
    LATER(on, NODE_COPY, copy_peer(to, to_ctx, from, from_ctx, bytes));
}

/* One end of a 2D copy as bytes in this process, or NULL: arrays are not looked into. */
static unsigned char *end_of(CUmemorytype type, const void *host, CUdeviceptr device, size_t pitch, size_t x, size_t y)
{
    unsigned char *base = type == CU_MEMORYTYPE_HOST ? (unsigned char *)(uintptr_t)host : memory(device);
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

EXPORT CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *how) { NOW(copy_2d(how)); }
EXPORT CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *how) { NOW(copy_2d(how)); }
EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *how, CUstream on) { LATER(on, NODE_COPY, copy_2d(how)); }

static CUresult copy_3d(const CUDA_MEMCPY3D *how)
{
    return how != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; /* its values are not kept */
}

EXPORT CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *how) { NOW(copy_3d(how)); }
EXPORT CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *how, CUstream on) { LATER(on, NODE_COPY, copy_3d(how)); }

/* Fills rows of count elements of width bytes. */
static CUresult fill(CUdeviceptr at, size_t pitch, uint32_t value, size_t width, size_t count, size_t rows)
{
    if (count == 0 || rows == 0)
        return CUDA_SUCCESS;
    CHECK(count <= SIZE_MAX / width && at % width == 0, CUDA_ERROR_INVALID_VALUE);
    CHECK(span_touch(at, (rows - 1) * pitch + count * width), CUDA_ERROR_INVALID_VALUE);
    size_t left = COPY_MOST;
    for (size_t row = 0; row < rows && left > 0; row++) {
        unsigned char *to = (unsigned char *)memory(at) + row * pitch;
        const size_t bytes = count * width < left ? count * width : left;
        left -= bytes;
        if (width == 1) {
            memset(to, (int)(value & 0xff), bytes);
            continue;
        }
        for (size_t i = 0; i + width <= bytes; i += width)
            memcpy(to + i, &value, width); /* little-endian: the low bytes */
    }
    return CUDA_SUCCESS;
}

#define FILLS(bits, type)                                                                                                      \
    EXPORT CUresult cuMemsetD##bits##_v2(CUdeviceptr at, type value, size_t count)                                             \
    {                                                                                                                          \
        NOW(fill(at, 0, value, bits / 8, count, 1));                                                                           \
    }                                                                                                                          \
    EXPORT CUresult cuMemsetD##bits##Async(CUdeviceptr at, type value, size_t count, CUstream on)                              \
    {                                                                                                                          \
        LATER(on, NODE_FILL, fill(at, 0, value, bits / 8, count, 1));                                                          \
    }                                                                                                                          \
    EXPORT CUresult cuMemsetD2D##bits##_v2(CUdeviceptr at, size_t pitch, type value, size_t width, size_t height)              \
    {                                                                                                                          \
        NOW(fill(at, pitch, value, bits / 8, width, height));                                                                  \
    }                                                                                                                          \
    EXPORT CUresult cuMemsetD2D##bits##Async(CUdeviceptr at, size_t pitch, type value, size_t width, size_t height, CUstream on) \
    {                                                                                                                          \
        LATER(on, NODE_FILL, fill(at, pitch, value, bits / 8, width, height));                                                 \
    }

FILLS(8, unsigned char)
FILLS(16, unsigned short)
FILLS(32, unsigned)
