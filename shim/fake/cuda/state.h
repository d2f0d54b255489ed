/* state.h - the fake libcuda's own state.
 *
 * All of it is in one struct (cuda) and in handles. A handle's first word is its kind; freed handles are kept
 * and used again, so that a stale one is recognised instead of crashing. `cuda.lock` guards the tables. Every function that
 * reads or writes them locks it, also when the caller has it already; no thread waits for a kernel with it locked.
 */
#ifndef TANGRAM_FAKE_CUDA_STATE_H
#define TANGRAM_FAKE_CUDA_STATE_H

#include "abi.h"
#include "client.h"
#include "page.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#define MOST_DEVICES (FAKE_GPUS + 1)
#define LIMITS 16u /* of a context */
#define THREADS_OF_PROCESSOR 2048u
#define PEERS 64u /* of a context */
#define GRAIN 512u /* sizes of memory are multiples of it */
#define BLOCK_BYTES (2 * FAKE_MIB) /* a page of the GPU's */

enum handle_kind {
    HANDLE_DEAD = 0x64656164,
    HANDLE_CONTEXT = 0x43545831, HANDLE_STREAM, HANDLE_EVENT, HANDLE_MODULE, HANDLE_FUNCTION, HANDLE_POOL, HANDLE_ARRAY,
    HANDLE_MIPMAP, HANDLE_GRAPH, HANDLE_NODE, HANDLE_EXEC, HANDLE_EXTERNAL, HANDLE_GREEN, HANDLE_PHYSICAL
};
struct handle {
    uint32_t kind;
    struct handle *next_free;
};
/* The handle of a new struct type, of which the rest sets what is not zero; made: where the pointer to it goes. */
#define MAKE(made, kind, type, ...) handle_new(made, kind, &(struct type){__VA_ARGS__}, sizeof(struct type))

struct CUstream_st {
    struct handle handle;
    CUcontext ctx;
    unsigned flags;
    int priority;
    unsigned long long id;
    _Atomic uint64_t done_ns; /* what the process will have run on the unit when its last work is done */
    _Atomic uint64_t job;     /* the last one, 0 = none */
    CUgraph capture;          /* the graph being captured into, or NULL */
};

/* Where memory is: in pages of its own, or in blocks that small requests of its kind share (memory.c); memory of different
 * kinds never shares a block. What is of a pool is counted there. */
enum pages { PAGES_OWN, PAGES_POOL, PAGES_LINEAR, PAGES_MANAGED, PAGES_ARRAYS, PAGES_MODULES, PAGES_KINDS };

/* context.c: what a context loses beside what is allocated in it. */
enum loss { LOSS_CONTEXT, LOSS_HEAP, LOSS_RUNTIME, LOSS_STREAMS, LOSSES };

/* A context whose memory another one may use; none: `ctx` is NULL, or has ended. */
struct peer {
    CUcontext ctx;
    unsigned long long id;
};

struct CUctx_st {
    struct handle handle;
    CUdevice device;
    unsigned flags;
    bool primary, live;
    unsigned long long id;
    _Atomic uint64_t done_ns;     /* the same for all of its streams */
    struct CUstream_st stream[2]; /* the legacy default stream, the per-thread one */
    size_t limit[LIMITS];
    uint64_t lost[LOSSES];
    uint64_t streams;                /* live ones */
    struct range *free[PAGES_KINDS]; /* of its blocks, in the order in which they got their extent */
    struct peer peer[PEERS];
    uint32_t channels;               /* its channel group in the kernel driver, 0 = none */
};

struct CUevent_st {
    struct handle handle;
    CUcontext ctx;
    unsigned flags;
    bool recorded;
    int device;               /* after whose work it comes */
    _Atomic uint64_t done_ns; /* reached when the process has run so much there */
    _Atomic uint64_t job;     /* and this one has ended */
    _Atomic uint64_t seen_ns; /* CLOCK_MONOTONIC at which it was first seen to be; 0 = not yet */
};

/* Memory that goes with its context. A handle is used again: another context may have it by then. */
struct owned {
    CUcontext ctx;
    unsigned long long ctx_id;
    struct span *span; /* NULL: none */
};

struct CUgreenCtx_st {
    struct handle handle;
    CUcontext primary;
};

#define TILES 64u
#define LEVELS 17u
/* array.c: an array, or a mipmapped one. */
struct CUarray_st {
    struct handle handle;
    struct owned memory; /* none: sparse, or a level of a mipmapped array, which is counted as a whole */
    CUDA_ARRAY3D_DESCRIPTOR how;
    CUarray level[LEVELS];        /* of a mipmapped array */
    struct physical *tile[TILES]; /* of a sparse array: what is mapped, at tile x of its first row */
};

/* image.c: the variables of an image, one behind the other. */
struct variable {
    char name[256];
    uint64_t at, bytes;
    struct variable *next;
};
struct image {
    struct variable *variables;
    uint64_t bytes;
    bool runtime; /* a kernel of it prints or allocates */
};

struct CUmod_st {
    struct handle handle;
    struct image image;
    struct owned variables;
    char *text; /* "" when the image is binary: every name is found then */
};

/* does.def */
enum {
#define WORD(name, key, bytes) WORD_##name,
#include "does.def"
    WORDS
};

struct CUfunc_st {
    struct handle handle;
    CUmodule module;
    char name[256];
    const char *us_parameter;      /* the parameter with its duration in microseconds (u32): "paramN...", or NULL */
    const char *counter_parameter; /* counts while it runs, at the address in this parameter (u64), or NULL */
    uint64_t ns;
    uint32_t error; /* in which it ends, 0 = well */
    uint64_t local; /* bytes a thread */
    bool runtime;   /* prints or allocates */
    int does;       /* enum job_kind; JOB_TIME: nothing */
    const char *word[WORDS]; /* where what follows "at=" and so on is in the module's text, or NULL */
};

/* A device's pools that are there without being made, and its current one. The last two are device 0's for want of a place. */
enum pool_kind { POOL_DEFAULT, POOL_CURRENT, POOL_GRAPH, POOL_MANAGED, POOL_NOWHERE, POOL_HOST, POOL_KINDS };
struct CUmemPoolHandle_st {
    struct handle handle;
    CUmemoryPool next; /* of the program's on that device */
    int device;
    bool host, managed; /* host: its memory is none of a GPU's */
    uint64_t used, reserved, used_high, reserved_high, threshold, most;
    uint64_t taken; /* of what is reserved, by what is used: in units of GRAIN */
    CUmemAllocationHandleType handles; /* by which it is exported */
    CUmemAccess_flags access[MOST_DEVICES]; /* of other devices */
    int follow_events, opportunistic, internal_dependencies; /* kept, and without effect */
};
#define POOL_REUSES .follow_events = 1, .opportunistic = 1, .internal_dependencies = 1 /* documented */

/* Memory of a GPU, counted while a process uses it, behind a file descriptor. */
struct physical {
    struct handle handle;
    int device;
    uint64_t offset, capacity; /* in the file behind the page */
    unsigned class;            /* of the arena */
    uint64_t charged;          /* to the GPU */
    uint64_t object;         /* shared with other processes under this number, 0 = not */
    unsigned users, handles; /* handles: those of users that the program has */
    bool touched, managed, imported;
    CUmemAllocationProp how;
    struct physical *next_free;
};

enum span_kind {
    SPAN_DEVICE = 1, SPAN_MANAGED = 2, SPAN_POOL = 4, SPAN_GRAPH = 8, SPAN_HOST = 16, SPAN_REGISTERED = 32, SPAN_MAPPED = 64,
    SPAN_IPC = 128, SPAN_OWNED = 256 /* an array, or variables */,
    SPAN_PINNED = SPAN_HOST | SPAN_REGISTERED, SPAN_ANY = 511
};
/* An address range of the program's, and what is there. */
struct span {
    uintptr_t base;
    size_t bytes;
    enum span_kind kind;
    int device;
    CUcontext ctx;
    CUmemoryPool pool;
    struct physical *physical; /* NULL: memory of the host */
    enum pages pages;
    uint64_t offset, capacity; /* in the file; of other mappings, capacity is their length */
    uint64_t id;
    uint64_t lent;  /* IPC: the number of the allocation that it is, where that was made */
    unsigned opens; /* IPC: beyond the first */
    unsigned flags;
    bool touched;
    bool usable; /* graph: is allocated now */
    CUmemAccess_flags access[MOST_DEVICES]; /* mapped */
    struct span *next;
};

struct device {
    uint32_t unit, gpu;
    _Atomic uint32_t trap;    /* the error of a kernel that is queued, 0 = none */
    _Atomic uint64_t trap_ns; /* reached when that kernel has run */
    CUcontext primary;
    unsigned primary_refs, primary_flags;
    uint32_t kernel_device;         /* its handle in the kernel driver, 0 = none */
    CUmemoryPool pools[POOL_KINDS]; /* NULL: not requested yet */
    CUmemoryPool made;              /* by the program: the first */
};

enum { STATE_NEW, STATE_READY, STATE_FORKED, STATE_ENDED };
#ifndef ARENA_BYTES /* less where a map costs by its size, as in qemu's user mode */
#define ARENA_BYTES FAKE_REGION_BYTES
#endif
#define ARENA_CLASSES 512

struct cuda {
    pthread_mutex_t lock;
    pthread_mutex_t primaries; /* retain, release and reset of primary contexts; taken before lock */
    pthread_mutex_t step;      /* of steps.c; taken after lock */
    _Atomic int state;
    struct client client;
    int devices;
    struct device device[MOST_DEVICES];
    struct handle *free_handles[64];
    _Atomic unsigned long long ids; /* given so far */
    bool kernel_client;
    uint32_t kernel_groups;
    void *spans, *reservations; /* tsearch trees by address */
    int arena_fd;
    char *arena;
    uint64_t arena_start, arena_used, arena_bytes; /* start: of the region, in the file */
    struct physical *arena_free[ARENA_CLASSES];
};
extern struct cuda cuda;

#endif
