/* poolshare.c - pools and their pointers in another process. The memory is counted in the pool that it is of. */
#define _GNU_SOURCE
#include "internal.h"

#include <unistd.h>

#define POOL_MAGIC 0x4c4f4f5046414b45u

struct pointer {
    uint64_t magic, id, bytes;
};

EXPORT CUresult cuMemPoolExportToShareableHandle(void *shareable, CUmemoryPool pool, CUmemAllocationHandleType type, unsigned long long flags)
{
    TRY(ready());
    CHECK(shareable != NULL && handle_is(pool, HANDLE_POOL) && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && flags == 0, CUDA_ERROR_INVALID_VALUE);
    const struct pointer token = {.magic = POOL_MAGIC, .id = (uint64_t)pool->device};
    const int fd = new_memfd("fake-gpu-pool");
    CHECK(fd >= 0 && write(fd, &token, sizeof token) == (ssize_t)sizeof token, CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)shareable = fd;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *shareable, CUmemAllocationHandleType type, unsigned long long flags)
{
    struct pointer token;
    TRY(ready());
    CHECK(pool != NULL && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && flags == 0, CUDA_ERROR_INVALID_VALUE);
    CHECK(pread((int)(intptr_t)shareable, &token, sizeof token, 0) == (ssize_t)sizeof token && token.magic == POOL_MAGIC, CUDA_ERROR_INVALID_VALUE);
    TRY(device_ok((int)token.id));
    return pool_new(pool, (int)token.id, 0);
}

EXPORT CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *data, CUdeviceptr at)
{
    TRY(ready());
    CHECK(data != NULL, CUDA_ERROR_INVALID_VALUE);
    lock();
    struct span *span = span_find((uintptr_t)at);
    const bool good = span != NULL && span->kind == SPAN_POOL && span->base == (uintptr_t)at &&
                      object_share(span->offset, 0, span->device, &span->object);
    if (good) {
        const struct pointer pointer = {.magic = POOL_MAGIC, .id = span->object, .bytes = span->bytes};
        memset(data, 0, sizeof *data);
        memcpy(data, &pointer, sizeof pointer);
    }
    unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemPoolImportPointer(CUdeviceptr *at, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
    CUcontext ctx;
    struct pointer pointer;
    struct fake_object object;
    struct span *span = NULL;
    int fd = -1;
    TRY(current(&ctx));
    CHECK(at != NULL && data != NULL && handle_is(pool, HANDLE_POOL), CUDA_ERROR_INVALID_VALUE);
    memcpy(&pointer, data, sizeof pointer);
    CHECK(pointer.magic == POOL_MAGIC, CUDA_ERROR_INVALID_VALUE);
    lock();
    if (object_import(pointer.id, &object, &fd)) {
        span = map_import(&object, fd, ctx, pointer.bytes);
        if (span == NULL)
            object_release(pointer.id);
        else
            span->pool = pool;
        close(fd);
    }
    unlock();
    CHECK(span != NULL, CUDA_ERROR_INVALID_VALUE);
    *at = (CUdeviceptr)span->base;
    return CUDA_SUCCESS;
}
