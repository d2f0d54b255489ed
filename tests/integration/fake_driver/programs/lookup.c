/* lookup.c - the three ways to a driver function: linked, dlsym, cuGetProcAddress by version and per-thread flag. */
#include <assert.h>
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static void *find(void *library, const char *symbol)
{
    void *at = dlsym(library, symbol);
    if (at == NULL)
        fprintf(stderr, "%s is not exported\n", symbol);
    assert(at != NULL);
    return at;
}

static void *look_up(const char *name, int version, cuuint64_t flags, int expected)
{
    void *at = (void *)1;
    CUdriverProcAddressQueryResult status;
    assert(cuGetProcAddress_v2(name, &at, version, flags, &status) == CUDA_SUCCESS);
    assert((int)status == expected);
    assert((at != NULL) == (expected == CU_GET_PROC_ADDRESS_SUCCESS));
    return at;
}

#undef cuGetProcAddress
typedef CUresult (*old_lookup)(const char *, void **, int, cuuint64_t);

int main(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    assert(library != NULL);
    const int plain = CU_GET_PROC_ADDRESS_DEFAULT, thread = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    const int found = CU_GET_PROC_ADDRESS_SUCCESS;

    assert(look_up("cuMemAlloc", 13000, plain, found) == find(library, "cuMemAlloc_v2"));
    assert(look_up("cuMemAlloc", 3010, plain, found) == find(library, "cuMemAlloc"));
    assert(look_up("cuMemcpy", 12000, plain, found) == find(library, "cuMemcpy"));
    assert(look_up("cuMemcpy", 12000, thread, found) == find(library, "cuMemcpy_ptds"));
    assert(look_up("cuMemcpy", 6000, thread, found) == find(library, "cuMemcpy"));
    assert(look_up("cuLaunchKernel", 12000, thread, found) == find(library, "cuLaunchKernel_ptsz"));
    assert(look_up("cuMemcpyHtoD", 12000, thread, found) == find(library, "cuMemcpyHtoD_v2_ptds"));
    assert(look_up("cuMemAlloc", 12000, thread, found) == find(library, "cuMemAlloc_v2"));
    assert(look_up("cuCtxCreate", 11040, plain, found) == find(library, "cuCtxCreate_v3"));
    assert(look_up("cuCtxCreate", 12060, plain, found) == find(library, "cuCtxCreate_v4"));
    assert(look_up("cuGetProcAddress", 12000, plain, found) == find(library, "cuGetProcAddress_v2"));

    look_up("cuNoSuchThing", 13000, plain, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    look_up("cuMemAlloc_v2", 13000, plain, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    look_up("cuMemAllocAsync", 8000, plain, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    void *at;
    assert(cuGetProcAddress_v2("cuInit", &at, 12000, 8, NULL) == CUDA_ERROR_INVALID_VALUE);
    assert(cuGetProcAddress_v2("cuInit", &at, 99999, 0, NULL) == CUDA_ERROR_INVALID_VALUE);
    old_lookup old = (old_lookup)find(library, "cuGetProcAddress");
    assert(old("cuNoSuchThing", &at, 12000, 0) == CUDA_ERROR_NOT_FOUND && at == NULL);

    assert(cuInit(0) == CUDA_SUCCESS);
    const char *name = NULL;
    assert(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &name) == CUDA_SUCCESS && strcmp(name, "CUDA_ERROR_OUT_OF_MEMORY") == 0);
    return 0;
}
