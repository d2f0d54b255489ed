/* pooled.h - stream-ordered memory that can be swapped: what cuMemAllocAsync and cuMemAllocFromPoolAsync return from the device's default pool and
 * from pools that the program makes without export.
 *
 * The driver's pool stays, empty, as the handle: so no call ever gets a handle that the driver does not know, and the driver keeps the pool's
 * attributes. Its memory is in regions of the pool's own. A range of them that the program frees in a stream's order waits in that stream: the same
 * stream may have it again at once; any other when an event behind the free has passed. A region of which nothing waits or is live is idle.
 *
 *   live ─ cuMemFreeAsync ─▶ waiting in its stream ─ its event has passed ─▶ free ─ all of its region is ─▶ idle ─ trim, synchronisation ─▶ released
 *
 * pooled.c has the records and calls no driver; pooled_events.c what a stream has got to; pooled_alloc.c and pooled_free.c are the calls.
 * elastic.h includes this.
 */
#ifndef TANGRAM_POOLED_H
#define TANGRAM_POOLED_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "abi.h"
#include "elastic/heap.h"
#include "elastic/peers.h"
#include "memory/pages.h"

struct gpu;
struct pool;
struct elastic_region;

/* Of what requests of 2 MiB and more are multiples. Guessed: an allocation loses 3 % of 2 MiB on average, and a place for each of these units of a region is
 * 0.006 % of it in host memory. */
#define POOLED_GRAIN ((uint64_t)128 << 10)

enum pooled_size { POOLED_SMALL, POOLED_PAGES, POOLED_SIZES }; /* less than a page; whole pages */

/* Recorded behind a free. It is ours for good: the context takes it along. */
struct pooled_event {
    struct pooled_event *next;
    CUevent event;
    CUcontext context;
    uint64_t number; /* of the last free before it */
    bool stood;      /* it was taken from its stream's list, where another thread may have seen it: it is of that stream until it has passed */
};

/* What a stream has yet to get to. */
struct pooled_stream {
    struct pooled_stream *next;
    unsigned long long id; /* the driver's, which no other stream of the process has again */
    struct heap heap[POOLED_SIZES];
    struct range *oldest, *newest;     /* what waits, by the number of its free */
    struct pooled_event *first, *last; /* by number */
    unsigned events;
    uint64_t done; /* frees up to that number have happened */
};

struct pooled {
    struct pooled *next;
    CUmemoryPool handle;
    CUdevice device;
    struct gpu *gpu;
    struct access others; /* of other devices to its memory; with the lock of struct peers */
    bool gone; /* destroyed; without regions, its place is for the next pool */
    struct heap heap[POOLED_SIZES];        /* free for every stream */
    uint64_t region_bytes[POOLED_SIZES];   /* of its regions; together: what is reserved */
    struct elastic_region *oldest, *newest; /* idle */
    uint64_t idle_bytes;
    uint64_t used, used_high, reserved_high;
    unsigned regions;
    struct pooled_stream *streams;
};

struct pooled_all { /* under the lock of struct elastic, but for what is atomic */
    _Atomic bool any;           /* some memory was served from a pool */
    struct pooled *first;       /* a list that only grows */
    struct pooled_event *spare; /* of no stream */
};

/* One call that allocates. */
struct pooled_request {
    struct pooled *pool;
    CUstream stream;
    unsigned long long id;
    CUcontext context; /* the current one, or NULL */
    uint64_t requested, bytes;
};

/* pooled_hooks.c. Is what is allocated from this pool now to be served here? */
void pooled_note_default(struct pool *pool); /* it is served if it is its device's default pool */
bool pooled_may_be(const CUmemPoolProps *properties);
bool pooled_wanted(struct pool *pool);

/* pooled_alloc.c. False: this request is not served here; the driver's own call is next. */
bool pooled_alloc(struct pool *from, CUdeviceptr *at, uint64_t bytes, CUstream stream, bool per_thread, CUresult *rc);
uint64_t pooled_trim(struct gpu *gpu, uint64_t bytes);                /* releases idle regions of all pools; how many bytes */
uint64_t pooled_trim_to(struct pool *pool, uint64_t keep_bytes);      /* how much of that the driver's pool is to keep */
/* What is live stays until it is freed. If the driver then refuses, it is the pool's again. */
struct pooled *pooled_destroy(struct pool *pool);
void pooled_stayed(struct pool *pool, struct pooled *its);
bool pooled_synchronized(void);                                       /* true: more may come at the next synchronisation */
/* Idle regions, so that `keep` stays reserved, and `most` bytes at most; how many bytes are unused lease by that. */
uint64_t pooled_release(struct pooled *pool, uint64_t keep, uint64_t most);

/* pooled_free.c. False: no live memory of a pool begins there. */
bool pooled_free(CUdeviceptr at, CUresult *rc);
bool pooled_free_async(CUdeviceptr at, CUstream stream, bool per_thread, CUresult *rc);

/* pooled_events.c: not locked, for they call the driver. */
CUstream pooled_named(CUstream stream, bool per_thread); /* by a name that means the same in every form of a call */
/* An event behind all that the stream has, in no list: frees up to `number` have happened when it has passed. NULL: none could be recorded. */
struct pooled_event *pooled_record(struct pooled *pool, unsigned long long id, CUstream stream, uint64_t number);
void pooled_settle(struct pooled *pool); /* what streams have got to is free for all */
CUresult pooled_wait(const struct pooled_request *request, CUevent event); /* the request's stream waits for it, not the caller */
void pooled_forget_context(CUcontext context, uint64_t before);

/* pooled.c: locked. */
struct pooled *pooled_of(struct pool *pool, bool make); /* NULL: there is none, or no memory to note it */
struct pooled_stream *pooled_stream(struct pooled *pool, unsigned long long id, bool make);
void pooled_streams_end(struct pooled *pool); /* forgets those that have nothing */
struct range *pooled_take(const struct pooled_request *request); /* live; NULL: a region has to be made, or waited for */
/* The same from what waits in another stream; *event is what the request's stream has to wait for. */
struct range *pooled_take_waiting(const struct pooled_request *request, CUevent *event);
void pooled_leave(struct pooled *pool, struct range *range);                              /* the program frees it: it is not used any more */
void pooled_stays(struct pooled *pool, struct range *range);                              /* or not after all */
bool pooled_put(struct pooled *pool, struct range *range, unsigned long long id, struct pooled_event *event); /* it waits in that stream. False: no memory */
void pooled_spare(struct pooled_event *event);
void pooled_event_back(struct pooled *pool, unsigned long long id, struct pooled_event *event); /* what pooled_record took, and is not put */
void pooled_give(struct pooled *pool, struct range *range);                               /* free for every stream */
void pooled_done(struct pooled *pool, struct pooled_stream *stream, uint64_t number);
void pooled_open(struct pooled *pool, struct elastic_region *region);  /* a new region, all of it free */
struct elastic_region *pooled_take_idle(struct pooled *pool, uint64_t keep, uint64_t most); /* off all lists; NULL: none */
uint64_t pooled_reserved(const struct pooled *pool);
bool pooled_waits(const struct pooled *pool); /* for some stream */

/* UINT64_MAX: too large for any GPU. */
static inline uint64_t pooled_rounded(uint64_t bytes)
{
    const uint64_t pages = pages_rounded(bytes);
    return bytes < PAGE || pages == UINT64_MAX ? pages : (bytes + POOLED_GRAIN - 1) / POOLED_GRAIN * POOLED_GRAIN;
}
#endif
