/* driver.h - libcuda as the copier uses it: loaded by name, one context on one GPU. */
#ifndef TANGRAM_COPIER_DRIVER_H
#define TANGRAM_COPIER_DRIVER_H

#include <stdbool.h>

#include "abi.h"

enum { CUDA_ERROR_NOT_READY_ = 600, MAP_FOR_ALL_CONTEXTS = 1, NO_TIMING = 2, SLEEP_WHILE_WAITING = 1, NOT_WITH_THE_DEFAULT_STREAM = 1 };

/* name, symbol, types */
#define DRIVER_FUNCTIONS(F)                                                                                                        \
    F(init, cuInit, (unsigned flags))                                                                                              \
    F(device_count, cuDeviceGetCount, (int *count))                                                                                \
    F(device, cuDeviceGet, (CUdevice * device, int ordinal))                                                                       \
    F(context_create, cuCtxCreate_v2, (CUcontext * made, unsigned flags, CUdevice device))                                         \
    F(context_use, cuCtxSetCurrent, (CUcontext context))                                                                           \
    F(host_register, cuMemHostRegister_v2, (void *at, size_t bytes, unsigned flags))                                               \
    F(reserve, cuMemAddressReserve, (CUdeviceptr * at, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags)) \
    F(reserve_end, cuMemAddressFree, (CUdeviceptr at, size_t bytes))                                                               \
    F(import, cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle * made, void *shareable, CUmemAllocationHandleType))   \
    F(map, cuMemMap, (CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags))  \
    F(set_access, cuMemSetAccess, (CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count))                     \
    F(unmap, cuMemUnmap, (CUdeviceptr at, size_t bytes))                                                                           \
    F(release, cuMemRelease, (CUmemGenericAllocationHandle handle))                                                                \
    F(stream_create, cuStreamCreate, (CUstream * made, unsigned flags))                                                            \
    F(stream_wait, cuStreamSynchronize, (CUstream stream))                                                                         \
    F(copy_out, cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, CUstream stream))                                 \
    F(copy_in, cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream))                            \
    F(event_create, cuEventCreate, (CUevent * made, unsigned flags))                                                               \
    F(event_record, cuEventRecord, (CUevent event, CUstream stream))                                                               \
    F(event_query, cuEventQuery, (CUevent event))                                                                                  \
    F(event_wait, cuEventSynchronize, (CUevent event))

struct driver {
#define DRIVER_FIELD(name, symbol, types) CUresult(*name) types;
    DRIVER_FUNCTIONS(DRIVER_FIELD)
#undef DRIVER_FIELD
    CUcontext context;
    CUdevice gpu;
};

/* Loads libcuda.so.1, from `folder` unless that is NULL, and makes a context on the GPU of that UUID, the only one that the process sees from then on.
 * Ends the program with a sentence if it cannot. */
void driver_open(struct driver *driver, const char *folder, const char *uuid);

/* Memory of this process on the GPU as NVML reports it; 0 if it does not. */
uint32_t driver_context_mib(const char *folder, const char *uuid);

#endif
