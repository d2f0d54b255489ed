/* nvml.c - the management library's answers, as the container may have them: its memory, its processes, its share of the time.
 *
 * Works in a process that never starts CUDA (nvidia-smi, a metrics agent). Used memory is what the container's processes hold on
 * lease and in contexts; what the card has free bounds what is shown as free. Lists hold the container's processes only, by the
 * numbers that the container knows them by; an arbiter that does not answer makes them empty. What the driver itself lists by
 * process is passed on for those processes.
 */
#include "hook.h"
#include "process.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NEEDS_NVML(name)                                                                                                       \
    do {                                                                                                                       \
        if (!management_ready())                                                                                               \
            return NVML_ERROR_LIBRARY_NOT_FOUND;                                                                               \
        if (tangram.management.name == NULL)                                                                                   \
            return NVML_ERROR_FUNCTION_NOT_FOUND;                                                                              \
    } while (0)

static struct card *card_of_handle(nvmlDevice_t device)
{
    char text[96]; /* specified: NVML_DEVICE_UUID_V2_BUFFER_SIZE */
    uint8_t uuid[16];
    if (grant_ready() == GRANT_NONE || tangram.management.nvmlDeviceGetUUID == NULL)
        return NULL;
    if (tangram.management.nvmlDeviceGetUUID(device, text, sizeof text) != NVML_SUCCESS)
        return NULL;
    return uuid_parse(text, strnlen(text, sizeof text), uuid) ? card_of_uuid(uuid) : NULL;
}

static void view(struct card *card, unsigned long long *total, unsigned long long *free_now, unsigned long long *used)
{
    uint64_t unleased, limit = atomic_load(&card->limit_bytes);
    if (!link_unleased(card, &unleased)) /* nvidia-smi: nobody has met the arbiter yet */
        link_wait();
    uint64_t ours = lease_free_bytes(card);
    if (*free_now > ours)
        *free_now = ours;
    if (*free_now > limit)
        *free_now = limit;
    *total = limit;
    *used = limit - *free_now;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    NEEDS_NVML(nvmlDeviceGetMemoryInfo);
    nvmlReturn_t rc = tangram.management.nvmlDeviceGetMemoryInfo(device, memory);
    struct card *card = rc == NVML_SUCCESS ? card_of_handle(device) : NULL;
    if (card != NULL)
        view(card, &memory->total, &memory->free, &memory->used);
    return rc;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    NEEDS_NVML(nvmlDeviceGetMemoryInfo_v2);
    nvmlReturn_t rc = tangram.management.nvmlDeviceGetMemoryInfo_v2(device, memory);
    struct card *card = rc == NVML_SUCCESS ? card_of_handle(device) : NULL;
    if (card != NULL) {
        view(card, &memory->total, &memory->free, &memory->used);
        memory->reserved = 0; /* the card's own reserve is outside the container's limit */
    }
    return rc;
}

/* The container's processes on a card. */
struct ours {
    struct wire_process *process;
    uint32_t count;
};

/* False: there is no memory for them. `process` is to be freed. */
static bool our_processes(struct card *card, struct ours *ours)
{
    struct quiet quiet = quiet_begin();
    *ours = (struct ours){.process = malloc(WIRE_PROCESSES_LIMIT * sizeof *ours->process)};
    if (ours->process != NULL && !card->closed && !link_processes(card, ours->process, WIRE_PROCESSES_LIMIT, &ours->count))
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

/* Entries of `width` bytes that begin with a pid (at `at`): those of ours move to the front. Returns how many. */
static unsigned int keep_ours(const struct ours *ours, void *entries, unsigned int count, size_t width, size_t at)
{
    unsigned int kept = 0, pid;
    for (unsigned int i = 0; i < count; i++) {
        char *entry = (char *)entries + i * width;
        memcpy(&pid, entry + at, sizeof pid);
        if (is_ours(ours, pid))
            memmove((char *)entries + kept++ * width, entry, width);
    }
    return kept;
}

static nvmlReturn_t list(struct card *card, unsigned int *count, void *infos, size_t width)
{
    struct ours ours;
    nvmlReturn_t rc = NVML_SUCCESS;
    if (count == NULL || (infos == NULL && *count > 0))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!our_processes(card, &ours))
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
        struct card *card = card_of_handle(device);                                                                            \
        return card == NULL ? tangram.management.name(device, count, infos) : answer;                                          \
    }
#define LISTS_OURS(name, type) LISTS(name, type, list(card, count, infos, sizeof *infos))
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

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                                    unsigned int *count, unsigned long long since_us)
{
    NEEDS_NVML(nvmlDeviceGetProcessUtilization);
    struct ours ours;
    nvmlReturn_t rc = tangram.management.nvmlDeviceGetProcessUtilization(device, samples, count, since_us);
    struct card *card = rc == NVML_SUCCESS && samples != NULL ? card_of_handle(device) : NULL;
    if (card == NULL)
        return rc;
    if (!our_processes(card, &ours))
        return NVML_ERROR_MEMORY;
    *count = keep_ours(&ours, samples, *count, sizeof *samples, offsetof(nvmlProcessUtilizationSample_t, pid));
    free(ours.process);
    return *count > 0 ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *all)
{
    NEEDS_NVML(nvmlDeviceGetProcessesUtilizationInfo);
    struct ours ours;
    nvmlReturn_t rc = tangram.management.nvmlDeviceGetProcessesUtilizationInfo(device, all);
    struct card *card = rc == NVML_SUCCESS && all->procUtilArray != NULL ? card_of_handle(device) : NULL;
    if (card == NULL)
        return rc;
    if (!our_processes(card, &ours))
        return NVML_ERROR_MEMORY;
    all->processSamplesCount = keep_ours(&ours, all->procUtilArray, all->processSamplesCount, sizeof *all->procUtilArray,
                                         offsetof(nvmlProcessUtilizationInfo_v1_t, pid));
    free(ours.process);
    return all->processSamplesCount > 0 ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *all)
{
    NEEDS_NVML(nvmlDeviceGetRunningProcessDetailList);
    struct ours ours;
    nvmlReturn_t rc = tangram.management.nvmlDeviceGetRunningProcessDetailList(device, all);
    struct card *card = rc == NVML_SUCCESS && all->procArray != NULL ? card_of_handle(device) : NULL;
    if (card == NULL)
        return rc;
    if (!our_processes(card, &ours))
        return NVML_ERROR_MEMORY;
    all->numProcArrayEntries =
        keep_ours(&ours, all->procArray, all->numProcArrayEntries, sizeof *all->procArray, offsetof(nvmlProcessDetail_v1_t, pid));
    free(ours.process);
    return rc;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count, unsigned int *pids)
{
    NEEDS_NVML(nvmlDeviceGetAccountingPids);
    struct ours ours;
    nvmlReturn_t rc = tangram.management.nvmlDeviceGetAccountingPids(device, count, pids);
    struct card *card = rc == NVML_SUCCESS && pids != NULL ? card_of_handle(device) : NULL;
    if (card == NULL)
        return rc;
    if (!our_processes(card, &ours))
        return NVML_ERROR_MEMORY;
    *count = keep_ours(&ours, pids, *count, sizeof *pids, 0);
    free(ours.process);
    return rc;
}

enum { SAMPLES = 1024, RECENT_US = 1500000 }; /* the driver samples about every second */

/* What the container's processes had of the card's time of late. False: the driver does not tell by process. */
static bool our_share(nvmlDevice_t device, struct card *card, nvmlUtilization_t *share)
{
    struct ours ours;
    struct timespec now;
    unsigned int count = SAMPLES, gpu = 0, memory = 0;
    nvmlProcessUtilizationSample_t *samples = malloc(SAMPLES * sizeof *samples);
    if (samples == NULL || !our_processes(card, &ours)) {
        free(samples);
        return false;
    }
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned long long now_us = (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
    nvmlReturn_t rc = tangram.management.nvmlDeviceGetProcessUtilization(device, samples, &count, now_us - RECENT_US);
    for (unsigned int i = 0; rc == NVML_SUCCESS && i < count; i++) {
        if (!is_ours(&ours, samples[i].pid))
            continue;
        gpu += samples[i].smUtil;
        memory += samples[i].memUtil;
    }
    share->gpu = gpu < share->gpu ? gpu : share->gpu;
    share->memory = memory < share->memory ? memory : share->memory;
    free(samples);
    free(ours.process);
    return rc == NVML_SUCCESS || rc == NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    NEEDS_NVML(nvmlDeviceGetUtilizationRates);
    nvmlReturn_t rc = tangram.management.nvmlDeviceGetUtilizationRates(device, rates);
    struct card *card = rc == NVML_SUCCESS ? card_of_handle(device) : NULL;
    if (card == NULL || tangram.management.nvmlDeviceGetProcessUtilization == NULL)
        return rc;
    nvmlUtilization_t share = *rates;
    if (our_share(device, card, &share))
        *rates = share;
    return rc;
}
