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
    if (at != NULL)
        memcpy(value, at, bytes);
    return at != NULL;
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

static CUresult launch(CUfunction function, const unsigned grid[3], const unsigned block[3], CUstream handle, void **parameters, void **extra)
{
    CUstream stream;
    uint64_t ns;
    TRY(stream_get(handle, &stream));
    CHECK(function_ok(function), CUDA_ERROR_INVALID_HANDLE);
    CHECK(grid[0] > 0 && grid[1] > 0 && grid[2] > 0, CUDA_ERROR_INVALID_VALUE);
    const uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
    CHECK(threads > 0 && threads <= 1024, CUDA_ERROR_INVALID_VALUE);
    TRY(function_ns(function, parameters, extra, &ns));
    if (stream->capture != NULL)
        return capture_kernel(stream->capture, function, ns);
    TRY(losses_launch(stream->ctx, function->local, function->runtime));
    uint64_t counter = 0;
    CHECK(function->counter_parameter == NULL || parameter(function->counter_parameter, parameters, extra, &counter, sizeof counter),
          CUDA_ERROR_INVALID_VALUE);
    const uint64_t done_ns = stream_queue(stream, ns);
    trap(stream->ctx->device, function->error, done_ns);
    return function->counter_parameter == NULL ? CUDA_SUCCESS : counter_start(stream->ctx->device, counter, ns, done_ns);
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                               unsigned shared, CUstream stream, void **parameters, void **extra)
{
    FAULT(cuLaunchKernel, 0);
    (void)shared;
    return launch(function, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, stream, parameters, extra);
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                          unsigned bz, unsigned shared, CUstream stream, void **parameters)
{
    (void)shared;
    return launch(function, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, stream, parameters, NULL);
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **parameters, void **extra)
{
    FAULT(cuLaunchKernelEx, 0);
    CHECK(how != NULL, CUDA_ERROR_INVALID_VALUE);
    return launch(function, (unsigned[]){how->gridDimX, how->gridDimY, how->gridDimZ},
                  (unsigned[]){how->blockDimX, how->blockDimY, how->blockDimZ}, how->hStream, parameters, extra);
}

/* Each in its own stream, which says the card. */
EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned devices, unsigned flags)
{
    (void)flags;
    CHECK(list != NULL && devices > 0, CUDA_ERROR_INVALID_VALUE);
    for (const CUDA_LAUNCH_PARAMS *how = list; how < list + devices; how++)
        TRY(launch(how->function, (unsigned[]){how->gridDimX, how->gridDimY, how->gridDimZ},
                   (unsigned[]){how->blockDimX, how->blockDimY, how->blockDimZ}, how->hStream, how->kernelParams, NULL));
    return CUDA_SUCCESS;
}

/* The oldest forms, with whatever block was set before. */
static CUresult launch_grid(CUfunction function, int width, int height, CUstream stream)
{
    CHECK(width > 0 && height > 0, CUDA_ERROR_INVALID_VALUE);
    return launch(function, (unsigned[]){(unsigned)width, (unsigned)height, 1}, (unsigned[]){1, 1, 1}, stream, NULL, NULL);
}

EXPORT CUresult cuLaunch(CUfunction function)
{
    return launch_grid(function, 1, 1, NULL);
}

EXPORT CUresult cuLaunchGrid(CUfunction function, int width, int height)
{
    return launch_grid(function, width, height, NULL);
}

EXPORT CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream)
{
    return launch_grid(function, width, height, stream);
}
