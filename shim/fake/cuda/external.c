/* external.c - memory of another interface (Vulkan, OpenGL): described, without content, and counted where it was made. */
#include "internal.h"

struct CUextMemory_st {
    struct handle handle;
    unsigned long long bytes;
};

EXPORT CUresult cuImportExternalMemory(CUexternalMemory *made, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *how)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(made != NULL && how != NULL && how->size > 0 && how->type == CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, CUDA_ERROR_INVALID_VALUE);
    CUexternalMemory memory = handle_new(HANDLE_EXTERNAL, sizeof *memory);
    CHECK(memory != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    memory->bytes = how->size;
    *made = memory;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDestroyExternalMemory(CUexternalMemory memory)
{
    TRY(ready());
    CHECK(handle_is(memory, HANDLE_EXTERNAL), CUDA_ERROR_INVALID_HANDLE);
    handle_free(memory);
    return CUDA_SUCCESS;
}
