/* pool.h - pools as the records see them. A pool is charged for what it keeps reserved, not for what the program has allocated from it. */
#ifndef TANGRAM_POOL_H
#define TANGRAM_POOL_H

#include "process.h"

struct pool {
    struct pool *next;
    /* Written before `gone` is false, and read by walks without a lock: */
    _Atomic(CUmemoryPool) handle; /* NULL: the device's memory for graphs */
    _Atomic CUdevice device;
    _Atomic(struct gpu *) gpu; /* NULL: its memory is not charged here */
    _Atomic bool managed;      /* NVML lists its memory for no process */
    _Atomic bool gone;         /* destroyed, and perhaps still with memory; when it has none, the next pool has its place */
    _Atomic bool freed;        /* something was freed into it since it was last settled */
    _Atomic bool swaps;        /* its memory is served from blocks that can be swapped, where the process has such: pooled_hooks.c */
    _Atomic(struct pooled *) pooled; /* that memory; NULL: there was none yet */
    _Atomic uint64_t live;     /* pointers the program has of it, and calls that destroy it */
    _Atomic unsigned trims;
    /* under tangram.pools_lock: */
    uint64_t charged;   /* taken from the lease for it */
    uint64_t in_flight; /* taken from the lease by calls that have not returned */
    uint64_t promised;  /* of its idle memory, for calls that have not returned */
    /* written under it, and read without: */
    _Atomic uint64_t step;    /* by which it was seen to grow; 0 = not seen yet */
    _Atomic uint64_t version; /* counts settlements */
};

/* One call that may make a pool grow: begin it, call the driver, end it. */
struct growth {
    struct pool *pool;
    uint64_t bytes, taken, promised;
};

#define NO_DEVICE ((CUdevice)-1)

/* The pool that a stream allocates from; NULL: the driver's own error is the answer. False: it is not known which GPU is charged. */
bool pool_of_stream(CUstream stream, struct pool **pool);
struct pool *pool_of_graphs(CUdevice device);
struct pool *pool_known(CUmemoryPool handle);                                         /* NULL: it was not seen yet */
struct pool *pool_record(CUmemoryPool handle, CUdevice device, struct gpu *gpu, bool managed); /* NULL: there is no memory to note it */

/* defaults.c: a pool that may not have been seen yet. False: it is not known which GPU is charged for what is allocated from it. */
bool pool_of_handle(CUmemoryPool handle, struct pool **pool);
/* Managed memory without a place of its own is charged where it is made, as cuMemAllocManaged is. */
struct gpu *gpu_of_managed(const CUmemLocation *location);

bool growth_begin(struct growth *growth, struct pool *pool, uint64_t bytes); /* false: refuse the call */
bool growth_again(struct growth *growth, struct pool *pool, uint64_t bytes); /* for a call that should not need any; always true */
bool growth_end(struct growth *growth); /* false: the pool has more than could be charged */

void pool_settle(struct pool *pool); /* the records follow what the driver reports for it now */
void pool_trim(struct pool *pool);   /* has the driver release what is idle, and settles */
void pool_freed(struct pool *pool);

void pools_may_have_shrunk(struct gpu *gpu); /* of that GPU, or of all: the next synchronisation looks */
void pools_synchronized(void);
bool pools_reclaim(struct gpu *gpu); /* true: something came back to the lease */

/* After a successful synchronisation of any kind. */
static inline void after_synchronize(void)
{
    if (UNLIKELY(atomic_load_explicit(&tangram.unsettled, memory_order_relaxed)))
        pools_synchronized();
}

/* late.c: plain memory that was freed in a stream's order is counted until the stream has got there. */
bool late_free(const struct owned *was, CUstream stream, bool per_thread);
bool late_settle(bool *left); /* true: something came back */

/* Around driver calls of our own that a capture by another thread would forbid. */
bool capturing(CUstream stream, bool per_thread);
CUstreamCaptureMode relax(void);
void relax_end(CUstreamCaptureMode before);

#endif
