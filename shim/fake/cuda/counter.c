/* counter.c - a kernel that counts while it runs: //fake NAME counter=param0.
 *
 * Its parameter is the address of a 32-bit number in pinned host memory, which grows by one each COUNT_NS that the kernel runs.
 * A thread brings it up to date. While the process is held it writes nothing, not even what ran just before: whoever
 * suspends the process and then reads the number finds it still.
 */
#include "internal.h"

#include <stdlib.h>
#include <time.h>

enum { COUNT_NS = 100000, LOOK_NS = 500000 };

struct counting {
    int device;
    uintptr_t at;
    struct gpu_time_counter counter;
};

/* The number itself, if there still is memory. Under lock. */
static _Atomic uint32_t *number_at(uintptr_t at)
{
    const struct span *span = span_find(at);
    const bool pinned = span != NULL && (span->kind == SPAN_HOST || span->kind == SPAN_REGISTERED);
    return pinned && at % sizeof(uint32_t) == 0 && at + sizeof(uint32_t) <= span->base + span->bytes ? (_Atomic uint32_t *)at : NULL;
}

static void *count(void *given)
{
    struct counting *of = given;
    const struct timespec pause = {.tv_nsec = LOOK_NS};
    work_wait(of->device, of->counter.start_ns);
    for (bool more = true; more; nanosleep(&pause, NULL)) {
        lock();
        _Atomic uint32_t *number = number_at(of->at);
        more = number != NULL && gpu_time_count(cuda.client.page, cuda.client.slot, cuda.device[of->device].unit, &of->counter, number);
        unlock();
    }
    free(of);
    return NULL;
}

CUresult counter_start(int device, uintptr_t at, uint64_t ns, uint64_t done_ns)
{
    lock();
    const bool there = number_at(at) != NULL;
    unlock();
    if (!there) {
        trap(device, CUDA_ERROR_ILLEGAL_ADDRESS, done_ns);
        return CUDA_SUCCESS;
    }
    pthread_t thread;
    struct counting *of = calloc(1, sizeof *of);
    CHECK(of != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *of = (struct counting){device, at, {.start_ns = done_ns - ns, .end_ns = done_ns, .step_ns = COUNT_NS}};
    if (pthread_create(&thread, NULL, count, of) != 0) {
        free(of);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_detach(thread);
    return CUDA_SUCCESS;
}
