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

/* What follows "at=" and so on: a parameter, or a number as it stands. */
static bool word_value(CUfunction function, unsigned number, void **parameters, void **extra, uint64_t *value)
{
    static const size_t bytes[WORDS] = {
#define WORD(name, key, size) size,
#include "does.def"
    };
    const char *word = function->word[number];
    if (word != NULL && strncmp(word, "param", sizeof "param" - 1) == 0)
        return parameter(word, parameters, extra, value, bytes[number]);
    *value = word != NULL ? strtoull(word, NULL, 10) : *value;
    return true;
}

/* Its cells, and what it does to them. */
static CUresult function_effect(CUfunction function, void **parameters, void **extra, struct job *job)
{
    uint64_t value[WORDS] = {[WORD_TIMES] = 1, [WORD_BYTES] = sizeof(uint32_t)};
    for (unsigned i = 0; i < WORDS; i++)
        CHECK(word_value(function, i, parameters, extra, &value[i]), CUDA_ERROR_INVALID_VALUE);
    const uint64_t to = value[job->kind == JOB_WAIT ? WORD_SETS : WORD_TO];
    CHECK((value[WORD_AT] | value[WORD_BYTES] | to) % sizeof(uint32_t) == 0, CUDA_ERROR_INVALID_VALUE);
    job->area = (struct area){.at = value[WORD_AT], .width = value[WORD_BYTES], .rows = job->kind == JOB_ADD ? value[WORD_TIMES] : 1};
    job->ends = AT_DEVICE;
    job->value = (uint32_t)value[WORD_SEED];
    job->to = to;
    return CUDA_SUCCESS;
}

static CUresult function_ns(CUfunction function, void **parameters, void **extra, uint64_t *ns)
{
    uint32_t us = 0;
    *ns = function->ns;
    if (function->us_parameter == NULL)
        return CUDA_SUCCESS;
    CHECK(parameter(function->us_parameter, parameters, extra, &us, sizeof us), CUDA_ERROR_INVALID_VALUE);
    *ns = (uint64_t)us * 1000;
    return CUDA_SUCCESS;
}

CUresult function_job(CUfunction function, void **parameters, void **extra, struct job *job)
{
    *job = (struct job){.kind = (enum job_kind)function->does, .error = function->error};
    TRY(function_ns(function, parameters, extra, &job->ns));
    CHECK(function->counter_parameter == NULL || parameter(function->counter_parameter, parameters, extra, &job->counter, sizeof job->counter),
          CUDA_ERROR_INVALID_VALUE);
    return function->does == JOB_TIME ? CUDA_SUCCESS : function_effect(function, parameters, extra, job);
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

CUresult kernel_started(int device, uint32_t error, uint64_t counter, uint64_t ns, uint64_t end_ns)
{
    const struct counting of = {device, counter, {.start_ns = end_ns - ns, .end_ns = end_ns, .step_ns = COUNT_NS}};
    trap(device, error, end_ns);
    if (counter == 0)
        return CUDA_SUCCESS;
    if (number_at(counter) != NULL)
        return beside(count, &of, sizeof of);
    trap(device, CUDA_ERROR_ILLEGAL_ADDRESS, end_ns);
    return CUDA_SUCCESS;
}

/* The usual one: nothing but time, at once. */
static bool is_plain(CUstream stream, CUfunction function)
{
    return function->does == JOB_TIME && function->counter_parameter == NULL && stream->capture == NULL && !jobs_before(stream);
}

static CUresult launch_plain(CUstream stream, CUfunction function, void **parameters, void **extra)
{
    uint64_t ns;
    TRY(function_ns(function, parameters, extra, &ns));
    TRY(losses_launch(stream->ctx, function->local, function->runtime));
    trap(stream->ctx->device, function->error, stream_queue(stream, ns));
    return CUDA_SUCCESS;
}

CUresult launch_job(CUstream stream, const struct job *job)
{
    if (job->kind != JOB_TIME || jobs_before(stream))
        return job_submit(stream, job);
    return kernel_started(stream->ctx->device, job->error, job->counter, job->ns, stream_queue(stream, job->ns));
}

static CUresult launch(const CUlaunchConfig *how, CUfunction function, void **parameters, void **extra)
{
    CUstream stream;
    struct job job;
    TRY(stream_get(how->hStream, &stream));
    CHECK(handle_is(function, HANDLE_FUNCTION), CUDA_ERROR_INVALID_HANDLE);
    CHECK(how->gridDimX > 0 && how->gridDimY > 0 && how->gridDimZ > 0, CUDA_ERROR_INVALID_VALUE);
    const uint64_t threads = (uint64_t)how->blockDimX * how->blockDimY * how->blockDimZ;
    CHECK(threads > 0 && threads <= 1024, CUDA_ERROR_INVALID_VALUE);
    if (is_plain(stream, function))
        return launch_plain(stream, function, parameters, extra);
    TRY(function_job(function, parameters, extra, &job));
    if (stream->capture != NULL)
        return node_kernel(stream->capture, function, &job, NULL);
    TRY(losses_launch(stream->ctx, function->local, function->runtime));
    return launch_job(stream, &job);
}

static CUresult launch_each(const CUDA_LAUNCH_PARAMS *list, unsigned devices)
{
    for (const CUDA_LAUNCH_PARAMS *how = list; how < list + devices; how++)
        TRY(launch(&(CUlaunchConfig){how->gridDimX, how->gridDimY, how->gridDimZ, how->blockDimX, how->blockDimY, how->blockDimZ,
                                     how->sharedMemBytes, how->hStream, NULL, 0}, how->function, how->kernelParams, NULL));
    return CUDA_SUCCESS;
}

#include "launch.def"
