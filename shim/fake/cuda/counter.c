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

/* The number itself, if there still is memory. */
static _Atomic uint32_t *number_at(uintptr_t at)
{
    struct span *span;
    SCOPED tables = hold(&cuda.lock);
    const bool pinned = span_get(at, SPAN_PINNED, CUDA_ERROR_INVALID_VALUE, &span) == CUDA_SUCCESS;
    return pinned && at % sizeof(uint32_t) == 0 && at + sizeof(uint32_t) <= span->base + span->bytes ? (_Atomic uint32_t *)at : NULL;
}

static void *count(void *given)
{
    struct counting of = *(struct counting *)given;
    const struct timespec pause = {.tv_nsec = LOOK_NS};
    free(given);
    work_wait(of.device, of.counter.start_ns);
    for (bool more = true; more; nanosleep(&pause, NULL)) {
        SCOPED tables = hold(&cuda.lock);
        _Atomic uint32_t *number = number_at(of.at);
        more = number != NULL && gpu_time_count(cuda.client.page, cuda.client.slot, cuda.device[of.device].unit, &of.counter, number);
    }
    return NULL;
}

CUresult counter_start(int device, uintptr_t at, uint64_t ns, uint64_t done_ns)
{
    const struct counting of = {device, at, {.start_ns = done_ns - ns, .end_ns = done_ns, .step_ns = COUNT_NS}};
    if (number_at(at) != NULL)
        return beside(count, &of, sizeof of);
    trap(device, CUDA_ERROR_ILLEGAL_ADDRESS, done_ns);
    return CUDA_SUCCESS;
}
