/* share.c - memory that crosses processes: the daemon holds the descriptor and counts the holders; IPC handles. */
#define _GNU_SOURCE
#include "internal.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define IPC_MAGIC 0x43504946u /* "FIPC" */

struct ipc {
    uint32_t magic, pad;
    uint64_t id, bytes, inside; /* where in the shared pages it starts */
};
_Static_assert(sizeof(struct ipc) <= sizeof(CUipcMemHandle), "an IPC handle has 64 bytes");

static bool ask(enum fake_type type, struct fake_object *object, int send_fd, int *got_fd)
{
    static struct fake_message message; /* under lock */
    message.type = (uint32_t)type;
    message.object = *object;
    const bool good = client_ask(&cuda.client, &message, send_fd, got_fd) == 0;
    *object = message.object;
    return good;
}

bool object_share(uint64_t offset, uint64_t bytes, int device, uint64_t *id)
{
    struct fake_object object = {.offset = offset, .bytes = bytes, .unit = cuda.device[device].unit};
    const bool good = *id != 0 || ask(FAKE_SHARE, &object, cuda.arena_fd, NULL);
    if (good && *id == 0)
        *id = object.id;
    return good;
}

bool object_import(uint64_t id, struct fake_object *object, int *fd)
{
    *object = (struct fake_object){.id = id};
    return ask(FAKE_IMPORT, object, -1, fd) && *fd >= 0;
}

void object_release(uint64_t id)
{
    struct fake_object object = {.id = id};
    ask(FAKE_RELEASE, &object, -1, NULL);
}

int device_of_unit(uint32_t unit)
{
    for (int device = 0; device < cuda.devices; device++)
        if (cuda.device[device].unit == unit)
            return device;
    return -1;
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr at)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(handle != NULL, CUDA_ERROR_INVALID_VALUE);
    lock();
    struct span *span = span_find((uintptr_t)at);
    uint64_t id = 0, inside = 0;
    if (span != NULL && span->kind == SPAN_DEVICE && span->base == (uintptr_t)at) {
        if (span->place != NULL) { /* the whole block, as a real driver shares it */
            id = place_share(span->place, span->device);
            inside = span->place->at;
        } else if (object_share(span->offset, span->charged, span->device, &span->object)) {
            id = span->object;
        }
    }
    const bool good = id != 0;
    if (good) {
        const struct ipc ipc = {.magic = IPC_MAGIC, .id = id, .bytes = span->bytes, .inside = inside};
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &ipc, sizeof ipc);
    }
    unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Maps what was imported; the descriptor is closed by the caller. */
struct span *map_import(const struct fake_object *object, int fd, CUcontext ctx, uint64_t bytes)
{
    const uint64_t inside = object->offset & 4095;
    struct span *span = calloc(1, sizeof *span);
    if (span == NULL)
        return NULL;
    span->room = rounded(inside + bytes, 4096);
    void *at = mmap(NULL, span->room, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, (off_t)(object->offset - inside));
    const int device = device_of_unit(object->unit);
    span->base = at == MAP_FAILED ? 0 : (uintptr_t)at + inside;
    span->bytes = bytes;
    span->kind = SPAN_IPC;
    span->ctx = ctx;
    span->device = device;
    span->object = object->id;
    if (at != MAP_FAILED && device >= 0 && span_insert(span))
        return span;
    if (at != MAP_FAILED)
        munmap(at, span->room);
    free(span);
    return NULL;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *at, CUipcMemHandle handle, unsigned flags)
{
    CUcontext ctx;
    struct ipc ipc;
    struct fake_object object;
    int fd = -1;
    TRY(current(&ctx));
    memcpy(&ipc, &handle, sizeof ipc);
    CHECK(at != NULL && flags <= 1 && ipc.magic == IPC_MAGIC, CUDA_ERROR_INVALID_VALUE);
    struct span *span = NULL;
    lock();
    if (object_import(ipc.id, &object, &fd)) {
        const bool fits = ipc.inside <= object.bytes && ipc.bytes <= object.bytes - ipc.inside;
        object.offset += ipc.inside;
        span = fits ? map_import(&object, fd, ctx, ipc.bytes) : NULL;
        if (span == NULL)
            object_release(ipc.id);
        close(fd);
    }
    unlock();
    CHECK(span != NULL, CUDA_ERROR_INVALID_HANDLE);
    *at = (CUdeviceptr)span->base;
    return CUDA_SUCCESS;
}

ALIAS(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2)

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr at)
{
    CUcontext ctx;
    TRY(current(&ctx));
    lock();
    struct span *span = span_find((uintptr_t)at);
    const bool good = span != NULL && span->kind == SPAN_IPC && span->base == (uintptr_t)at;
    if (good)
        memory_gone(span);
    unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
