/* gpu.h - what the programs of this folder do first: a device, a context, memory. Codes are CUresults. */
#ifndef TANGRAM_TESTS_GPU_H
#define TANGRAM_TESTS_GPU_H

#include <stdint.h>

#include "routes.h"

#define MIB ((size_t)1 << 20)

static inline CUresult gpu_begin(void)
{
    CUcontext context;
    CUresult rc = p_cuInit(0);
    if (rc == CUDA_SUCCESS)
        rc = p_cuDevicePrimaryCtxRetain(&context, 0);
    return rc == CUDA_SUCCESS ? p_cuCtxSetCurrent(context) : rc;
}

static inline CUresult gpu_take(size_t mib)
{
    CUdeviceptr at;
    return p_cuMemAlloc_v2(&at, mib * MIB);
}

/* A context, and memory that is kept. */
static inline int gpu_hold(size_t mib)
{
    CUresult rc = gpu_begin();
    return (int)(rc == CUDA_SUCCESS ? gpu_take(mib) : rc);
}

/* Allocates and frees n times; the first code that is no success. */
static inline int gpu_churn(unsigned rounds, size_t mib)
{
    CUresult rc = CUDA_SUCCESS;
    for (unsigned i = 0; i < rounds && rc == CUDA_SUCCESS; i++) {
        CUdeviceptr at;
        rc = p_cuMemAlloc_v2(&at, mib * MIB);
        if (rc == CUDA_SUCCESS)
            rc = p_cuMemFree_v2(at);
    }
    return (int)rc;
}

#endif
