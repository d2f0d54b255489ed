/* handle.c - handles that stay readable after they are freed. */
#include "internal.h"

#include <stdlib.h>

void *handle_new(enum handle_kind kind, size_t bytes)
{
    const unsigned place = (unsigned)(kind & 63);
    lock();
    struct handle *handle = cuda.free_handles[place];
    if (handle != NULL)
        cuda.free_handles[place] = handle->next_free;
    unlock();
    if (handle == NULL)
        handle = malloc(bytes);
    if (handle == NULL)
        return NULL;
    memset(handle, 0, bytes);
    handle->kind = (uint32_t)kind;
    handle->bytes = (uint32_t)bytes;
    return handle;
}

void handle_free(void *freed)
{
    struct handle *handle = freed;
    const unsigned place = handle->kind & 63;
    lock();
    handle->kind = HANDLE_DEAD;
    handle->next_free = cuda.free_handles[place];
    cuda.free_handles[place] = handle;
    unlock();
}
