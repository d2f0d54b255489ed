/* ipc.h - emulated IPC handles of elastic memory. process.h includes this.
 *
 * The driver makes no IPC handle for memory of cuMemCreate. So the library makes one: 64 bytes that begin as no handle of the driver's does. A process
 * that opens it gets the blocks' descriptors through the arbiter (link/passing.c), and maps them.
 */
#ifndef TANGRAM_IPC_H
#define TANGRAM_IPC_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "abi.h"
#include "link/wire.h"

struct gpu;
struct elastic_found;
struct elastic_region;

/* Its first WIRE_KEY_BYTES are the key of HOLD and DROP: allocations in the same blocks have them in common. */
struct ipc_handle {
    char magic[8];
    uint8_t token[24]; /* random: of the region */
    uint64_t offset, requested; /* of the allocation, in the region */
    uint64_t number;            /* of the allocation: no other of this process has it */
    uint64_t zero;
};
_Static_assert(sizeof(struct ipc_handle) == WIRE_HANDLE_BYTES, "an IPC handle");

/* Of a region that others may open. */
struct ipc_region {
    bool resident;      /* it is not swapped out any more, and not used again once it has no live request */
    bool converted;     /* its lease is resident, and the key was stated */
    unsigned exporting; /* threads that need its blocks: it is not released meanwhile */
    uint8_t token[24];
};

struct ipc_opened;
struct ipc { /* under elastic.lock, but for what is atomic */
    struct elastic_region *ended; /* regions without a live request that are resident, or were being exported */
    struct ipc_opened *opened;    /* memory of other processes that this one has open */
    _Atomic bool any_ended, any_opened;
};

bool ipc_is_emulated(const void *handle);

/* ipc.c: what this process exports */
CUresult ipc_get(void *handle, CUdeviceptr at); /* CUDA_ERROR_INVALID_VALUE: it has none, and stderr says why */
void ipc_export(uint32_t seq, const void *handle); /* EXPORT; not locked, by the thread that reads */
bool ipc_is_ours(const void *handle);
void ipc_ended(struct elastic_region *region); /* locked */
void ipc_release_ended(void);

/* opened.c: what it opens */
CUresult ipc_open(CUdeviceptr *at, const void *handle, unsigned int flags);
bool ipc_close(CUdeviceptr at, CUresult *rc); /* false: no emulated handle is open there */
bool ipc_find(CUdeviceptr at, struct elastic_found *found); /* locked */
bool ipc_in(CUdeviceptr at, uint64_t bytes); /* locked: is any of it mapped for what is open? */
void ipc_forget_context(CUcontext context, struct gpu *gpu, uint64_t before);

#endif
