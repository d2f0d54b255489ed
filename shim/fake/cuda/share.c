/* imported.c - memory that crosses processes: the page counts the holders. IPC handles, and the
 * pointers and handles of pools; what they stand for stays counted where it was made. */
#define _GNU_SOURCE
#include "internal.h"
#include "calls.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define LENT_MAGIC 0x544e454c46414b45u

/* The contents of an IPC handle and of a pool's exported pointer. */
struct lent {
    uint64_t magic, kind, id, bytes, inside; /* inside: where in the shared pages it starts */
    uint64_t number;                         /* of the allocation: no other of its process has it */
};
_Static_assert(sizeof(struct lent) <= sizeof(CUipcMemHandle), "an IPC handle has 64 bytes");
_Static_assert(sizeof(CUipcMemHandle) == sizeof(CUmemPoolPtrExportData), "and so has an exported pointer");

CUresult token_export(void *shareable, CUmemAllocationHandleType type, uint64_t magic, uint64_t id)
{
    CHECK(shareable != NULL && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
    const uint64_t token[] = {magic, id};
    const int fd = new_memfd("fake-gpu-handle");
    CHECK(fd >= 0 && write(fd, token, sizeof token) == (ssize_t)sizeof token, CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)shareable = fd;
    return CUDA_SUCCESS;
}

CUresult token_import(void *shareable, CUmemAllocationHandleType type, uint64_t magic, uint64_t *id)
{
    uint64_t token[2];
    CHECK(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
    const ssize_t got = pread((int)(intptr_t)shareable, token, sizeof token, 0);
    CHECK(got == (ssize_t)sizeof token && token[0] == magic, CUDA_ERROR_INVALID_VALUE);
    *id = token[1];
    return CUDA_SUCCESS;
}

bool object_share(struct physical *physical)
{
    const struct fake_object like = {.offset = physical->offset, .capacity = physical->capacity, .bytes = physical->charged, .unit = cuda.device[physical->device].unit};
    if (physical->object == 0)
        physical->object = object_new(cuda.client.page, cuda.client.slot, like);
    return physical->object != 0;
}

static int device_of_unit(uint32_t unit)
{
    for (int device = 0; device < cuda.devices; device++)
        if (cuda.device[device].unit == unit)
            return device;
    return -1;
}

CUresult physical_import(uint64_t id, struct physical **made)
{
    struct fake_object is;
    client_catch_up(&cuda.client);
    CHECK(object_reference(cuda.client.page, cuda.client.slot, id, &is), CUDA_ERROR_INVALID_VALUE);
    const int device = device_of_unit(is.unit);
    if (device >= 0)
        return MAKE(made, HANDLE_PHYSICAL, physical, .device = device, .offset = is.offset, .capacity = is.capacity, .charged = is.bytes, .object = id,
                    .users = 1, .imported = true);
    object_release(cuda.client.page, cuda.client.slot, id);
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult lend(CUdeviceptr at, enum span_kind kind, void *data)
{
    CHECK(data != NULL, CUDA_ERROR_INVALID_VALUE);
    SCOPED tables = locked(&cuda.lock);
    struct span *span;
    TRY(span_get(at, kind, CUDA_ERROR_INVALID_VALUE, &span)); /* of all of it, wherever in it the pointer is */
    CHECK(kind == SPAN_DEVICE || span->base == (uintptr_t)at, CUDA_ERROR_INVALID_VALUE);
    CHECK(object_share(span->physical), CUDA_ERROR_INVALID_VALUE);
    const struct lent lent = {LENT_MAGIC, kind, span->physical->object, span->bytes, span->offset - span->physical->offset, span->id};
    memset(data, 0, sizeof(CUipcMemHandle));
    memcpy(data, &lent, sizeof lent);
    return CUDA_SUCCESS;
}

/* Its address in this process; MAP_FAILED: the handle is not valid. */
static void *map_lent(const struct lent *lent, const struct physical *physical, uint64_t skip, uint64_t capacity)
{
    const bool fits = lent->inside <= physical->charged && lent->bytes <= physical->charged - lent->inside;
    CHECK(lent->kind == SPAN_POOL || fits, MAP_FAILED); /* what is of a pool is not charged */
    void *at = addresses_take(capacity, 4096);
    const bool mapped = at != MAP_FAILED && arena_map((uintptr_t)at, capacity, PROT_READ | PROT_WRITE, physical->offset + lent->inside - skip);
    return mapped ? at : MAP_FAILED;
}

/* Memory of the same object in this process: its own, or that allocation, opened in that context. */
static bool is_own(const struct span *span, const void *what)
{
    const struct lent *lent = what;
    return span->kind == SPAN_DEVICE && span->physical->object == lent->id;
}

struct opening {
    const struct lent *lent;
    CUcontext ctx;
};

static bool is_opened(const struct span *span, const void *what)
{
    const struct opening *opening = what;
    return span->kind == SPAN_IPC && span->pool == NULL && span->ctx == opening->ctx && span->physical->object == opening->lent->id &&
           span->lent == opening->lent->number;
}

CUresult borrow(CUdeviceptr *at, const void *data, enum span_kind kind, CUmemoryPool pool)
{
    CUcontext ctx;
    struct lent lent;
    struct physical *physical;
    TRY(current(&ctx));
    CHECK(at != NULL && data != NULL, CUDA_ERROR_INVALID_VALUE);
    memcpy(&lent, data, sizeof lent);
    CHECK(lent.magic == LENT_MAGIC && lent.kind == kind, CUDA_ERROR_INVALID_VALUE);
    const CUresult refused = kind == SPAN_DEVICE ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    SCOPED tables = locked(&cuda.lock);
    CHECK(kind != SPAN_DEVICE || span_such(is_own, &lent) == NULL, CUDA_ERROR_INVALID_CONTEXT);
    struct span *opened = kind == SPAN_DEVICE ? span_such(is_opened, &(struct opening){&lent, ctx}) : NULL;
    if (opened != NULL) {
        opened->opens++;
        *at = (CUdeviceptr)opened->base;
        return CUDA_SUCCESS;
    }
    CHECK(physical_import(lent.id, &physical) == CUDA_SUCCESS, refused);
    const uint64_t skip = (physical->offset + lent.inside) & 4095, capacity = rounded(skip + lent.bytes, 4096);
    void *mapped = map_lent(&lent, physical, skip, capacity);
    const struct span like = {.base = (uintptr_t)mapped + skip, .bytes = lent.bytes, .capacity = capacity, .kind = SPAN_IPC, .ctx = ctx,
                              .device = physical->device, .pool = pool, .physical = physical, .lent = lent.number};
    if (mapped == MAP_FAILED || span_new(&cuda.spans, &like) == NULL) {
        physical_drop(physical);
        return refused;
    }
    *at = (CUdeviceptr)like.base;
    return CUDA_SUCCESS;
}

#include "share.def"
