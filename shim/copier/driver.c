/* driver.c - libcuda and NVML, loaded at run time: the copier is built without either. */
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fail.h"

enum { WAITS_SLEEP = 4 /* CU_CTX_SCHED_BLOCKING_SYNC */, NVML_PROCESSES = 1024 };

#ifdef TANGRAM_REAL_CUDA_H /* make abi */
#define SAME(name, symbol, types) _Static_assert(__builtin_types_compatible_p(CUresult types, __typeof__(symbol)), #symbol);
DRIVER_FUNCTIONS(SAME)
#undef SAME
#endif

static void *load(const char *folder, const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s%s%s", folder != NULL ? folder : "", folder != NULL ? "/" : "", name);
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static void find(void *library, const char *symbol, void *at, size_t bytes)
{
    void *found = dlsym(library, symbol);
    if (found == NULL)
        fail("the driver library lacks %s", symbol);
    memcpy(at, &found, bytes);
}

static void need(CUresult rc, const char *call)
{
    if (rc != CUDA_SUCCESS)
        fail("%s failed with CUDA error %d", call, (int)rc);
}

void driver_open(struct driver *driver, const char *folder, const char *uuid)
{
    int count = 0;
    if (setenv("CUDA_VISIBLE_DEVICES", uuid, 1) != 0)
        fail("the environment cannot be changed");
    void *library = load(folder, "libcuda.so.1");
    if (library == NULL)
        fail("the driver library cannot be loaded: %s", dlerror());
#define FIND(name, symbol, types) find(library, #symbol, &driver->name, sizeof driver->name);
    DRIVER_FUNCTIONS(FIND)
#undef FIND
    need(driver->init(0), "cuInit");
    need(driver->device_count(&count), "cuDeviceGetCount");
    if (count != 1)
        fail("GPU %s: CUDA shows %d GPUs of that UUID, not 1", uuid, count);
    need(driver->device(&driver->gpu, 0), "cuDeviceGet");
    need(driver->context_create(&driver->context, WAITS_SLEEP, driver->gpu), "cuCtxCreate");
}

struct nvml_process { /* nvmlProcessInfo_t of nvmlDeviceGetComputeRunningProcesses_v3 */
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
};

uint32_t driver_context_mib(const char *folder, const char *uuid)
{
    static struct nvml_process process[NVML_PROCESSES];
    int (*init)(void), (*by_uuid)(const char *, void **), (*processes)(void *, unsigned *, struct nvml_process *);
    unsigned count = NVML_PROCESSES;
    void *gpu, *library = load(folder, "libnvidia-ml.so.1");
    if (library == NULL || dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3") == NULL)
        return 0;
    find(library, "nvmlInit_v2", &init, sizeof init);
    find(library, "nvmlDeviceGetHandleByUUID", &by_uuid, sizeof by_uuid);
    find(library, "nvmlDeviceGetComputeRunningProcesses_v3", &processes, sizeof processes);
    if (init() != 0 || by_uuid(uuid, &gpu) != 0 || processes(gpu, &count, process) != 0)
        return 0;
    for (unsigned i = 0; i < count; i++)
        if (process[i].pid == (unsigned)getpid() && process[i].used_bytes != ~0ull)
            return (uint32_t)(process[i].used_bytes >> 20);
    return 0;
}
