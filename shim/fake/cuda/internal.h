/* internal.h - what the files of the fake libcuda offer each other. */
#ifndef TANGRAM_FAKE_CUDA_INTERNAL_H
#define TANGRAM_FAKE_CUDA_INTERNAL_H

#include "check.h"
#include "jobs.h"
#include "missing.h"

#include <string.h>

#define PUT(at, value)                                                                                                         \
    do {                                                                                                                       \
        if ((at) != NULL)                                                                                                      \
            *(at) = (value);                                                                                                   \
    } while (0)

/* SCOPED name = locked(&mutex); unlocks it where the block ends, also by a return. */
#define SCOPED __attribute__((cleanup(let_go), unused)) pthread_mutex_t *const
static inline void let_go(pthread_mutex_t *const *held) { pthread_mutex_unlock(*held); }
static inline pthread_mutex_t *locked(pthread_mutex_t *mutex)
{
    pthread_mutex_lock(mutex);
    return mutex;
}
static inline uint64_t rounded(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }
static inline const struct fake_gpu *gpu_of(int device) { return &cuda.client.page->gpu[cuda.device[device].gpu]; }
static inline struct fake_unit *unit_of(int device) { return &cuda.client.page->unit[cuda.device[device].unit]; }
/* NULL: a whole GPU. */
static inline const struct fake_profile *profile_of(int device) { return cuda.device[device].unit < FAKE_GPUS ? NULL : &gpu_of(device)->profile[unit_of(device)->profile]; }
static inline uint32_t processors_of(int device) { return profile_of(device) != NULL ? profile_of(device)->sms : gpu_of(device)->sms; }

/* What the process has of a device: memory, and how far its work is. A process that has ended has none: the daemon may be about to see it. */
static inline bool take_now(int device, uint64_t bytes, bool managed) { return page_take(cuda.client.page, cuda.client.slot, cuda.device[device].unit, bytes, managed); }
static inline bool take(int device, uint64_t bytes, bool managed) { return take_now(device, bytes, managed) || (client_catch_up(&cuda.client), take_now(device, bytes, managed)); }
static inline void give(int device, uint64_t bytes, bool managed) { page_give(cuda.client.page, cuda.client.slot, cuda.device[device].unit, bytes, managed); }
static inline bool work_done(int device, uint64_t ns) { return gpu_time_reached(cuda.client.page, cuda.client.slot, cuda.device[device].unit, ns); }
static inline void work_wait(int device, uint64_t ns) { gpu_time_wait(cuda.client.page, cuda.client.slot, cuda.device[device].unit, ns); }

static inline CUresult must(bool condition, CUresult otherwise) { return condition ? CUDA_SUCCESS : otherwise; }

/* handle.c */
CUresult handle_new(void *made, enum handle_kind kind, const void *like, size_t bytes); /* MAKE */
void handle_free(void *handle);
bool handle_is(const void *handle, enum handle_kind kind);
/* The process may use CUDA, and it is a handle of that kind; otherwise: the error if it is not. */
CUresult handle_ok(const void *handle, enum handle_kind kind, CUresult otherwise);
CUresult handle_end(void *handle, enum handle_kind kind, CUresult otherwise);

/* device.c */
CUresult device_ok(CUdevice device);
void take_a_while(void); /* cuInit and each new context: TANGRAM_FAKE_START_MS longer, as a real driver does */

/* context.c */
CUresult ready(void); /* CUDA_ERROR_NOT_INITIALIZED before cuInit and after fork */
CUresult current(CUcontext *ctx); /* or the error that the process is left with */
bool context_ok(CUcontext ctx);
CUresult context_idle(CUcontext ctx); /* waits for its work */
CUresult legacy_idle(CUcontext ctx); /* the same, but not for jobs of streams that its legacy stream does not wait for */
CUresult losses_launch(CUcontext ctx, uint64_t local, bool heap); /* before a kernel that needs these */
bool losses_runtime(CUcontext ctx);
bool losses_stream(CUcontext ctx);
CUresult losses_stream_end(CUcontext ctx);

/* stream.c */
CUresult stream_get(CUstream handle, CUstream *stream); /* resolves NULL, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD */
/* A job of a stream; a stream that is captured gets a node of that type instead. */
CUresult stream_job(CUstream stream, CUgraphNodeType type, const struct job *job);
uint64_t stream_queue(CUstream stream, uint64_t ns);
/* After a kernel failed, its error; the process cannot recover (measured, also for its other contexts on the device). */
CUresult sticky(int device);
void trap(int device, uint32_t error, uint64_t done_ns);
void fail_now(int device, uint32_t error);
CUresult synchronize(int device, uint64_t done_ns); /* what the program waits for, when it has waited for jobs */
/* Runs on a thread of its own, with a copy of what is given, which it frees. */
CUresult beside(void *(*run)(void *given), const void *given, size_t bytes);

/* channels.c: 0 = the process has no kernel driver */
uint32_t channels_new(int device);
void channels_free(int device, uint32_t group);

/* faults.c: a scripted fault of the function, CUDA_SUCCESS when there is none. */
CUresult fault(const char *function, uint64_t bytes);
int driver_cuda_version(void);
bool symbol_missing(const struct client *client, const char *symbol); /* an exported name, without the suffix of its per-thread twin */

/* image.c */
/* For a GPU of that compute capability, 75 = 7.5. What was read is to be freed, also after an error. */
CUresult image_read(struct image *image, const void *at, unsigned capability);
void image_free(struct image *image);
bool image_is_text(const char *image);
uint64_t image_local(const char *entry); /* of the kernel whose ".entry" that is in PTX text; NULL: 0 */

/* launch.c */
/* What a launch of it with these parameters is. */
CUresult function_job(CUfunction function, void **parameters, void **extra, struct job *job);
CUresult launch_job(CUstream stream, const struct job *job);
/* Its error comes, and it counts, as it takes its time: ns, until end_ns. */
CUresult kernel_started(int device, uint32_t error, uint64_t counter, uint64_t ns, uint64_t end_ns);

/* arena.c */
/* NULL: the GPU is full. Its first user is the caller. */
struct physical *physical_new(int device, uint64_t bytes, uint64_t charged, bool managed);
void physical_drop(struct physical *physical); /* one user less */
void *addresses_take(uint64_t bytes, uint64_t align); /* of which nothing is used yet; MAP_FAILED: none are left */
/* What is at that offset of the file behind the page appears at addresses that were taken. */
bool arena_map(uintptr_t at, uint64_t bytes, int access, uint64_t offset);
uintptr_t arena_at(uint64_t offset); /* where this process's region has it */
void arena_wipe(uint64_t offset, uint64_t bytes);
bool arena_dirty(uint64_t offset, uint64_t bytes); /* fills new memory as if another process had used it; false: it is clean */

/* span.c. Trees: cuda.spans, but for those that are named. */
/* Puts a copy of it into the tree. NULL: something is at these addresses. */
struct span *span_new(void **tree, const struct span *like);
CUresult span_gone(void **tree, struct span *span); /* removes it from the tree and frees its memory */
struct span *span_in(void **tree, uintptr_t at); /* the one that contains the address */
static inline struct span *span_find(uintptr_t at) { return span_in(&cuda.spans, at); }
CUresult span_get(CUdeviceptr at, unsigned kinds, CUresult otherwise, struct span **span); /* the same, of one of these kinds */
struct span *span_from(CUdeviceptr at, unsigned kinds); /* the one that begins there */
CUresult span_end(CUdeviceptr at, unsigned kinds, CUresult otherwise);
struct span *span_such(bool (*is)(const struct span *span, const void *what), const void *what); /* NULL: there is none */
void spans_of_context_gone(CUcontext ctx);
/* Is all of that memory that CUDA knows and may use? span_touch: marks it as written, so that its pages are dropped when it is freed. */
bool span_touch(CUdeviceptr at, size_t bytes, CUcontext ctx, bool copies);
bool span_covers(CUdeviceptr at, size_t bytes, CUcontext ctx, bool copies); /* NULL: whoever may use it */

/* peers.c */
bool span_open_to(const struct span *span, CUcontext ctx, bool copies); /* may a kernel, or a copy, of this context use it? */
bool access_possible(int device, const CUmemLocation *from); /* to that device's memory */
CUresult access_valid(const CUmemAccessDesc *access, size_t count, bool host); /* host: access of the host is no error, and does nothing */

/* memory.c */
/* like: what is requested, that is its kind, context, device, pool, pages and bytes. */
CUresult memory_new(const struct span *like, struct span **made);
void memory_gone(const struct span *span); /* what is behind it; under lock */
CUresult memory_own(CUcontext ctx, enum span_kind kind, enum pages pages, size_t bytes, struct owned *owned);
bool owner_lives(const struct owned *owned);
CUresult owned_free(struct owned *owned);
CUresult memory_free(CUdeviceptr at, unsigned kinds); /* of these kinds, or of a pool or graph */
CUresult free_behind(CUstream stream, CUdeviceptr at); /* the same when jobs before it in the stream have ended */

/* pool.c */
CUresult pool_get(int device, enum pool_kind kind, CUmemoryPool *pool);
void pools_synchronized(int device);
bool pool_grow(CUmemoryPool pool, uint64_t bytes);
void pool_less(CUmemoryPool pool, uint64_t bytes); /* so much of it is free again */

/* imported.c: memory that other processes may reference, too; the page keeps the records. */
bool object_share(struct physical *physical);
CUresult physical_import(uint64_t id, struct physical **made); /* refused if it is of a GPU that this process has not */
/* A descriptor that stands for a number in another process. */
CUresult token_export(void *shareable, CUmemAllocationHandleType type, uint64_t magic, uint64_t id);
CUresult token_import(void *shareable, CUmemAllocationHandleType type, uint64_t magic, uint64_t *id);
/* 64 bytes by which another process maps what begins at that address. */
CUresult lend(CUdeviceptr at, enum span_kind kind, void *data);
CUresult borrow(CUdeviceptr *at, const void *data, enum span_kind kind, CUmemoryPool pool);

/* vmm.c */
CUresult physical_get(CUmemGenericAllocationHandle handle, struct physical **physical);

/* graph.c: what a node does when its graph runs. A child is copied when its node is added. */
struct work {
    CUgraphNodeType type;
    CUfunction function;
    struct job job; /* of a kernel, copy, fill or host function */
    uint64_t local; /* of a kernel */
    bool runtime;
    CUdeviceptr at; /* of an allocation or a free */
    CUgraph child;
};
struct CUgraphNode_st {
    struct handle handle;
    struct work work;
    CUgraph graph;
    CUgraphNode next;
};
struct CUgraph_st {
    struct handle handle;
    CUgraphNode first;
};
CUresult node_add(CUgraph graph, struct work work, CUgraphNode *made); /* made may be NULL */
CUresult node_kernel(CUgraph graph, CUfunction function, const struct job *job, CUgraphNode *made);
CUresult node_alloc(CUgraph graph, int device, size_t bytes, CUdeviceptr *at, CUgraphNode *made);

#endif
