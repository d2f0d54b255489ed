/* imported.c - memory that another process or another interface made: IPC handles and external memory.
 *
 * It exists already; a process that opens it keeps it alive. So it is charged when it is opened, after the
 * driver has returned its size, and closed again if it does not fit. The driver's names for IPC memory and pool
 * pointers are the same bytes for the same memory in every process (measured), so the arbiter charges a container once (shared.c).
 */
#include "hooks/hook.h"
#include "memory/memory.h"

/* The name is of the whole allocation, wherever in it the program points. */
EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr at)
{
    NEEDS(cuIpcGetMemHandle);
    struct owned made;
    CUdeviceptr base = at;
    size_t bytes;
    struct elastic_found elastic;
    CUresult rc = tangram.driver.cuIpcGetMemHandle(handle, at);
    if (rc == CUDA_ERROR_INVALID_VALUE && handle != NULL && elastic_find(at, &elastic) && !elastic.opened && !elastic.pooled)
        return ipc_get(handle, at); /* the driver makes none for such memory */
    if (rc != CUDA_SUCCESS || grant_ready() != GRANT_GOOD)
        return rc;
    tangram.driver.cuMemGetAddressRange_v2(&base, &bytes, at);
    if (table_find(base, &made) && made.of == NULL)
        shared_made(made.gpu, WIRE_IPC, base, made.bytes & ~OWNED_MANAGED, handle);
    return rc;
}

EXPORT CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *data, CUdeviceptr at)
{
    NEEDS(cuMemPoolExportPointer);
    struct owned made;
    CUresult rc = tangram.driver.cuMemPoolExportPointer(data, at);
    if (rc == CUDA_SUCCESS && grant_ready() == GRANT_GOOD && table_find(at, &made))
        shared_made(made.gpu, WIRE_POOL, at, made.bytes, data);
    return rc;
}

/* The driver returns the same address for the same handle, and requires as many closes as opens. */
static CUresult opened(CUresult rc, CUdeviceptr at, const CUipcMemHandle *handle)
{
    struct owned known;
    size_t bytes = 0;
    struct gpu *gpu = rc == CUDA_SUCCESS ? current_gpu() : NULL;
    if (gpu == NULL)
        return rc;
    uint64_t key = OWNED_AS(OWNED_IPC, at);
    if (table_disown(key, &known)) {
        known.of = (void *)((uintptr_t)known.of + 1);
        table_own(known); /* its slot is still there, or the table grows */
        return rc;
    }
    bool sized = tangram.driver.cuMemGetAddressRange_v2(NULL, &bytes, at) == CUDA_SUCCESS;
    if (sized && shared_opened(gpu, WIRE_IPC, key, bytes, handle)) {
        struct owned entry = {key, bytes, gpu, (void *)1};
        if (table_own(entry))
            return rc;
        shared_end_or_give_back(&entry);
    }
    tangram.driver.cuIpcCloseMemHandle(at);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *at, CUipcMemHandle handle, unsigned int flags)
{
    NEEDS(cuIpcOpenMemHandle);
    if (UNLIKELY(ipc_is_emulated(&handle)))
        return ipc_open(at, &handle, flags);
    CUresult rc = tangram.driver.cuIpcOpenMemHandle(at, handle, flags);
    return opened(rc, rc == CUDA_SUCCESS ? *at : 0, &handle);
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *at, CUipcMemHandle handle, unsigned int flags)
{
    NEEDS(cuIpcOpenMemHandle_v2);
    if (UNLIKELY(ipc_is_emulated(&handle)))
        return ipc_open(at, &handle, flags);
    CUresult rc = tangram.driver.cuIpcOpenMemHandle_v2(at, handle, flags);
    return opened(rc, rc == CUDA_SUCCESS ? *at : 0, &handle);
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr at)
{
    NEEDS(cuIpcCloseMemHandle);
    struct owned was;
    CUresult rc;
    if (ipc_close(at, &rc))
        return rc;
    bool ours = table_disown(OWNED_AS(OWNED_IPC, at), &was);
    rc = tangram.driver.cuIpcCloseMemHandle(at);
    if (ours && rc == CUDA_SUCCESS && (uintptr_t)was.of > 1) {
        was.of = (void *)((uintptr_t)was.of - 1);
        table_own(was);
    } else if (ours) {
        settle_handle(rc, &was);
    }
    return rc;
}

/* A pointer of another process's pool. It is freed as any other pointer is. */
EXPORT CUresult cuMemPoolImportPointer(CUdeviceptr *at, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
    NEEDS(cuMemPoolImportPointer);
    size_t bytes = 0;
    CUresult rc = tangram.driver.cuMemPoolImportPointer(at, pool, data);
    struct gpu *gpu = rc == CUDA_SUCCESS ? current_gpu() : NULL;
    if (gpu == NULL)
        return rc;
    if (tangram.driver.cuMemGetAddressRange_v2(NULL, &bytes, *at) == CUDA_SUCCESS &&
        shared_opened(gpu, WIRE_POOL, *at, bytes, data)) {
        struct owned entry = {*at, bytes, gpu, NULL};
        if (table_own(entry))
            return rc;
        shared_end_or_give_back(&entry);
    }
    tangram.driver.cuMemFree_v2(*at);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Memory of Vulkan, OpenGL or another device that this process imports; its size is what the process can map. */
EXPORT CUresult cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *how)
{
    NEEDS(cuImportExternalMemory);
    struct gpu *gpu = how != NULL ? current_gpu() : NULL;
    if (gpu == NULL)
        return tangram.driver.cuImportExternalMemory(memory, how);
    uint64_t bytes = how->size;
    if (!reserve(gpu, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuImportExternalMemory(memory, how);
    if (rc == CUDA_SUCCESS && !table_own((struct owned){OWNED_AS(OWNED_EXTERNAL, (uintptr_t)*memory), bytes, gpu, NULL})) {
        tangram.driver.cuDestroyExternalMemory(*memory);
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (rc != CUDA_SUCCESS)
        lease_give_back(gpu, bytes);
    return rc;
}

EXPORT CUresult cuDestroyExternalMemory(CUexternalMemory memory)
{
    NEEDS(cuDestroyExternalMemory);
    struct owned was;
    bool ours = table_disown(OWNED_AS(OWNED_EXTERNAL, (uintptr_t)memory), &was);
    CUresult rc = tangram.driver.cuDestroyExternalMemory(memory);
    if (ours)
        settle_handle(rc, &was);
    return rc;
}
