/* host.c - pinned host memory (no GPU memory: nothing is counted), and what a pointer is. */
#define _GNU_SOURCE
#include "internal.h"
#include "calls.h"

#include <sys/mman.h>

static CUresult pinned_new(CUcontext ctx, enum span_kind kind, void *at, size_t bytes, unsigned flags)
{
    const struct span like = {.base = (uintptr_t)at, .bytes = bytes, .capacity = bytes, .kind = kind, .ctx = ctx, .device = ctx->device, .flags = flags};
    return span_new(&cuda.spans, &like) != NULL ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

static CUresult host_new(void **at, size_t bytes, unsigned flags)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(at != NULL && bytes > 0, CUDA_ERROR_INVALID_VALUE);
    *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(*at != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    if (pinned_new(ctx, SPAN_HOST, *at, bytes, flags) == CUDA_SUCCESS)
        return CUDA_SUCCESS;
    munmap(*at, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* span is NULL for memory that CUDA does not know. */
static CUresult attribute_of(void *data, CUpointer_attribute attribute, const struct span *span, CUdeviceptr at)
{
    switch ((int)attribute) {
#define ATTRIBUTE(name, type, exists, value)                                                                                   \
    case CU_POINTER_ATTRIBUTE_##name:                                                                                          \
        CHECK(exists, CUDA_ERROR_INVALID_VALUE);                                                                               \
        *(type *)data = (type)(value);                                                                                         \
        return CUDA_SUCCESS;
#include "pointer_attributes.def"
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

/* An attribute that the memory does not have is 0, and no error. */
static CUresult attributes_of(unsigned count, const CUpointer_attribute *attributes, void **data, CUdeviceptr at)
{
    const struct span *span = span_find((uintptr_t)at);
    for (unsigned i = 0; i < count; i++) {
        const CUresult rc = attribute_of(data[i], attributes[i], span, at);
        CHECK(rc == CUDA_SUCCESS || attributes[i] == CU_POINTER_ATTRIBUTE_HOST_POINTER, rc);
        if (rc != CUDA_SUCCESS)
            *(uintptr_t *)data[i] = 0;
    }
    return CUDA_SUCCESS;
}

#include "host.def"
