/* management.h - the few types of the management library (NVML) that the library touches, and what its files share.
 *
 * Written from the published interface, as abi.h. What each function answers is in nvml.def.
 */
#ifndef TANGRAM_MANAGEMENT_H
#define TANGRAM_MANAGEMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct nvmlDevice_st *nvmlDevice_t;
typedef int nvmlReturn_t;
enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_LIBRARY_NOT_FOUND = 12,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
    NVML_ERROR_MEMORY = 20
};
enum { NVML_UUID_BYTES = 96 }; /* specified: NVML_DEVICE_UUID_V2_BUFFER_SIZE */

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;

typedef struct { /* versions 2 and 3 */
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int instance[2]; /* GPU instance, compute instance */
} nvmlProcessInfo_t;

typedef struct {
    unsigned int gpu, memory;
} nvmlUtilization_t;

typedef struct {
    unsigned int pid;
    unsigned long long timeStamp;
    unsigned int smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;

typedef struct {
    unsigned long long timeStamp;
    unsigned int pid, smUtil, memUtil, encUtil, decUtil, jpgUtil, ofaUtil;
} nvmlProcessUtilizationInfo_v1_t;

typedef struct {
    unsigned int version, processSamplesCount;
    unsigned long long lastSeenTimeStamp;
    nvmlProcessUtilizationInfo_v1_t *procUtilArray;
} nvmlProcessesUtilizationInfo_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int instance[2];
    unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_v1_t;

typedef struct {
    unsigned int version, mode, numProcArrayEntries;
    nvmlProcessDetail_v1_t *procArray;
} nvmlProcessDetailList_t;

typedef struct {
    unsigned int fieldId, scopeId;
    long long timestamp, latencyUsec;
    int valueType;
    nvmlReturn_t nvmlReturn;
    unsigned long long value; /* a union of 8 bytes */
} nvmlFieldValue_t;

typedef struct {
    unsigned int version, isSupportedDevice;
} nvmlGpmSupport_t;

/* The parameters of a function whose types the library need not know: integers and pointers, six at most, each in a register of
 * its own. What a function has fewer is passed on as it lies there, and ignored: so it is by the calling conventions of x86-64 and of AArch64. */
#define MANAGEMENT_WORDS (uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, uintptr_t f)

/* First in every hook of the management library: is it there, and has it this function? */
#define NEEDS_NVML(name)                                                                                                       \
    do {                                                                                                                       \
        if (!management_ready())                                                                                               \
            return NVML_ERROR_LIBRARY_NOT_FOUND;                                                                               \
        if (!HAS_NVML(name))                                                                                   \
            return NVML_ERROR_FUNCTION_NOT_FOUND;                                                                              \
    } while (0)

struct gpu;

/* nvml.c: the shared GPU that a handle means, NULL for one that the grant does not name. Anything but NVML_SUCCESS is the answer:
 * a GPU that cannot be identified does not count as one that is not shared. */
nvmlReturn_t shared_gpu(nvmlDevice_t device, struct gpu **gpu);

#endif
