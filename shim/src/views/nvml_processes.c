/* nvml_processes.c - the container's own processes on a GPU, in every list that the management library has of them.
 *
 * Lists of processes that compute come from the arbiter, by the process IDs of the container; if the arbiter does not
 * answer, they are empty. What only the driver knows about processes is read whole, into a buffer of our own, and passed on for those
 * processes: the buffer size that a program passes, or requests, reveals nothing about the number of others.
 */
#include "views/nvml_processes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hooks/hook.h"

bool our_processes(struct gpu *gpu, struct ours *ours)
{
    struct quiet quiet = quiet_begin();
    *ours = (struct ours){.process = malloc(WIRE_PROCESSES_LIMIT * sizeof *ours->process)};
    if (ours->process != NULL && !gpu->closed && !link_processes(gpu, ours->process, WIRE_PROCESSES_LIMIT, &ours->count))
        ours->count = 0;
    quiet_end(quiet);
    return ours->process != NULL;
}

static bool is_ours(const struct ours *ours, unsigned int pid)
{
    for (uint32_t i = 0; i < ours->count; i++)
        if (ours->process[i].pid == pid)
            return true;
    return false;
}

/* Those of ours move to the front. Returns how many. */
static unsigned int keep_ours(const struct ours *ours, const struct listing *list, char *entries, unsigned int count)
{
    unsigned int kept = 0, pid;
    for (unsigned int i = 0; i < count; i++) {
        char *entry = entries + i * list->width;
        memcpy(&pid, entry + list->pid_at, sizeof pid);
        if (is_ours(ours, pid))
            memmove(entries + kept++ * list->width, entry, list->width);
    }
    return kept;
}

enum { FIRST_CAPACITY = 128, TRIES = 4, CAPACITY_LIMIT = 65536 }; /* guessed: a GPU has tens of processes, a driver keeps 100 samples of each */

/* Everything that the driver lists. Processes may start between two tries, so the buffer is larger than the driver requested. */
static nvmlReturn_t read_all(const struct listing *list, char **entries, unsigned int *count)
{
    nvmlReturn_t rc = NVML_ERROR_INSUFFICIENT_SIZE;
    unsigned int capacity = FIRST_CAPACITY;
    *entries = NULL;
    for (unsigned try = 0; try < TRIES && rc == NVML_ERROR_INSUFFICIENT_SIZE && capacity <= CAPACITY_LIMIT; try++) {
        free(*entries);
        *entries = calloc(capacity, list->width);
        if (*entries == NULL)
            return NVML_ERROR_MEMORY;
        *count = capacity;
        rc = list->read(list, *entries, count);
        if (rc == NVML_SUCCESS && *count > capacity)
            *count = capacity;
        capacity = (*count > capacity ? *count : capacity) * 2;
    }
    return rc;
}

nvmlReturn_t own_entries(const struct listing *list, struct gpu *gpu, char **entries, unsigned int *count)
{
    struct ours ours;
    nvmlReturn_t rc = read_all(list, entries, count);
    if (rc == NVML_ERROR_NOT_FOUND) { /* no process has any */
        *count = 0;
        return NVML_SUCCESS;
    }
    if (rc != NVML_SUCCESS)
        return rc;
    if (!our_processes(gpu, &ours))
        return NVML_ERROR_MEMORY;
    *count = keep_ours(&ours, list, *entries, *count);
    free(ours.process);
    return NVML_SUCCESS;
}

nvmlReturn_t pass_own_entries(const struct listing *list, struct gpu *gpu, void *capacity, unsigned int *count)
{
    char *entries;
    unsigned int own;
    nvmlReturn_t rc = own_entries(list, gpu, &entries, &own);
    if (rc == NVML_SUCCESS) {
        if (own > (capacity == NULL ? 0 : *count))
            rc = NVML_ERROR_INSUFFICIENT_SIZE;
        else if (own > 0)
            memcpy(capacity, entries, own * list->width);
        *count = own;
    }
    free(entries);
    return rc;
}

static nvmlReturn_t list_ours(struct gpu *gpu, unsigned int *count, void *infos, size_t width)
{
    struct ours ours;
    nvmlReturn_t rc = NVML_SUCCESS;
    if (count == NULL || (infos == NULL && *count > 0))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!our_processes(gpu, &ours))
        return NVML_ERROR_MEMORY;
    if (ours.count > *count)
        rc = NVML_ERROR_INSUFFICIENT_SIZE;
    for (uint32_t i = 0; rc == NVML_SUCCESS && i < ours.count; i++) {
        nvmlProcessInfo_t info = {
            .pid = ours.process[i].pid, .usedGpuMemory = ours.process[i].used_bytes, .instance = {UINT32_MAX, UINT32_MAX}};
        memcpy((char *)infos + i * width, &info, width); /* version 1 is a prefix of the others */
    }
    *count = ours.count;
    free(ours.process);
    return rc;
}

/* A process with a context is listed as a compute process, whatever it draws. */
static nvmlReturn_t list_none(unsigned int *count)
{
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

#define LISTS(name, type, answer)                                                                                              \
    EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, type *infos)                                            \
    {                                                                                                                          \
        NEEDS_NVML(name);                                                                                                      \
        struct gpu *gpu;                                                                                                       \
        nvmlReturn_t rc = shared_gpu(device, &gpu);                                                                            \
        if (rc != NVML_SUCCESS)                                                                                                \
            return rc;                                                                                                         \
        return gpu == NULL ? tangram.management.name(device, count, infos) : answer;                                           \
    }
#define LISTS_OURS(name, type) LISTS(name, type, list_ours(gpu, count, infos, sizeof *infos))
#define LISTS_NONE(name, type) LISTS(name, type, list_none(count))

LISTS_OURS(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t)
LISTS_OURS(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_t)
LISTS_OURS(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t)
LISTS_NONE(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
LISTS_NONE(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_t)
LISTS_NONE(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
LISTS_NONE(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
LISTS_NONE(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_t)
LISTS_NONE(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)

static nvmlReturn_t read_details(const struct listing *list, void *entries, unsigned int *count)
{
    nvmlProcessDetailList_t all = *(const nvmlProcessDetailList_t *)list->of;
    all.procArray = entries;
    all.numProcArrayEntries = *count;
    nvmlReturn_t rc = tangram.management.nvmlDeviceGetRunningProcessDetailList(list->device, &all);
    *count = all.numProcArrayEntries;
    return rc;
}

EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *all)
{
    NEEDS_NVML(nvmlDeviceGetRunningProcessDetailList);
    struct gpu *gpu;
    nvmlReturn_t rc = shared_gpu(device, &gpu);
    if (rc != NVML_SUCCESS)
        return rc;
    if (gpu == NULL || all == NULL)
        return tangram.management.nvmlDeviceGetRunningProcessDetailList(device, all);
    const struct listing list = {device, all, sizeof *all->procArray, offsetof(nvmlProcessDetail_v1_t, pid), read_details};
    return pass_own_entries(&list, gpu, all->procArray, &all->numProcArrayEntries);
}

/* A number without a process in the container's own /proc is not passed to the driver, which may know it as a process of the node. */
EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
    NEEDS_NVML(nvmlSystemGetProcessName);
    char path[32];
    struct quiet quiet = quiet_begin();
    snprintf(path, sizeof path, "/proc/%u", pid);
    bool hidden = grant_ready() != GRANT_NONE && access(path, F_OK) != 0;
    quiet_end(quiet);
    return hidden ? NVML_ERROR_NOT_FOUND : tangram.management.nvmlSystemGetProcessName(pid, name, length);
}
