/* elastic.h - memory that can be swapped: served from blocks whose addresses stay when the memory behind them is exchanged.
 *
 * Where a container may burst on a GPU, cuMemAlloc and cuMemAllocPitch map physical blocks of cuMemCreate at addresses that are reserved
 * once. A region is a range of such addresses: of one large request, whose blocks have at most ELASTIC_BLOCK bytes each, or one block
 * that smaller requests share. A region without a live request is kept, mapped, for the next request of its size (kept.c); it is leased and
 * not used, and released when the lease is needed. What the program makes with cuMemCreate has blocks of its own (created.c). process.h
 * includes this.
 */
#ifndef TANGRAM_ELASTIC_H
#define TANGRAM_ELASTIC_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "elastic/created.h"
#include "elastic/heap.h"
#include "elastic/ipc.h"
#include "elastic/peers.h"
#include "elastic/pooled.h"
#include "lock.h"

struct gpu;

/* A handle costs 78 us to make, map, unmap and release (H200): 0.74 ms a GB at this size, and larger ones cost no less a GB. */
#ifndef ELASTIC_BLOCK /* a test has smaller ones */
#define ELASTIC_BLOCK ((uint64_t)512 << 20)
#endif

/* Larger requests have regions of their own. Measured (H200): blocks of 20 MiB move at 42 GiB/s, those of 120 MiB at 50. */
#define ELASTIC_MEDIUM_MOST ((uint64_t)32 << 20)

/* By the size of its requests. */
enum region_kind {
    REGION_SMALL,  /* shared: less than a page */
    REGION_MEDIUM, /* shared: whole pages */
    REGION_SHARED, /* the kinds above */
    REGION_LARGE = REGION_SHARED,
    REGION_POOL_SMALL, /* of one pool: less than a page */
    REGION_POOL,       /* of one pool: any other size */
};

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
    bool leaked;     /* the driver did not release its memory, so its lease stays */
    bool sent, gone; /* discard.c: DISCARD names it on this connection; DISCARDED did */
    struct elastic_region *region;
};

struct elastic_region {
    struct gpu *gpu;
    CUdevice device;
    CUdeviceptr base;
    uint64_t bytes;
    enum region_kind kind;
    struct range *first;   /* of its ranges; a large request's region has one */
    struct range **starts; /* shared: by the place of its first byte, in grains; NULL: it has one large request */
    unsigned live;         /* requests */
    unsigned moving;       /* blocks that are not resident */
    struct ipc_region ipc; /* others may open it */
    struct elastic_region *next_kept, *older, *newer; /* kept.c; the first: or discarded, discard.c; the last two: or idle in its pool, pooled.c */
    bool rested;             /* kept for a second */
    struct created *created; /* created.c; NULL: of cuMemAlloc, or of a pool */
    struct pooled *pool;     /* pooled.c; NULL: of none */
    uint64_t busy;           /* of a pool: bytes that may not be released or used by every stream */
    unsigned blocks;
    struct elastic_block block[];
};

enum { ELASTIC_KEPT_LISTS = 64, ELASTIC_KEPT_SIZES = 64 };

/* Regions without a live request. */
struct elastic_kept {
    struct elastic_region *large[ELASTIC_KEPT_LISTS];                  /* by size; some sizes share a list */
    struct elastic_region *shared[REGION_SHARED][ELASTIC_KEPT_SIZES]; /* by pages, from 1 on */
    uint64_t sizes[REGION_SHARED];                                    /* a bit for each of these lists that is not empty */
    struct elastic_region *oldest, *newest;
};

/* Why this process cannot be swapped. The first that comes up stays; texts: reasons.c. SWAPPABLE has these numbers (protocol.md). */
enum elastic_reason {
    ELASTIC_ABLE,
    ELASTIC_NO_HELPER,      /* an idle program would be swapped by nothing */
    ELASTIC_OTHER_GPU,      /* the process sees a GPU of which the arbiter does not suspend its work, and that may use any memory of the process */
    ELASTIC_RDMA_DEVICE,    /* verbs register memory without any call of CUDA */
    ELASTIC_ADDRESS_RANGE,  /* cuMemGetHandleForAddressRange */
    ELASTIC_P2P_TOKENS,     /* CU_POINTER_ATTRIBUTE_P2P_TOKENS */
    ELASTIC_SYNC_MEMOPS,    /* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, which no driver sets on such memory */
    ELASTIC_DRIVER_REFUSED, /* the driver has no such memory, or gave an error for it */
    ELASTIC_NO_ARBITER,     /* nothing would swap it, and no lease is above the guarantee */
    ELASTIC_REASONS
};

struct elastic {
    struct lock lock; /* guards what follows, but for what is atomic */
    struct elastic_region **region; /* by address */
    size_t regions, regions_capacity;
    struct elastic_block **block; /* by id */
    size_t blocks, blocks_capacity;
    struct heap heap[CONTEXT_GPUS][REGION_SHARED]; /* by GPU->at: free ranges beside live requests */
    struct elastic_kept kept[CONTEXT_GPUS]; /* by GPU->at */
    uint64_t shared_bytes[CONTEXT_GPUS][REGION_SHARED]; /* of the regions that are not kept */
    struct created_all created;             /* has a lock of its own */
    struct pooled_all pooled;
    struct elastic_region *discarding; /* discard.c */
    size_t discarding_blocks;
    _Atomic bool any_discarding;
    uint64_t ids, ids_from;                 /* of blocks: the last one, and what the first one follows */
    _Atomic uint64_t numbers;               /* of allocations */
    _Atomic unsigned moving;                /* blocks that are not resident */
    _Atomic bool any;                       /* some region was made */
    struct ipc ipc;
    struct peers peers;                     /* has a lock of its own */
    _Atomic int gpus_seen;                  /* enum: reasons.c */
    _Atomic int reason;                     /* enum elastic_reason */
    _Atomic bool looked_for_rdma;
    CUcontext anchored[CONTEXT_GPUS];       /* by GPU->at: the context of its anchor, which may have found no room; anchor.c */
};

/* burst.c: which GPUs the file `burst` beside the grant names. */
void burst_look(void); /* reads it if it changed; when the grant was read, and once a second */
struct grant;
bool burst_read(const char *text, size_t length, const struct grant *grant, bool bursts[], uint64_t *wait_s, char *why, size_t why_bytes);

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
    bool opened; /* it is another process's */
    bool pooled; /* it is of a pool: */
    CUmemoryPool pool;
};
bool elastic_find(CUdeviceptr at, struct elastic_found *found);
bool elastic_in(CUdeviceptr at, uint64_t bytes); /* is any of it reserved for regions, or for memory of others that is open here? */
bool elastic_free(CUdeviceptr at, CUresult *rc); /* false: no live request begins there */
bool elastic_free_async(CUdeviceptr at, CUstream stream, bool per_thread, CUresult *rc);
void elastic_gone(CUdeviceptr at); /* the stream has got to the free */
void elastic_forget_context(CUcontext context, struct gpu *gpu, uint64_t before); /* up to that number */
void elastic_forget_all(void);                                                    /* in a forked child */

/* kept.c: locked */
void kept_add(struct elastic_region *region);
void kept_remove(struct elastic_region *region);
/* Exactly so large; shared: the smallest that is no smaller, and at most so much larger. NULL: none. */
struct elastic_region *kept_of(struct gpu *gpu, enum region_kind kind, uint64_t bytes, uint64_t more);
/* not locked: releases kept regions, and then what is idle in pools, until so many bytes are unused lease; how many it released */
uint64_t elastic_trim(struct gpu *gpu, uint64_t bytes);
void elastic_surplus(void); /* by the helper, once a second: kept regions that were not needed */

/* discard.c: not locked. By the helper: what rested without a request while it was away is discarded from here on, and its blocks that are not sent on this
 * connection; the arbiter answered; a new connection begins; the arbiter knows no such message, and finds out that the blocks are gone when it orders them. */
void discard_begin(void);
size_t discard_next(struct gpu *gpu, uint64_t *ids, size_t most);
void discard_answered(const uint64_t *ids, size_t count);
void discard_resend(void);
void discard_end_all(void);
bool discard_has(uint64_t id);
bool discard_wait(struct gpu *gpu); /* any thread: until the lease of what is discarded is back; false: nothing is, or it took too long */

/* region.c: not locked, for it calls the driver */
/* Between peers_enter, which is before, and region_list. `pool`: NULL, or whose it is. */
struct elastic_region *region_new(struct gpu *gpu, CUdevice device, struct pooled *pool, uint64_t bytes, enum region_kind kind, CUresult *rc);
bool region_end(struct elastic_region *region); /* false: the driver still has some of it */
void region_end_away(struct elastic_region *region); /* all of its blocks are away */
/* locked */
bool region_list(struct elastic_region *region); /* false: there is no memory to note it */
void region_unlist(struct elastic_region *region);
bool blocks_list(struct elastic_region *region); /* its blocks only */
void blocks_unlist(struct elastic_region *region, bool counted); /* counted: as memory that can be swapped */
void block_move(struct elastic_block *block, enum block_state state);
struct elastic_region *region_of(uint64_t at); /* in which the address is; NULL: in none */
bool regions_in(uint64_t at, uint64_t bytes); /* is any of it in one? */
struct elastic_block *region_block(struct elastic_region *region, uint64_t at);
struct range *region_range(struct elastic_region *region, uint64_t at); /* live, or NULL */
struct range **region_start(struct elastic_region *region, uint64_t at); /* shared: where the range that begins there is noted */
struct elastic_block *block_of(uint64_t id); /* NULL: there is none */
struct elastic_block *block_from(uint64_t at); /* of a region: the first that begins there or above; NULL: none does */
bool grow_for(void **items, size_t count, size_t *capacity); /* for so many pointers; false: there is no memory */
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
    uint64_t away;
};
struct elastic_totals elastic_totals(struct gpu *gpu);
bool elastic_is_away(void); /* some block of this process, on any GPU */
bool elastic_is_moving(void); /* the same, or one is chosen */
bool elastic_look(struct gpu *gpu, uint64_t id, enum block_state *state, uint64_t *bytes); /* false: that GPU has no such block */
/* Blocks of at least so many bytes together, as far as there are, none of which could be left out; the first `most` of them. What was
 * chosen before is not chosen again. Kept regions are not: a RECALL releases them. */
size_t elastic_choose(struct gpu *gpu, uint64_t bytes, struct elastic_choice *out, size_t most);
void elastic_stay(struct gpu *gpu); /* what was chosen and is not away is not to be swapped out after all */
bool elastic_stay_block(uint64_t id); /* the same of one */
int elastic_export(uint64_t id); /* a descriptor of a chosen or made block, closed on exec; -1 */
bool elastic_unmap(uint64_t id);  /* chosen: its content is saved */
bool elastic_make(uint64_t id);   /* away: there is memory for it again */
bool elastic_unmake(uint64_t id); /* made: it is away again, and its content was never back */
bool elastic_filled(uint64_t id); /* made: its content is back */

#endif
