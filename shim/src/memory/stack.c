/* stack.c - stacks and heaps of contexts, and kernels that need a deeper stack than their context has.
 *
 * The driver keeps a stack for every thread that the GPU can have at once: the limit, rounded up to 16 bytes, times the resident threads,
 * in whole pages (measured: 64 KiB on an H200 are 16.5 GiB). cuCtxSetLimit takes that at the call. A launch takes it too, without notice,
 * when the kernel's local memory is larger than the stack; the stack then stays grown. So functions with that much local memory are noted
 * when their handle is returned, and a launch in a process that has one looks it up. What a context was made with, which is
 * measured with it, is not charged again. The heap is taken at the first launch that uses it and charged when it is requested; the printf
 * buffer takes no GPU memory.
 */
#include <stdlib.h>

#include "hooks/hook.h"
#include "gputime/launching.h"
#include "memory/memory.h"

enum {
    STACK_SIZE = 0, /* CUlimit */
    HEAP_SIZE = 2,
    MULTIPROCESSORS = 16, /* CUdevice_attribute */
    THREADS_OF_ONE = 39,
    THREADS_GUESSED = 1 << 20, /* of a device that does not report them: more than any has */
    STACK_OF_CALLS = 512,      /* measured */
    HEAP_USUAL = 8 << 20,      /* measured: a larger one is charged by cuCtxSetLimit */
    STACK_OF_CONTEXT = 1024    /* measured: no kernel of less local memory makes a new context larger */
};

static const uint64_t UNKNOWN = UINT32_MAX; /* bytes of local memory that the driver does not state */
enum { KERNEL = 1 };                        /* beside them: the handle is a CUkernel */

static uint64_t resident_threads(void)
{
    CUdevice device;
    int processors = 0, threads = 0;
    if (!HAS(cuCtxGetDevice) || !HAS(cuDeviceGetAttribute) || tangram.driver.cuCtxGetDevice(&device) != CUDA_SUCCESS ||
        tangram.driver.cuDeviceGetAttribute(&processors, (CUdevice_attribute)MULTIPROCESSORS, device) != CUDA_SUCCESS ||
        tangram.driver.cuDeviceGetAttribute(&threads, (CUdevice_attribute)THREADS_OF_ONE, device) != CUDA_SUCCESS || processors <= 0 ||
        threads <= 0)
        return THREADS_GUESSED;
    return (uint64_t)processors * (uint64_t)threads;
}

/* What stacks of that limit take. UINT64_MAX: more than any GPU has. */
static uint64_t stacks_bytes(uint64_t limit)
{
    uint64_t bytes;
    if (limit > UINT32_MAX || __builtin_mul_overflow((limit + 15) / 16 * 16, resident_threads(), &bytes))
        return UINT64_MAX;
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static uint64_t limit_now(int limit)
{
    size_t value = 0;
    if (tangram.driver.cuCtxGetLimit(&value, (CUlimit)limit) != CUDA_SUCCESS)
        return 0;
    return value;
}

/* What a context was made with is kept in `of` of its entry: everything beyond is charged. */
struct depth {
    struct gpu *gpu;
    uint64_t key;
    uint64_t made_with;
    uint64_t charged;
};

/* False: it is not known what the context has. */
static bool depth_of(enum owned_kind kind, struct gpu *gpu, uint64_t now, struct depth *depth)
{
    CUcontext context = NULL;
    struct owned entry;
    *depth = (struct depth){.gpu = NULL};
    CUresult rc = tangram.driver.cuCtxGetCurrent(&context);
    if (rc != CUDA_SUCCESS || context == NULL) /* of none: the driver's own error is the answer */
        return rc == CUDA_SUCCESS || is_drivers_answer(rc);
    *depth = (struct depth){gpu, OWNED_AS(kind, (uintptr_t)context), now, 0};
    if (table_find(depth->key, &entry)) {
        depth->made_with = (uintptr_t)entry.of;
        depth->charged = entry.bytes;
    }
    return true;
}

/* Locked by stack_lock: of two threads that come at once each has reserved for itself, and one of the two amounts is enough. */
static void depth_record(const struct depth *depth, uint64_t charged)
{
    struct owned was, entry = {depth->key, charged, depth->gpu, (void *)(uintptr_t)depth->made_with};
    pthread_mutex_lock(&tangram.stack_lock);
    uint64_t before = table_disown(depth->key, &was) ? was.bytes : 0;
    table_own(entry); /* what cannot be noted for want of memory stays charged until the process ends */
    pthread_mutex_unlock(&tangram.stack_lock);
    uint64_t reserved = charged > depth->charged ? charged - depth->charged : 0;
    if (before + reserved > charged)
        lease_give_back(depth->gpu, before + reserved - charged);
}

/* What the heap takes, or stacks of that limit. */
static uint64_t taken_by(enum owned_kind kind, uint64_t limit)
{
    if (kind == OWNED_STACK)
        return stacks_bytes(limit);
    return limit > UINT64_MAX / 2 ? UINT64_MAX : (limit + PAGE - 1) / PAGE * PAGE;
}

static uint64_t beyond(enum owned_kind kind, uint64_t limit, const struct depth *depth)
{
    uint64_t bytes = taken_by(kind, limit), base = taken_by(kind, depth->made_with);
    return bytes == UINT64_MAX ? UINT64_MAX : bytes > base ? bytes - base : 0;
}

/* The driver exchanges the stacks when the GPU does not use them: a call that is still inside while the channels are suspended counts as work. That it
 * waits for them is guessed. */
static CUresult set_limit(CUlimit limit, size_t value)
{
    const struct activity_call call = activity_call_begins();
    const CUresult rc = tangram.driver.cuCtxSetLimit(limit, value);
    activity_call_ends(call);
    return rc;
}

EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
    NEEDS(cuCtxSetLimit);
    struct depth depth;
    enum owned_kind kind = (int)limit == STACK_SIZE ? OWNED_STACK : OWNED_HEAP;
    bool takes = (int)limit == STACK_SIZE || (int)limit == HEAP_SIZE;
    struct gpu *gpu = takes ? current_gpu() : NULL;
    if (gpu == NULL)
        return set_limit(limit, value);
    if (!depth_of(kind, gpu, limit_now((int)limit), &depth))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (depth.gpu == NULL)
        return set_limit(limit, value);
    uint64_t charged = beyond(kind, value, &depth), more = charged > depth.charged ? charged - depth.charged : 0;
    if (charged == UINT64_MAX || !reserve(depth.gpu, more))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = set_limit(limit, value);
    if (rc == CUDA_SUCCESS)
        depth_record(&depth, charged);
    else
        lease_give_back(depth.gpu, more);
    return rc;
}

/* Of a function that is noted. False: the driver does not report it, and it may need any stack. */
static bool local_of(CUfunction function, const struct owned *noted, uint64_t *local)
{
    enum kernel_handle what = (uintptr_t)noted->of & KERNEL ? OF_KERNEL : OF_FUNCTION;
    int now = 0;
    *local = (uintptr_t)noted->of >> 1;
    if (*local != UNKNOWN)
        return true;
    if (!code_local(function, what, &now))
        return false;
    stack_note(function, what, (const void *)(uintptr_t)noted->bytes, now);
    *local = (uint64_t)(now > 0 ? now : 0);
    return true;
}

bool stack_fits(CUfunction function)
{
    struct owned noted;
    struct depth depth;
    uint64_t local, now;
    struct gpu *gpu;
    if (!table_find(OWNED_AS(OWNED_FUNCTION, (uintptr_t)function), &noted) || (gpu = current_gpu()) == NULL)
        return true;
    if (!local_of(function, &noted, &local))
        return false;
    if (local <= (now = limit_now(STACK_SIZE)))
        return true;
    if (!depth_of(OWNED_STACK, gpu, now, &depth))
        return false;
    if (depth.gpu == NULL)
        return true;
    uint64_t charged = beyond(OWNED_STACK, local, &depth);
    if (charged <= depth.charged) /* paid for by a launch that has not come back, or that the driver refused */
        return true;
    if (charged == UINT64_MAX || !reserve(depth.gpu, charged - depth.charged))
        return false;
    depth_record(&depth, charged);
    return true;
}

static bool is_function(const struct owned *entry, const void *unused)
{
    (void)unused;
    return entry->at >> 59 == OWNED_FUNCTION;
}

bool stack_fits_any(void)
{
    struct owned_list list = {.count = 0};
    bool fits = table_list(is_function, NULL, &list);
    for (size_t i = 0; i < list.count && fits; i++)
        fits = stack_fits((CUfunction)(uintptr_t)OWNED_HANDLE(list.entry[i].at));
    free(list.entry);
    return fits;
}

/* A function that is noted twice is noted as it is now. Its image is in `bytes`, and what kind of handle it is in the lowest bit of `of`. */
void stack_note(const void *function, enum kernel_handle what, const void *image, int local)
{
    struct owned was;
    uint64_t key = OWNED_AS(OWNED_FUNCTION, (uintptr_t)function);
    if (local != LOCAL_UNKNOWN && local <= STACK_OF_CONTEXT) {
        if (UNLIKELY(atomic_load_explicit(&tangram.hot.noted, memory_order_relaxed)))
            table_disown(key, &was);
        return;
    }
    uintptr_t word = (local == LOCAL_UNKNOWN ? (uintptr_t)UNKNOWN : (uintptr_t)local) << 1 | (what == OF_KERNEL ? KERNEL : 0);
    if (table_own((struct owned){key, (uintptr_t)image, NULL, (void *)word}))
        atomic_store(&tangram.hot.noted, true);
}

/* What the first module of a context takes whose kernels call printf or malloc: a stack of 512 bytes for each resident thread, and the heap. */
uint64_t stack_of_calls(void)
{
    uint64_t heap = limit_now(HEAP_SIZE);
    return STACK_OF_CALLS * resident_threads() + (heap < HEAP_USUAL ? heap : HEAP_USUAL);
}
