/* nvml_usage.c - how busy the container keeps a GPU: the driver's samples by process, of its own processes.
 *
 * Where the driver shows nothing by process, nothing of the whole GPU is shown either.
 */
#include "hooks/hook.h"
#include "views/nvml_processes.h"

#include <stdlib.h>
#include <time.h>

typedef nvmlProcessUtilizationSample_t sample;

static nvmlReturn_t read_samples(const struct listing *list, void *entries, unsigned int *count)
{
    const unsigned long long *since_us = list->of;
    return tangram.management.nvmlDeviceGetProcessUtilization(list->device, entries, count, *since_us);
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                                    unsigned int *count, unsigned long long since_us)
{
    NEEDS_NVML(nvmlDeviceGetProcessUtilization);
    struct gpu *gpu;
    nvmlReturn_t rc = shared_gpu(device, &gpu);
    if (rc != NVML_SUCCESS)
        return rc;
    if (gpu == NULL || count == NULL)
        return tangram.management.nvmlDeviceGetProcessUtilization(device, samples, count, since_us);
    const struct listing list = {device, &since_us, sizeof *samples, offsetof(sample, pid), read_samples};
    rc = pass_own_entries(&list, gpu, samples, count);
    return rc == NVML_SUCCESS && *count == 0 ? NVML_ERROR_NOT_FOUND : rc;
}

static nvmlReturn_t read_infos(const struct listing *list, void *entries, unsigned int *count)
{
    nvmlProcessesUtilizationInfo_t all = *(const nvmlProcessesUtilizationInfo_t *)list->of;
    all.procUtilArray = entries;
    all.processSamplesCount = *count;
    nvmlReturn_t rc = tangram.management.nvmlDeviceGetProcessesUtilizationInfo(list->device, &all);
    *count = all.processSamplesCount;
    return rc;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *all)
{
    NEEDS_NVML(nvmlDeviceGetProcessesUtilizationInfo);
    struct gpu *gpu;
    nvmlReturn_t rc = shared_gpu(device, &gpu);
    if (rc != NVML_SUCCESS)
        return rc;
    if (gpu == NULL || all == NULL)
        return tangram.management.nvmlDeviceGetProcessesUtilizationInfo(device, all);
    const struct listing list = {device, all, sizeof *all->procUtilArray, offsetof(nvmlProcessUtilizationInfo_v1_t, pid),
                                 read_infos};
    rc = pass_own_entries(&list, gpu, all->procUtilArray, &all->processSamplesCount);
    return rc == NVML_SUCCESS && all->processSamplesCount == 0 ? NVML_ERROR_NOT_FOUND : rc;
}

enum { RECENT_US = 1500000 }; /* the driver samples about every second */

/* What the container's processes had of each engine of late, in percent. */
static nvmlReturn_t our_share(nvmlDevice_t device, struct gpu *gpu, sample *sum)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned long long since_us = (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000 - RECENT_US;
    const struct listing list = {device, &since_us, sizeof(sample), offsetof(sample, pid), read_samples};
    char *entries;
    unsigned int count;
    *sum = (sample){0};
    if (!HAS_NVML(nvmlDeviceGetProcessUtilization))
        return NVML_ERROR_NOT_SUPPORTED;
    nvmlReturn_t rc = own_entries(&list, gpu, &entries, &count);
    for (unsigned int i = 0; rc == NVML_SUCCESS && i < count; i++) {
        const sample *of = &((const sample *)(const void *)entries)[i];
        sum->smUtil += of->smUtil;
        sum->memUtil += of->memUtil;
        sum->encUtil += of->encUtil;
        sum->decUtil += of->decUtil;
    }
    free(entries);
    return rc == NVML_SUCCESS || rc == NVML_ERROR_MEMORY ? rc : NVML_ERROR_NOT_SUPPORTED;
}

static unsigned int lower(unsigned int one, unsigned int other)
{
    return one < other ? one : other;
}

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    NEEDS_NVML(nvmlDeviceGetUtilizationRates);
    struct gpu *gpu;
    sample share;
    nvmlUtilization_t whole;
    nvmlReturn_t rc = shared_gpu(device, &gpu);
    if (rc != NVML_SUCCESS)
        return rc;
    if (gpu == NULL || rates == NULL)
        return tangram.management.nvmlDeviceGetUtilizationRates(device, rates);
    rc = tangram.management.nvmlDeviceGetUtilizationRates(device, &whole);
    if (rc == NVML_SUCCESS)
        rc = our_share(device, gpu, &share);
    if (rc == NVML_SUCCESS)
        *rates = (nvmlUtilization_t){.gpu = lower(share.smUtil, whole.gpu), .memory = lower(share.memUtil, whole.memory)};
    return rc;
}

#define ENGINE(name, util)                                                                                                     \
    EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned int *percent, unsigned int *period_us)                              \
    {                                                                                                                          \
        NEEDS_NVML(name);                                                                                                      \
        struct gpu *gpu;                                                                                                       \
        sample share;                                                                                                          \
        unsigned int whole;                                                                                                    \
        nvmlReturn_t rc = shared_gpu(device, &gpu);                                                                            \
        if (rc != NVML_SUCCESS)                                                                                                \
            return rc;                                                                                                         \
        if (gpu == NULL || percent == NULL)                                                                                    \
            return tangram.management.name(device, percent, period_us);                                                        \
        rc = tangram.management.name(device, &whole, period_us);                                                               \
        if (rc == NVML_SUCCESS)                                                                                                \
            rc = our_share(device, gpu, &share);                                                                               \
        if (rc == NVML_SUCCESS)                                                                                                \
            *percent = lower(share.util, whole);                                                                               \
        return rc;                                                                                                             \
    }

ENGINE(nvmlDeviceGetEncoderUtilization, encUtil)
ENGINE(nvmlDeviceGetDecoderUtilization, decUtil)
