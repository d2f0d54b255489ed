/* chain.c - another interposer, as profilers and allocators are: it counts allocations and goes on to the next definition,
 * found by RTLD_NEXT. Its destructor prints the count. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "../src/abi.h"

static unsigned long calls;

__attribute__((visibility("default"))) CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes);
__attribute__((visibility("default"))) int getpagesize(void);

CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes)
{
    CUresult (*next)(CUdeviceptr *, size_t);
    void *found = dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    memcpy(&next, &found, sizeof found);
    calls++;
    return next == NULL ? CUDA_ERROR_NOT_FOUND : next(at, bytes);
}

/* A function that has nothing to do with CUDA: RTLD_NEXT must mean "after this object", not "after libtangram". */
int getpagesize(void)
{
    int (*next)(void);
    void *found = dlsym(RTLD_NEXT, "getpagesize");
    memcpy(&next, &found, sizeof found);
    return next == NULL || next == getpagesize ? -1 : next();
}

__attribute__((destructor)) static void report(void)
{
    fprintf(stderr, "chain: %lu allocations, page %d\n", calls, getpagesize());
}
