/* handle.c - handles that stay readable after they are freed. */
#include "internal.h"

#include <stdlib.h>

CUresult handle_new(void *made, enum handle_kind kind, const void *like, size_t bytes)
{
    SCOPED tables = locked(&cuda.lock);
    struct handle **kept = &cuda.free_handles[kind & 63], *handle = *kept;
    if (handle != NULL)
        *kept = handle->next_free;
    else
        handle = malloc(bytes);
    CHECK(handle != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    memcpy(handle, like, bytes);
    handle->kind = (uint32_t)kind;
    memcpy(made, &handle, sizeof handle);
    return CUDA_SUCCESS;
}

void handle_free(void *freed)
{
    SCOPED tables = locked(&cuda.lock);
    struct handle *handle = freed, **kept = &cuda.free_handles[handle->kind & 63];
    handle->kind = HANDLE_DEAD;
    handle->next_free = *kept;
    *kept = handle;
}

bool handle_is(const void *handle, enum handle_kind kind)
{
    return handle != NULL && ((uintptr_t)handle & 7) == 0 && ((const struct handle *)handle)->kind == (uint32_t)kind;
}

CUresult handle_ok(const void *handle, enum handle_kind kind, CUresult otherwise)
{
    TRY(ready());
    return handle_is(handle, kind) ? CUDA_SUCCESS : otherwise;
}

CUresult handle_end(void *handle, enum handle_kind kind, CUresult otherwise)
{
    TRY(handle_ok(handle, kind, otherwise));
    handle_free(handle);
    return CUDA_SUCCESS;
}
