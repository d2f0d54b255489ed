/* context.h - what is kept of this process's contexts. process.h includes this. */
#ifndef TANGRAM_CONTEXT_H
#define TANGRAM_CONTEXT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"

enum { CONTEXT_GPUS = 64, CONTEXT_DEVICES = 64 };

struct context_made {
    CUcontext context;
    struct gpu *gpu;
};

struct gpu_contexts {
    unsigned count;             /* that live or are being made */
    bool open;                  /* BEGIN was answered, and neither DONE nor GONE was sent yet */
    bool estimated;             /* the arbiter reserved something for the first */
    _Atomic uint64_t bytes;     /* what they take, as the arbiter answered last: measured, or reserved for them */
    _Atomic uint32_t chunk_seq; /* of the lease that was requested ahead; 0 = none. Written under link.lock */
};

struct contexts {
    pthread_mutex_t beginning;            /* one thread at a time requests the first context of a GPU, or reports the end of the last; taken before `lock` */
    pthread_mutex_t lock;                 /* guards what follows, for short steps */
    struct gpu_contexts of[CONTEXT_GPUS]; /* by GPU->at */
    struct context_made *made;
    size_t count, capacity;
    _Atomic(CUcontext) primary[CONTEXT_DEVICES]; /* that were retained and live; NULL = not */
    unsigned ever;                               /* contexts that were made, or are being made */
    _Atomic unsigned making;                     /* how many the driver makes now */
    _Atomic bool one_made;                       /* one was made, ever */
    _Atomic(CUcontext) first;                    /* NULL = not made yet, or there were two before its handle was known */
};

/* context.c, for primary.c. Before a context is made, its GPU is looked up and its memory reserved with `beginning` locked; after the driver's answer
 * it is tried and settled. */
struct gpu *context_gpu(CUdevice device);    /* on which a context takes memory, or NULL */
bool context_begin(struct gpu *gpu);         /* false: it does not fit the limit */
void context_tried(void);
void context_settle(struct gpu *gpu, CUresult rc, CUcontext context);
struct table_moment;
void context_died(CUcontext context, struct gpu *gpu, const struct table_moment *before);

/* primary.c */
#define CONTEXT_PENDING ((CUcontext)(uintptr_t)1) /* a primary context that is being made, or whose handle is not known */
CUcontext context_primary(CUdevice device);       /* NULL: it is not there */

void contexts_measure(struct gpu *gpu); /* NVML is read, and what each process has is charged, before this returns (half a second at most) */
size_t contexts_list(CUcontext *list, size_t capacity); /* that exist and whose handle is known; their number */
void contexts_are_several(void);                    /* one is made, or was, of which nothing else is kept */
void contexts_forget_all(void);                     /* in a forked child */

#endif
