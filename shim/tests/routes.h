/* routes.h - the driver's functions that the test programs call, by one of three routes.
 *
 *   -DROUTE=1   direct: linked with -lcuda
 *   -DROUTE=2   dlopen("libcuda.so.1"), then dlsym
 *   -DROUTE=3   dlopen, dlsym of cuGetProcAddress_v2, then that for everything, as the CUDA runtime does
 */
#ifndef TANGRAM_TESTS_ROUTES_H
#define TANGRAM_TESTS_ROUTES_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/abi.h"

enum { DIRECT = 1, LOOKED_UP = 2, PROC_ADDRESS = 3 };

/* X(exported name, name for cuGetProcAddress, its version, parameters) */
#define FUNCTIONS(X)                                                                                                           \
    X(cuInit, "cuInit", 2000, (unsigned int flags))                                                                            \
    X(cuDriverGetVersion, "cuDriverGetVersion", 2020, (int *version))                                                          \
    X(cuDeviceGetCount, "cuDeviceGetCount", 2000, (int *count))                                                                \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000, (CUcontext * context, CUdevice device))                      \
    X(cuCtxSynchronize, "cuCtxSynchronize", 2000, (void))                                                                      \
    X(cuCtxSetCurrent, "cuCtxSetCurrent", 4000, (CUcontext context))                                                           \
    X(cuCtxGetCurrent, "cuCtxGetCurrent", 4000, (CUcontext * context))                                                         \
    X(cuModuleLoadData, "cuModuleLoadData", 2000, (CUmodule * module, const void *image))                                      \
    X(cuModuleGetFunction, "cuModuleGetFunction", 2000, (CUfunction * function, CUmodule module, const char *name))            \
    X(cuLaunchKernel, "cuLaunchKernel", 4000,                                                                                  \
      (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,               \
       unsigned int bz, unsigned int shared, CUstream stream, void **parameters, void **extra))                                \
    X(cuMemAlloc_v2, "cuMemAlloc", 3020, (CUdeviceptr * at, size_t bytes))                                                     \
    X(cuMemAllocManaged, "cuMemAllocManaged", 6000, (CUdeviceptr * at, size_t bytes, unsigned int flags))                      \
    X(cuMemAllocPitch_v2, "cuMemAllocPitch", 3020,                                                                             \
      (CUdeviceptr * at, size_t *pitch, size_t width, size_t height, unsigned int element))                                    \
    X(cuMemFree_v2, "cuMemFree", 3020, (CUdeviceptr at))                                                                       \
    X(cuMemAllocAsync, "cuMemAllocAsync", 11020, (CUdeviceptr * at, size_t bytes, CUstream stream))                            \
    X(cuMemFreeAsync, "cuMemFreeAsync", 11020, (CUdeviceptr at, CUstream stream))                                              \
    X(cuDeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool", 11020, (CUmemoryPool * pool, CUdevice device))                   \
    X(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 11020,                                                               \
      (CUdeviceptr * at, size_t bytes, CUmemoryPool pool, CUstream stream))                                                    \
    X(cuMemGetInfo_v2, "cuMemGetInfo", 3020, (size_t *free_bytes, size_t *total_bytes))                                        \
    X(cuDeviceTotalMem_v2, "cuDeviceTotalMem", 3020, (size_t *bytes, CUdevice device))                                         \
    X(cuMemCreate, "cuMemCreate", 10020,                                                                                       \
      (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags))        \
    X(cuMemRelease, "cuMemRelease", 10020, (CUmemGenericAllocationHandle handle))                                              \
    X(cuMemAddressReserve, "cuMemAddressReserve", 10020,                                                                       \
      (CUdeviceptr * at, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags))                        \
    X(cuMemMap, "cuMemMap", 10020,                                                                                             \
      (CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags))            \
    X(cuMemUnmap, "cuMemUnmap", 10020, (CUdeviceptr at, size_t bytes))

#define DECLARE(name, base, version, params) static CUresult(*p_##name) params;
FUNCTIONS(DECLARE)

#if ROUTE == 1
#define PROTOTYPE(name, base, version, params) CUresult name params;
FUNCTIONS(PROTOTYPE)
#endif

static inline void missing(const char *what)
{
    fprintf(stderr, "cannot find %s: %s\n", what, dlerror());
    exit(3);
}

static inline void take_routes(void)
{
#if ROUTE == 1
#define TAKE(name, base, version, params) p_##name = name;
    FUNCTIONS(TAKE)
#else
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *at;
    if (library == NULL)
        missing("libcuda.so.1");
#if ROUTE == 2
#define TAKE(name, base, version, params)                                                                                      \
    at = dlsym(library, #name);                                                                                                \
    if (at == NULL)                                                                                                            \
        missing(#name);                                                                                                        \
    memcpy(&p_##name, &at, sizeof at);
    FUNCTIONS(TAKE)
#else
    CUresult (*get)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
    CUdriverProcAddressQueryResult status;
    at = dlsym(library, "cuGetProcAddress_v2");
    if (at == NULL)
        missing("cuGetProcAddress_v2");
    memcpy(&get, &at, sizeof at);
    /* the runtime requests the function itself once more, and goes on with what it gets */
    if (get("cuGetProcAddress", &at, 12000, 0, &status) != CUDA_SUCCESS)
        missing("cuGetProcAddress");
    memcpy(&get, &at, sizeof at);
#define TAKE(name, base, version, params)                                                                                      \
    if (get(base, &at, version, 0, &status) != CUDA_SUCCESS || at == NULL)                                                     \
        missing(base);                                                                                                         \
    memcpy(&p_##name, &at, sizeof at);
    FUNCTIONS(TAKE)
#endif
#endif
}

#endif
