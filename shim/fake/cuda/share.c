/* share.c - memory that crosses processes: the daemon holds the descriptor and counts the holders. IPC handles, and the
 * pointers and handles of pools; what they stand for stays counted where it was made. */
#define _GNU_SOURCE
#include "internal.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define IPC_MAGIC 0x4c4f4f5043504946u
#define POOL_MAGIC 0x4c4f4f5046414b45u

/* What an IPC handle and a pool's exported pointer hold. */
struct lent {
    uint64_t magic, id, bytes, inside; /* inside: where in the shared pages it starts */
};
_Static_assert(sizeof(struct lent) <= sizeof(CUipcMemHandle), "an IPC handle has 64 bytes");
_Static_assert(sizeof(CUipcMemHandle) == sizeof(CUmemPoolPtrExportData), "and so has an exported pointer");

/* A token is a file with a magic number and another one. */
CUresult token_export(void *shareable, uint64_t magic, uint64_t id)
{
    const uint64_t token[] = {magic, id};
    const int fd = new_memfd("fake-gpu-handle");
    CHECK(fd >= 0 && write(fd, token, sizeof token) == (ssize_t)sizeof token, CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)shareable = fd;
    return CUDA_SUCCESS;
}

CUresult token_import(void *shareable, uint64_t magic, uint64_t *id)
{
    uint64_t token[2];
    const ssize_t got = pread((int)(intptr_t)shareable, token, sizeof token, 0);
    CHECK(got == (ssize_t)sizeof token && token[0] == magic, CUDA_ERROR_INVALID_VALUE);
    *id = token[1];
    return CUDA_SUCCESS;
}

static bool ask(enum fake_type type, struct fake_object *object, int send_fd, int *got_fd)
{
    static struct fake_message message; /* under lock */
    SCOPED tables = hold(&cuda.lock);
    message.type = (uint32_t)type;
    message.object = *object;
    const bool good = client_ask(&cuda.client, &message, send_fd, got_fd) == 0;
    *object = message.object;
    return good;
}

bool object_share(struct physical *physical)
{
    struct fake_object object = {.offset = physical->offset, .bytes = physical->charged, .unit = cuda.device[physical->device].unit};
    if (physical->object == 0 && ask(FAKE_SHARE, &object, cuda.arena_fd, NULL))
        physical->object = object.id;
    return physical->object != 0;
}

void object_release(uint64_t id)
{
    struct fake_object object = {.id = id};
    ask(FAKE_RELEASE, &object, -1, NULL);
}

static int device_of_unit(uint32_t unit)
{
    for (int device = 0; device < cuda.devices; device++)
        if (cuda.device[device].unit == unit)
            return device;
    return -1;
}

struct physical *physical_import(uint64_t id)
{
    struct fake_object object = {.id = id};
    int fd = -1;
    CHECK(ask(FAKE_IMPORT, &object, -1, &fd) && fd >= 0, NULL);
    const int device = device_of_unit(object.unit);
    struct physical *physical = device >= 0 ? handle_new(HANDLE_PHYSICAL, sizeof *physical) : NULL;
    if (physical == NULL) {
        object_release(id);
        close(fd);
        return NULL;
    }
    physical->device = device;
    physical->fd = fd;
    physical->offset = object.offset;
    physical->charged = object.bytes;
    physical->object = id;
    physical->users = 1;
    return physical;
}

/* Writes what another process needs to map the span. */
static bool lend(struct span *span, uint64_t magic, void *data)
{
    CHECK(span != NULL && object_share(span->physical), false);
    const struct lent lent = {magic, span->physical->object, span->bytes, span->offset - span->physical->offset};
    memset(data, 0, sizeof(CUipcMemHandle));
    memcpy(data, &lent, sizeof lent);
    return true;
}

/* Maps what another process lent; NULL: it is gone, or not of a card of this process. */
static struct span *borrow(const struct lent *lent, CUcontext ctx, CUmemoryPool pool)
{
    SCOPED tables = hold(&cuda.lock);
    struct physical *physical = physical_import(lent->id);
    CHECK(physical != NULL, NULL);
    const uint64_t start = physical->offset + lent->inside, skip = start & 4095, room = rounded(skip + lent->bytes, 4096);
    const bool fits = pool != NULL || (lent->inside <= physical->charged && lent->bytes <= physical->charged - lent->inside);
    void *at = fits ? mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, physical->fd, (off_t)(start - skip)) : MAP_FAILED;
    struct span *span = NULL;
    if (at != MAP_FAILED)
        span = span_new(&(struct span){.base = (uintptr_t)at + skip, .bytes = lent->bytes, .room = room, .kind = SPAN_IPC, .ctx = ctx,
                                       .device = physical->device, .pool = pool, .physical = physical});
    if (span == NULL && at != MAP_FAILED)
        munmap(at, room);
    if (span == NULL)
        physical_drop(physical);
    return span;
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr at)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(handle != NULL, CUDA_ERROR_INVALID_VALUE);
    SCOPED tables = hold(&cuda.lock);
    return lend(span_from(at, SPAN_DEVICE), IPC_MAGIC, handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *at, CUipcMemHandle handle, unsigned flags)
{
    CUcontext ctx;
    struct lent lent;
    TRY(current(&ctx));
    memcpy(&lent, &handle, sizeof lent);
    CHECK(at != NULL && flags <= 1 && lent.magic == IPC_MAGIC, CUDA_ERROR_INVALID_VALUE);
    const struct span *span = borrow(&lent, ctx, NULL);
    CHECK(span != NULL, CUDA_ERROR_INVALID_HANDLE);
    *at = (CUdeviceptr)span->base;
    return CUDA_SUCCESS;
}

ALIAS(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2)

EXPORT CUresult cuMemPoolExportToShareableHandle(void *shareable, CUmemoryPool pool, CUmemAllocationHandleType type, unsigned long long flags)
{
    TRY(handle_ok(pool, HANDLE_POOL, CUDA_ERROR_INVALID_VALUE));
    CHECK(shareable != NULL && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && flags == 0, CUDA_ERROR_INVALID_VALUE);
    return token_export(shareable, POOL_MAGIC, (uint64_t)pool->device);
}

EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *shareable, CUmemAllocationHandleType type, unsigned long long flags)
{
    uint64_t device;
    TRY(ready());
    CHECK(pool != NULL && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && flags == 0, CUDA_ERROR_INVALID_VALUE);
    TRY(token_import(shareable, POOL_MAGIC, &device));
    TRY(device_ok((int)device));
    return pool_new(pool, (int)device, 0);
}

EXPORT CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *data, CUdeviceptr at)
{
    TRY(ready());
    CHECK(data != NULL, CUDA_ERROR_INVALID_VALUE);
    SCOPED tables = hold(&cuda.lock);
    return lend(span_from(at, SPAN_POOL), POOL_MAGIC, data) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemPoolImportPointer(CUdeviceptr *at, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
    CUcontext ctx;
    struct lent lent;
    TRY(current(&ctx));
    CHECK(at != NULL && data != NULL && handle_is(pool, HANDLE_POOL), CUDA_ERROR_INVALID_VALUE);
    memcpy(&lent, data, sizeof lent);
    CHECK(lent.magic == POOL_MAGIC, CUDA_ERROR_INVALID_VALUE);
    const struct span *span = borrow(&lent, ctx, pool);
    CHECK(span != NULL, CUDA_ERROR_INVALID_VALUE);
    *at = (CUdeviceptr)span->base;
    return CUDA_SUCCESS;
}
