/* share.c - memory that another process or another interface made: IPC handles and external memory.
 *
 * It is there already; opening it makes this process one of those that keep it. So it is charged when it is opened, after the
 * driver has told its size, and closed again when it does not fit. Who made it is not known here: a block that two processes
 * of one container share is charged to both, which is too much, and never too little when the one that made it ends first.
 */
#include "hook.h"
#include "memory.h"

/* The driver gives the same address for the same handle, and wants it closed as often as it was opened. */
static CUresult opened(CUresult rc, CUdeviceptr at)
{
    struct owned known;
    size_t bytes = 0;
    struct card *card = rc == CUDA_SUCCESS ? current_card() : NULL;
    if (card == NULL)
        return rc;
    uint64_t key = OWNED_AS(OWNED_IPC, at);
    if (table_disown(key, &known)) {
        known.of = (void *)((uintptr_t)known.of + 1);
        table_own(known); /* the room it had is still there, or grows */
        return rc;
    }
    bool sized = tangram.driver.cuMemGetAddressRange_v2 != NULL &&
                 tangram.driver.cuMemGetAddressRange_v2(NULL, &bytes, at) == CUDA_SUCCESS;
    if (sized && reserve(card, bytes)) {
        if (table_own((struct owned){key, bytes, card, (void *)1}))
            return rc;
        lease_give_back(card, bytes);
    }
    tangram.driver.cuIpcCloseMemHandle(at);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *at, CUipcMemHandle handle, unsigned int flags)
{
    NEEDS(cuIpcOpenMemHandle);
    CUresult rc = tangram.driver.cuIpcOpenMemHandle(at, handle, flags);
    return opened(rc, rc == CUDA_SUCCESS ? *at : 0);
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *at, CUipcMemHandle handle, unsigned int flags)
{
    NEEDS(cuIpcOpenMemHandle_v2);
    CUresult rc = tangram.driver.cuIpcOpenMemHandle_v2(at, handle, flags);
    return opened(rc, rc == CUDA_SUCCESS ? *at : 0);
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr at)
{
    NEEDS(cuIpcCloseMemHandle);
    struct owned was;
    bool ours = table_disown(OWNED_AS(OWNED_IPC, at), &was);
    CUresult rc = tangram.driver.cuIpcCloseMemHandle(at);
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
    struct card *card = rc == CUDA_SUCCESS ? current_card() : NULL;
    if (card == NULL)
        return rc;
    if (tangram.driver.cuMemGetAddressRange_v2 != NULL && tangram.driver.cuMemGetAddressRange_v2(NULL, &bytes, *at) == CUDA_SUCCESS &&
        reserve(card, bytes))
        return settle(rc, *at, bytes, card);
    tangram.driver.cuMemFree_v2(*at);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Memory of Vulkan, OpenGL or another device that this process imports; what it says of the size is what it can map. */
EXPORT CUresult cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *how)
{
    NEEDS(cuImportExternalMemory);
    struct card *card = how != NULL ? current_card() : NULL;
    if (card == NULL)
        return tangram.driver.cuImportExternalMemory(memory, how);
    uint64_t bytes = how->size;
    if (!reserve(card, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuImportExternalMemory(memory, how);
    if (rc == CUDA_SUCCESS && !table_own((struct owned){OWNED_AS(OWNED_EXTERNAL, (uintptr_t)*memory), bytes, card, NULL})) {
        tangram.driver.cuDestroyExternalMemory(*memory);
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (rc != CUDA_SUCCESS)
        lease_give_back(card, bytes);
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
