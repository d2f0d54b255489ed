/* elastic.h - memory that can be swapped: served from blocks whose addresses stay when the memory behind them is exchanged.
 *
 * Where a container may burst on a GPU, cuMemAlloc and cuMemAllocPitch map physical blocks of cuMemCreate at addresses that are reserved
 * once. A region is a range of such addresses: of one large request, whose blocks have at most ELASTIC_BLOCK bytes each, or one block
 * that small requests share. A region without a live request is kept, mapped, for the next request of its size (kept.c); it is leased and
 * not used, and released when the lease is needed. process.h includes this.
 */
#ifndef TANGRAM_ELASTIC_H
#define TANGRAM_ELASTIC_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "elastic/heap.h"
#include "lock.h"

struct gpu;

/* A handle costs 78 us to make, map, unmap and release (H200): 0.74 ms a GB at this size, and larger ones cost no less a GB. */
#ifndef ELASTIC_BLOCK /* a test has smaller ones */
#define ELASTIC_BLOCK ((uint64_t)512 << 20)
#endif

enum block_state {
    BLOCK_RESIDENT,
    BLOCK_CHOSEN, /* to be swapped out: it may be exported, and is not released */
    BLOCK_AWAY,   /* its content is in the host pool; nothing is mapped here */
    BLOCK_MADE,   /* mapped again, and its content is not back yet */
};

struct elastic_block {
    uint64_t id; /* no block of this process has it again */
    uint64_t at, bytes;
    CUmemGenericAllocationHandle handle;
    enum block_state state;
    struct elastic_region *region;
};

struct elastic_region {
    struct gpu *gpu;
    CUdevice device;
    CUdeviceptr base;
    uint64_t bytes;
    struct range *first;   /* of its ranges; a large request's region has one */
    struct range **starts; /* of small requests: by the place of its first byte, in grains; NULL: it has one large request */
    unsigned live;         /* requests */
    unsigned moving;       /* blocks that are not resident */
    struct elastic_region *next_kept, *older, *newer; /* kept.c */
    unsigned blocks;
    struct elastic_block block[];
};

enum { ELASTIC_KEPT_LISTS = 64 };

/* Regions without a live request. */
struct elastic_kept {
    struct elastic_region *list[ELASTIC_KEPT_LISTS]; /* by size */
    struct elastic_region *oldest, *newest;
};

/* Why this process cannot be swapped. The first that comes up stays; texts: reasons.c. */
enum elastic_reason {
    ELASTIC_ABLE,
    ELASTIC_NO_HELPER,      /* an idle program would be swapped by nothing */
    ELASTIC_SEVERAL_GPUS,   /* what the program enables with cuCtxEnablePeerAccess would not reach it */
    ELASTIC_RDMA_DEVICE,    /* verbs register memory without any call of CUDA */
    ELASTIC_ADDRESS_RANGE,  /* cuMemGetHandleForAddressRange */
    ELASTIC_P2P_TOKENS,     /* CU_POINTER_ATTRIBUTE_P2P_TOKENS */
    ELASTIC_SYNC_MEMOPS,    /* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, which no driver sets on such memory */
    ELASTIC_DRIVER_REFUSED, /* the driver has no such memory, or gave an error for it */
    ELASTIC_REASONS
};

struct elastic {
    struct lock lock; /* guards what follows, but for what is atomic */
    struct elastic_region **region; /* by address */
    size_t regions, regions_capacity;
    struct elastic_block **block; /* by id */
    size_t blocks, blocks_capacity;
    struct heap heap[CONTEXT_GPUS];         /* by GPU->at: free ranges beside live small requests */
    struct elastic_kept kept[CONTEXT_GPUS]; /* by GPU->at */
    uint64_t small_bytes[CONTEXT_GPUS];     /* of the regions that small requests share */
    uint64_t ids;                           /* of blocks */
    _Atomic uint64_t numbers;               /* of allocations */
    _Atomic bool any;                       /* some region was made */
    _Atomic int reason;                     /* enum elastic_reason */
    _Atomic bool looked_for_rdma;
    CUcontext anchored[CONTEXT_GPUS];       /* by GPU->at: the context of its anchor, which may have found no room; anchor.c */
};

/* burst.c: which GPUs the file `burst` beside the grant names. */
void burst_look(void); /* reads it if it changed; when the grant was read, and once a second */
struct grant;
bool burst_read(const char *text, size_t length, const struct grant *grant, bool bursts[], char *why, size_t why_bytes);

/* reasons.c */
bool elastic_able(struct gpu *gpu);
void elastic_unable(enum elastic_reason reason);
enum elastic_reason elastic_reason(void);
const char *elastic_reason_text(enum elastic_reason reason);

/* elastic.c. False: this request is not served here; the driver's own call is next. */
bool elastic_alloc(struct gpu *gpu, CUdeviceptr *at, uint64_t bytes, CUresult *rc);
/* What a pointer into a live request is in. */
struct elastic_found {
    struct gpu *gpu;
    CUdevice device;
    uint64_t at, requested;    /* of the request */
    uint64_t mapping, mapped;  /* the block that the address is in, and its bytes */
    uint64_t number, block;    /* of the request, of the block */
    CUcontext context;
};
bool elastic_find(CUdeviceptr at, struct elastic_found *found);
bool elastic_free(CUdeviceptr at, CUresult *rc); /* false: no live request begins there */
bool elastic_free_async(CUdeviceptr at, CUstream stream, bool per_thread, CUresult *rc);
void elastic_gone(CUdeviceptr at); /* the stream has got to the free */
void elastic_forget_context(CUcontext context, struct gpu *gpu, uint64_t before); /* up to that number */
void elastic_forget_all(void);                                                    /* in a forked child */

/* kept.c: locked */
void kept_add(struct elastic_region *region);
void kept_remove(struct elastic_region *region);
struct elastic_region *kept_of(struct gpu *gpu, uint64_t bytes, bool small); /* exactly so large; small: the smallest. NULL: none */
/* not locked: releases kept regions, until so many bytes are unused lease; how many it released */
uint64_t elastic_trim(struct gpu *gpu, uint64_t bytes);
void elastic_surplus(void); /* by the helper, once a second */

/* region.c: not locked, for it calls the driver */
struct elastic_region *region_new(struct gpu *gpu, CUdevice device, uint64_t bytes, bool small, CUresult *rc);
bool region_end(struct elastic_region *region); /* false: the driver still has some of it */
/* locked */
bool region_list(struct elastic_region *region); /* false: there is no memory to note it */
void region_unlist(struct elastic_region *region);
struct elastic_region *region_of(uint64_t at); /* in which the address is; NULL: in none */
struct elastic_block *region_block(struct elastic_region *region, uint64_t at);
struct range *region_range(struct elastic_region *region, uint64_t at); /* live, or NULL */
struct elastic_block *block_of(uint64_t id); /* NULL: there is none */
/* not locked, the driver's calls for one block; and access to a part of a region */
CUresult block_make(struct elastic_block *block, CUdevice device);
CUresult block_open(const struct elastic_region *region, uint64_t at, uint64_t bytes);

/* anchor.c: waits as the driver's cuMemFree does, in a context of the calling thread's, and answers what that would. */
CUresult anchor_wait(CUcontext context);
void anchor_drop(struct gpu *gpu, CUcontext context); /* in the current context, where there is none yet, and the lease has room for it */
void anchor_forget(CUcontext context); /* locked */

/* swap.c: for the connection over which the arbiter swaps. One thread at a time; the container's channels are suspended. No function waits
 * for the GPU. False: the block is not in the state that the order requires, or the driver refused. */
struct elastic_choice {
    uint64_t id, bytes;
};
struct elastic_totals {
    uint64_t bytes; /* of all blocks: resident, kept and away */
    uint64_t kept, away;
};
struct elastic_totals elastic_totals(struct gpu *gpu);
/* Blocks of at least so many bytes together, as far as there are, none of which could be left out; the first `most` of them. What was
 * chosen before is not chosen again. Kept regions are not: a RECALL releases them. */
size_t elastic_choose(struct gpu *gpu, uint64_t bytes, struct elastic_choice *out, size_t most);
void elastic_stay(struct gpu *gpu); /* what was chosen and is not away is not to be swapped out after all */
int elastic_export(uint64_t id); /* a descriptor of a chosen or made block, closed on exec; -1 */
bool elastic_unmap(uint64_t id);  /* chosen: its content is saved */
bool elastic_make(uint64_t id);   /* away: there is memory for it again */
bool elastic_filled(uint64_t id); /* made: its content is back */

#endif
