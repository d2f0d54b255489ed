/* host.c - pinned host memory (no GPU memory: nothing is counted), and what a pointer is. */
#define _GNU_SOURCE
#include "internal.h"

#include <sys/mman.h>

static struct span *pinned_new(CUcontext ctx, enum span_kind kind, void *at, size_t bytes, unsigned flags)
{
    return span_new(&(struct span){.base = (uintptr_t)at, .bytes = bytes, .room = bytes, .kind = kind, .ctx = ctx, .device = ctx->device, .flags = flags});
}

CUresult host_new(void **at, size_t bytes, unsigned flags)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(at != NULL && bytes > 0, CUDA_ERROR_INVALID_VALUE);
    *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(*at != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    if (pinned_new(ctx, SPAN_HOST, *at, bytes, flags) != NULL)
        return CUDA_SUCCESS;
    munmap(*at, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult host_register(void *at, size_t bytes, unsigned flags)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(at != NULL && bytes > 0, CUDA_ERROR_INVALID_VALUE);
    return pinned_new(ctx, SPAN_REGISTERED, at, bytes, flags) != NULL ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

/* One attribute of a pointer, which has so many bytes. span is NULL for memory that CUDA does not know. */
static CUresult attribute_of(void *data, size_t *bytes, CUpointer_attribute attribute, const struct span *span, CUdeviceptr at)
{
    *bytes = sizeof(void *);
    switch ((int)attribute) {
#define ATTRIBUTE(name, type, exists, value)                                                                                   \
    case CU_POINTER_ATTRIBUTE_##name:                                                                                          \
        *bytes = sizeof(type);                                                                                                 \
        CHECK(exists, CUDA_ERROR_INVALID_VALUE);                                                                               \
        *(type *)data = (type)(value);                                                                                         \
        return CUDA_SUCCESS;
#include "pointer.def"
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr at)
{
    size_t bytes;
    TRY(ready());
    CHECK(data != NULL, CUDA_ERROR_INVALID_VALUE);
    SCOPED tables = hold(&cuda.lock);
    return attribute_of(data, &bytes, attribute, span_find((uintptr_t)at), at);
}

EXPORT CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **data, CUdeviceptr at)
{
    size_t bytes;
    TRY(ready());
    CHECK(attributes != NULL && data != NULL && count > 0, CUDA_ERROR_INVALID_VALUE);
    SCOPED tables = hold(&cuda.lock);
    for (unsigned i = 0; i < count; i++)
        if (attribute_of(data[i], &bytes, attributes[i], span_find((uintptr_t)at), at) != CUDA_SUCCESS)
            memset(data[i], 0, bytes); /* as documented: what is unknown reads as nothing */
    return CUDA_SUCCESS;
}
