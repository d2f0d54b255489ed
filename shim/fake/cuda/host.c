/* host.c - pinned host memory (no GPU memory: nothing is counted), and what a pointer is. */
#define _GNU_SOURCE
#include "internal.h"

#include <stdlib.h>
#include <sys/mman.h>

static CUresult host_new(void **at, size_t bytes, unsigned flags)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(at != NULL && bytes > 0, CUDA_ERROR_INVALID_VALUE);
    struct span *span = calloc(1, sizeof *span);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (span == NULL || memory == MAP_FAILED) {
        free(span);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *span = (struct span){.base = (uintptr_t)memory, .bytes = bytes, .kind = SPAN_HOST, .ctx = ctx, .device = ctx->device, .flags = flags};
    lock();
    const bool good = span_insert(span);
    unlock();
    *at = memory;
    return good ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemHostAlloc(void **at, size_t bytes, unsigned flags)
{
    return host_new(at, bytes, flags);
}

EXPORT CUresult cuMemAllocHost_v2(void **at, size_t bytes)
{
    return host_new(at, bytes, 0);
}

EXPORT CUresult cuMemAllocHost(void **at, unsigned bytes)
{
    return host_new(at, bytes, 0);
}

static CUresult host_end(void *at, enum span_kind kind, CUresult otherwise)
{
    CUcontext ctx;
    TRY(current(&ctx));
    lock();
    struct span *span = span_find((uintptr_t)at);
    const bool good = span != NULL && span->base == (uintptr_t)at && span->kind == kind;
    if (good)
        span_remove(span);
    unlock();
    CHECK(good, otherwise);
    if (kind == SPAN_HOST)
        munmap(at, span->bytes);
    free(span);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFreeHost(void *at)
{
    return host_end(at, SPAN_HOST, CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult cuMemHostUnregister(void *at)
{
    return host_end(at, SPAN_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

EXPORT CUresult cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(at != NULL && bytes > 0, CUDA_ERROR_INVALID_VALUE);
    struct span *span = calloc(1, sizeof *span);
    CHECK(span != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *span = (struct span){.base = (uintptr_t)at, .bytes = bytes, .kind = SPAN_REGISTERED, .ctx = ctx, .device = ctx->device, .flags = flags};
    lock();
    const bool good = span_insert(span);
    unlock();
    if (!good)
        free(span);
    return good ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

ALIAS(cuMemHostRegister, cuMemHostRegister_v2)

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned flags)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(device != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    lock();
    const struct span *span = span_find((uintptr_t)host);
    unlock();
    CHECK(span != NULL && (span->kind == SPAN_HOST || span->kind == SPAN_REGISTERED), CUDA_ERROR_INVALID_VALUE);
    *device = (CUdeviceptr)(uintptr_t)host;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetFlags(unsigned *flags, void *host)
{
    CUcontext ctx;
    TRY(current(&ctx));
    lock();
    const struct span *span = span_find((uintptr_t)host);
    unlock();
    CHECK(flags != NULL && span != NULL && (span->kind == SPAN_HOST || span->kind == SPAN_REGISTERED), CUDA_ERROR_INVALID_VALUE);
    *flags = span->flags;
    return CUDA_SUCCESS;
}

/* One attribute of a pointer. span is NULL for memory that CUDA does not know. */
static CUresult attribute_of(void *data, CUpointer_attribute attribute, const struct span *span, CUdeviceptr at)
{
    const bool host = span != NULL && (span->kind == SPAN_HOST || span->kind == SPAN_REGISTERED);
    CHECK(span != NULL || attribute == CU_POINTER_ATTRIBUTE_MAPPED, CUDA_ERROR_INVALID_VALUE);
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)data = span->ctx; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = at; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        CHECK(host || span->kind == SPAN_MANAGED, CUDA_ERROR_INVALID_VALUE);
        *(void **)data = (void *)(uintptr_t)at;
        break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned *)data = 0; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)data = span->id; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)data = span->kind == SPAN_MANAGED; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = span->device; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(unsigned *)data = span->kind == SPAN_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = (CUdeviceptr)span->base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = span->bytes; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned *)data = span != NULL; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned *)data = 0; break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(CUmemoryPool *)data = span->pool; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr at)
{
    TRY(ready());
    CHECK(data != NULL, CUDA_ERROR_INVALID_VALUE);
    lock();
    const CUresult rc = attribute_of(data, attribute, span_find((uintptr_t)at), at);
    unlock();
    return rc;
}

static size_t attribute_bytes(CUpointer_attribute attribute)
{
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: return 4;
    default: return 8;
    }
}

EXPORT CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **data, CUdeviceptr at)
{
    TRY(ready());
    CHECK(attributes != NULL && data != NULL && count > 0, CUDA_ERROR_INVALID_VALUE);
    lock();
    const struct span *span = span_find((uintptr_t)at);
    for (unsigned i = 0; i < count; i++)
        if (attribute_of(data[i], attributes[i], span, at) != CUDA_SUCCESS)
            memset(data[i], 0, attribute_bytes(attributes[i])); /* as documented: what is unknown reads as nothing */
    unlock();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr at)
{
    TRY(ready());
    CHECK(value != NULL && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, CUDA_ERROR_INVALID_VALUE);
    return span_covers(at, 1) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
