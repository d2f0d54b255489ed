/* launch.c - a launch is a stretch of time at the end of the process's one queue on a card; processes share the card's time. */
#include "internal.h"

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

CUresult launch(const CUlaunchConfig *how, CUfunction function, void **parameters, void **extra)
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

/* Each in its own stream, which says the card. */
EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned devices, unsigned flags)
{
    (void)flags;
    CHECK(list != NULL && devices > 0, CUDA_ERROR_INVALID_VALUE);
    for (const CUDA_LAUNCH_PARAMS *how = list; how < list + devices; how++)
        TRY(launch(&(CUlaunchConfig){how->gridDimX, how->gridDimY, how->gridDimZ, how->blockDimX, how->blockDimY, how->blockDimZ,
                                     how->sharedMemBytes, how->hStream, NULL, 0}, how->function, how->kernelParams, NULL));
    return CUDA_SUCCESS;
}

/* The oldest forms, with whatever block was set before. */
CUresult launch_grid(CUfunction function, int width, int height, CUstream stream)
{
    CHECK(width > 0 && height > 0, CUDA_ERROR_INVALID_VALUE);
    return launch(&(CUlaunchConfig){(unsigned)width, (unsigned)height, 1, 1, 1, 1, 0, stream, NULL, 0}, function, NULL, NULL);
}
