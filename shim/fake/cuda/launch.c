/* launch.c - a launch is a stretch of time at the end of the process's one queue on a GPU; processes share the GPU's time. */
#include "internal.h"
#include "calls.h"

#include <stdlib.h>
#include <time.h>

/* A parameter by its word, "paramN". The caller's buffer has no types: only where the first one stands is known there. */
static bool parameter(const char *word, void **parameters, void **extra, void *value, size_t bytes)
{
    const unsigned number = (unsigned)(word[sizeof "param" - 1] - '0');
    const void *at = parameters != NULL ? parameters[number] : NULL;
    for (; at == NULL && number == 0 && extra != NULL && *extra != CU_LAUNCH_PARAM_END; extra += 2)
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
            at = extra[1];
    CHECK(at != NULL, false);
    memcpy(value, at, bytes);
    return true;
}

CUresult function_ns(CUfunction function, void **parameters, void **extra, uint64_t *ns)
{
    uint32_t us = 0;
    *ns = function->ns;
    if (function->us_parameter == NULL)
        return CUDA_SUCCESS;
    CHECK(parameter(function->us_parameter, parameters, extra, &us, sizeof us), CUDA_ERROR_INVALID_VALUE);
    *ns = (uint64_t)us * 1000;
    return CUDA_SUCCESS;
}

/* A kernel that counts while it runs: //fake NAME counter=param0.
 *
 * Its parameter is the address of a 32-bit number in pinned host memory, which grows by one each COUNT_NS that the kernel runs.
 * A thread brings it up to date. While the process is suspended it writes nothing, not even what ran just before: a test
 * that suspends the process and then reads the number sees it unchanged. */
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
    SCOPED tables = locked(&cuda.lock);
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
        SCOPED tables = locked(&cuda.lock);
        _Atomic uint32_t *number = number_at(of.at);
        more = number != NULL && gpu_time_count(cuda.client.page, cuda.client.slot, cuda.device[of.device].unit, &of.counter, number);
    }
    return NULL;
}

/* A kernel of ns that ends at done_ns counts at that address. */
static CUresult counter_start(int device, uintptr_t at, uint64_t ns, uint64_t done_ns)
{
    const struct counting of = {device, at, {.start_ns = done_ns - ns, .end_ns = done_ns, .step_ns = COUNT_NS}};
    if (number_at(at) != NULL)
        return beside(count, &of, sizeof of);
    trap(device, CUDA_ERROR_ILLEGAL_ADDRESS, done_ns);
    return CUDA_SUCCESS;
}

static CUresult launch(const CUlaunchConfig *how, CUfunction function, void **parameters, void **extra)
{
    CUstream stream;
    uint64_t ns, counter = 0;
    TRY(stream_get(how->hStream, &stream));
    CHECK(handle_is(function, HANDLE_FUNCTION), CUDA_ERROR_INVALID_HANDLE);
    CHECK(how->gridDimX > 0 && how->gridDimY > 0 && how->gridDimZ > 0, CUDA_ERROR_INVALID_VALUE);
    const uint64_t threads = (uint64_t)how->blockDimX * how->blockDimY * how->blockDimZ;
    CHECK(threads > 0 && threads <= 1024, CUDA_ERROR_INVALID_VALUE);
    TRY(function_ns(function, parameters, extra, &ns));
    if (stream->capture != NULL)
        return node_kernel(stream->capture, function, parameters, extra, NULL);
    TRY(losses_launch(stream->ctx, function->local, function->runtime));
    const bool counts = function->counter_parameter != NULL;
    CHECK(!counts || parameter(function->counter_parameter, parameters, extra, &counter, sizeof counter), CUDA_ERROR_INVALID_VALUE);
    const uint64_t done_ns = stream_queue(stream, ns);
    trap(stream->ctx->device, function->error, done_ns);
    return counts ? counter_start(stream->ctx->device, counter, ns, done_ns) : CUDA_SUCCESS;
}

static CUresult launch_each(const CUDA_LAUNCH_PARAMS *list, unsigned devices)
{
    for (const CUDA_LAUNCH_PARAMS *how = list; how < list + devices; how++)
        TRY(launch(&(CUlaunchConfig){how->gridDimX, how->gridDimY, how->gridDimZ, how->blockDimX, how->blockDimY, how->blockDimZ,
                                     how->sharedMemBytes, how->hStream, NULL, 0}, how->function, how->kernelParams, NULL));
    return CUDA_SUCCESS;
}

#include "launch.def"
