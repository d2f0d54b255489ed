/* internal.h - the fake libcuda's own state, and what its files offer each other.
 *
 * All mutable state is in one struct (cuda) and in handles. A handle's first word says what it is; freed handles are kept
 * and used again, so that a stale one is recognised instead of crashing. `cuda.lock` guards tables and is never held while
 * a kernel is waited for.
 */
#ifndef TANGRAM_FAKE_CUDA_INTERNAL_H
#define TANGRAM_FAKE_CUDA_INTERNAL_H

#include "abi.h"
#include "client.h"
#include "fault.h"
#include "page.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
/* Another name of an exported function that stands above it. */
#define ALIAS(name, function) EXPORT extern __typeof__(function) name __attribute__((alias(#function)));
#define TRY(call)                                                                                                              \
    do {                                                                                                                       \
        const CUresult tried_ = (call);                                                                                        \
        if (tried_ != CUDA_SUCCESS)                                                                                            \
            return tried_;                                                                                                     \
    } while (0)
#define CHECK(condition, otherwise)                                                                                            \
    do {                                                                                                                       \
        if (!(condition))                                                                                                      \
            return otherwise;                                                                                                  \
    } while (0)

#define MOST_DEVICES (FAKE_CARDS + 1)
#define COPY_MOST (64 * FAKE_MIB) /* of a larger copy or fill only this much is done: no test looks further */

enum handle_kind {
    HANDLE_DEAD = 0x64656164,
    HANDLE_CONTEXT = 0x43545831,
    HANDLE_STREAM,
    HANDLE_EVENT,
    HANDLE_MODULE,
    HANDLE_FUNCTION,
    HANDLE_POOL,
    HANDLE_ARRAY,
    HANDLE_MIPMAP,
    HANDLE_GRAPH,
    HANDLE_NODE,
    HANDLE_EXEC,
    HANDLE_EXTERNAL,
    HANDLE_GREEN
};
struct handle {
    uint32_t kind;
    uint32_t bytes;
    struct handle *next_free;
};
/* handle.c */
void *handle_new(enum handle_kind kind, size_t bytes);
void handle_free(void *handle);
static inline bool handle_is(const void *handle, enum handle_kind kind)
{
    return handle != NULL && ((uintptr_t)handle & 7) == 0 && ((const struct handle *)handle)->kind == (uint32_t)kind;
}

struct CUstream_st {
    struct handle handle;
    CUcontext ctx;
    unsigned flags;
    int priority;
    unsigned long long id;
    _Atomic uint64_t done_ns; /* what the process will have run on the unit when its last work is done */
    struct CUgraph_st *capture; /* the graph being captured into, or NULL */
};

/* pages.c: a place in a block, live or free; one without a block has pages of its own. */
#define GRAIN 512u
#define BLOCK_BYTES (2 * FAKE_MIB)
struct block;
struct place {
    struct block *block;
    uint64_t at, bytes; /* in the block */
    struct place *before, *after;
};
struct place_list {
    struct place *first, *last;
};
struct pages {
    struct place_list live, free; /* free ranges in the order in which they got their extent */
};
enum { PAGES_LINEAR, PAGES_ARRAYS, PAGES_MODULES, PAGES_LISTS }; /* these never share a block */

/* losses.c: what a context loses beside what is allocated in it. */
#define STACK_DEFAULT 1024u
enum loss { LOSS_CONTEXT, LOSS_HEAP, LOSS_RUNTIME, LOSS_STREAMS, LOSSES };

struct CUctx_st {
    struct handle handle;
    CUdevice device;
    unsigned flags;
    bool primary, live;
    unsigned long long id;
    _Atomic uint64_t done_ns; /* the same for all of its streams */
    struct CUstream_st stream[2]; /* the legacy default stream, the per-thread one */
    size_t limit[16];
    uint64_t lost[LOSSES];
    uint64_t streams; /* live ones */
    struct pages pages[PAGES_LISTS];
    uint32_t channels; /* its channel group in the kernel driver, 0 = none */
};

struct CUevent_st {
    struct handle handle;
    CUcontext ctx;
    unsigned flags;
    bool recorded;
    int device;              /* whose work it stands behind */
    _Atomic uint64_t done_ns; /* reached when the process has run so much there */
    _Atomic uint64_t seen_ns; /* CLOCK_MONOTONIC at which it was first seen to be; 0 = not yet */
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
    CUcontext ctx;
    unsigned long long ctx_id; /* a handle is used again */
    struct image image;
    struct span *variables; /* NULL: none; gone with the context */
    char *text; /* NULL when the image is binary: every name is found then */
};

struct CUfunc_st {
    struct handle handle;
    struct CUmod_st *module;
    char name[256];
    const char *us_parameter;      /* lasts as many microseconds as this parameter says (u32): "paramN...", or NULL */
    const char *counter_parameter; /* counts while it runs, at the address in this parameter (u64), or NULL */
    uint64_t ns;
    uint32_t error; /* in which it ends, 0 = well */
    uint64_t local; /* bytes a thread */
    bool runtime;   /* prints or allocates */
    struct CUfunc_st *next;
};

struct CUmemPoolHandle_st {
    struct handle handle;
    int device;
    bool host; /* its memory is none of a card's */
    uint64_t used, reserved, used_high, reserved_high, threshold, most;
    cuuint64_t attribute[16];
};

enum span_kind { SPAN_DEVICE, SPAN_MANAGED, SPAN_POOL, SPAN_GRAPH, SPAN_HOST, SPAN_REGISTERED, SPAN_MAPPED, SPAN_IPC, SPAN_VARIABLES };
struct span {
    uintptr_t base;
    size_t bytes;
    enum span_kind kind;
    int device;
    CUcontext ctx;
    CUmemoryPool pool;
    struct physical *physical; /* of a mapped one */
    uint64_t charged, id;
    uint64_t object; /* shared with other processes under this number, 0 = not */
    struct place *place; /* in a block of its list, NULL: pages of its own */
    unsigned list;
    uint64_t offset; /* in the arena */
    size_t room;     /* in the arena */
    unsigned flags, class;
    bool touched;
    bool usable; /* mapped: has access; graph: is allocated now */
    struct span *next_free;
};

struct device {
    uint32_t unit, card;
    _Atomic uint32_t trap;    /* the error of a kernel that is queued, 0 = none */
    _Atomic uint64_t trap_ns; /* reached when that kernel has run */
    CUcontext primary;
    unsigned primary_refs, primary_flags;
    uint32_t kernel_device; /* its handle in the kernel driver, 0 = none */
    CUmemoryPool default_pool, pool, graph_pool;
    CUmemoryPool managed_pool, nowhere_pool, host_pool; /* defaults, too; the last two are device 0's for want of a place */
};

enum { STATE_NEW, STATE_READY, STATE_FORKED, STATE_ENDED };
#define ARENA_BYTES ((uint64_t)16 << 40) /* address space only: pages come when they are written */
#define ARENA_LEAST ((uint64_t)256 << 30) /* where there is no room for that, as under a sanitizer */
#define ARENA_CLASSES 512

struct cuda {
    pthread_mutex_t lock;
    pthread_mutex_t primaries; /* retain, release and reset of primary contexts; taken before lock */
    _Atomic int state;
    struct client client;
    int devices;
    struct device device[MOST_DEVICES];
    struct handle *free_handles[64];
    unsigned long long ids;
    bool kernel_client;
    uint32_t kernel_groups;
    void *spans; /* tsearch tree by address */
    int arena_fd;
    char *arena;
    uint64_t arena_used;
    uint64_t arena_bytes;
    struct reservation *reservations;
    struct span *arena_free[ARENA_CLASSES];
};
extern struct cuda cuda;

static inline void lock(void) { pthread_mutex_lock(&cuda.lock); }
static inline void unlock(void) { pthread_mutex_unlock(&cuda.lock); }
static inline const struct fake_card *card_of(int device) { return &cuda.client.page->card[cuda.device[device].card]; }
static inline struct fake_unit *unit_of(int device) { return &cuda.client.page->unit[cuda.device[device].unit]; }

/* device.c: cuInit and each new context take TANGRAM_FAKE_START_MS longer, as a real driver does. */
void take_a_while(void);

/* Exported functions that another one is made of; cuda.h declares the same. */
#ifndef FAKE_WITH_NVIDIA_HEADER
CUresult cuCtxSynchronize_v2(CUcontext ctx);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device);
CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer);
CUresult cuGraphClone(CUgraph *made, CUgraph graph);
CUresult cuMemFree_v2(CUdeviceptr at);
CUresult cuMemFreeAsync(CUdeviceptr at, CUstream stream);
#endif

/* context.c */
CUresult ready(void); /* CUDA_ERROR_NOT_INITIALIZED before cuInit and after fork */
CUresult current(CUcontext *ctx);      /* or the error that the process is left with */
CUresult current_even_failed(CUcontext *ctx);
CUresult device_ok(CUdevice device);
bool context_ok(CUcontext ctx);
CUresult stream_get(CUstream handle, CUstream *stream); /* resolves NULL, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD */
CUresult stream_idle_get(CUstream handle, CUstream *stream); /* the same, refused while it is captured */

/* channels.c: 0 = the process has no kernel driver to speak to */
uint32_t channels_new(int device);
void channels_free(int device, uint32_t group);

/* faults.c: a scripted fault of the function, CUDA_SUCCESS when there is none. FAULT stands at the start of what can fail. */
CUresult fault(enum faultable function, uint64_t bytes);
int driver_cuda_version(void);
bool symbol_missing(const char *symbol); /* an exported name, without the suffix of its per-thread twin */
#define FAULT(function, bytes) TRY(fault(FAULTABLE_##function, bytes))

/* losses.c */
CUresult losses_begin(CUcontext ctx);
void losses_end(CUcontext ctx);
CUresult losses_limit(CUcontext ctx, CUlimit limit, size_t value);
CUresult losses_launch(CUcontext ctx, uint64_t local, bool heap); /* before a kernel that needs these */
bool losses_runtime(CUcontext ctx);
bool losses_stream(CUcontext ctx);
void losses_stream_end(CUcontext ctx);

/* image.c */
/* False: nothing in it runs on a GPU of that compute capability, 75 = 7.5. */
bool image_read(struct image *image, const void *at, unsigned capability);
void image_free(struct image *image);
bool image_is_text(const char *image);
uint64_t image_local(const char *entry); /* of the kernel whose ".entry" that is in PTX text; NULL: 0 */

/* module.c */
CUresult function_queue(CUfunction function, CUstream stream, uint64_t ns);
/* counter.c: a kernel of ns that ends at done_ns counts at that address. */
CUresult counter_start(int device, uintptr_t at, uint64_t ns, uint64_t done_ns);
CUresult function_ns(CUfunction function, void **parameters, void **extra, uint64_t *ns);
uint64_t stream_queue(CUstream stream, uint64_t ns);
/* After a kernel failed, its error; the process has no way back (measured, also for its other contexts on the device). */
CUresult sticky(int device);
void trap(int device, uint32_t error, uint64_t done_ns);
bool work_done(int device, uint64_t done_ns);
void work_wait(int device, uint64_t done_ns);
bool function_ok(const void *function);

/* span.c */
struct span *span_find(uintptr_t at); /* under lock */
bool span_insert(struct span *span);
void span_remove(struct span *span);
/* Backing for bytes in the arena, and back; under lock. */
struct span *arena_take(size_t bytes, size_t align);
void arena_give(struct span *span);
void arena_fill(struct span *span); /* places the span in the arena by its offset */
void arena_wipe(const struct span *span);
/* Marks the target as written, so that its pages are dropped when it is freed. False: no such device memory. */
bool span_touch(CUdeviceptr at, size_t bytes);
bool span_covers(CUdeviceptr at, size_t bytes);

/* pages.c; all under lock. NULL: the card is full. */
struct place *place_new(struct pages *pages, int device, uint64_t bytes);
void place_free(struct pages *pages, int device, struct place *place);
void pages_free(struct pages *pages, int device); /* all that is live */
uint64_t place_offset(const struct place *place); /* in the arena; of a place in a block */
uint64_t place_share(const struct place *place, int device); /* its block, as a number for other processes; 0: failed */

/* memory.c */
bool take(int device, uint64_t bytes);
void give(int device, uint64_t bytes);
/* By the rule of pages.c, in blocks of that list. */
CUresult memory_by_pages(enum span_kind kind, CUcontext ctx, unsigned list, size_t bytes, struct span **made);
CUresult memory_new(enum span_kind kind, CUcontext ctx, int device, size_t bytes, uint64_t charged, struct span **span);
void memory_gone(struct span *span); /* under lock: takes it out of the tree and gives its bytes back */
void memory_context_gone(CUcontext ctx);
static inline uint64_t rounded(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

/* pool.c */
void pools_synchronized(int device);
CUresult pool_free(struct span *span);              /* under lock */
bool pool_grow(CUmemoryPool pool, uint64_t bytes);  /* under lock */
void pool_shrink(CUmemoryPool pool, uint64_t keep); /* under lock */
CUresult pool_new(CUmemoryPool *made, int device, uint64_t most);

/* share.c: memory that other processes may hold, too; the daemon keeps the books. */
bool object_share(uint64_t offset, uint64_t bytes, int device, uint64_t *id);
bool object_import(uint64_t id, struct fake_object *object, int *fd);
void object_release(uint64_t id);
int device_of_unit(uint32_t unit);

/* vmm.c: a block held by an array; false: no such block. The physical memory is in *held until it is let go. */
bool physical_hold(CUmemGenericAllocationHandle handle, struct physical **held);
void physical_let_go(struct physical *held);
struct span *map_import(const struct fake_object *object, int fd, CUcontext ctx, uint64_t bytes); /* share.c */

/* graph.c */
enum node_kind { NODE_EMPTY, NODE_KERNEL, NODE_ALLOC, NODE_FREE, NODE_HOST, NODE_COPY, NODE_FILL, NODE_EVENT, NODE_CHILD };
CUresult capture_kernel(struct CUgraph_st *graph, CUfunction function, uint64_t ns);
CUresult capture_add(struct CUgraph_st *graph, enum node_kind kind, uint64_t ns);
CUresult capture_alloc(struct CUgraph_st *graph, int device, CUdeviceptr *at, size_t bytes);
CUresult capture_free(struct CUgraph_st *graph, CUdeviceptr at);

#endif
