/* lists.c - what NVML answers with a list: processes, their use of a GPU, field values. */
#define _GNU_SOURCE
#include "internal.h"
#include "calls.h"

#include <stdio.h>
#include <time.h>

#define MOST (FAKE_SLOTS * 2)

/* Processes on a device, in nvmlProcessInfo_v2_t or its beginning, of `width` bytes. While a process that was
 * described as nvidia-cuda-mps-server is on a unit, all of CUDA there are clients of MPS. */
enum listed { COMPUTE, GRAPHICS, MPS_CLIENTS };

static bool mps_runs(uint32_t unit)
{
    const struct fake_page *page = nvml.client.page;
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        if (page->slot[slot].kind == FAKE_FOREIGN && page->unit[unit].used_bytes[slot] > 0 &&
            strcmp(page->slot[slot].name, "nvidia-cuda-mps-server") == 0)
            return true;
    return false;
}

/* Adds a unit's processes to those found so far: one entry for all connections of a process. Returns how many there are now. */
static unsigned add_processes(uint32_t unit, enum listed which, nvmlProcessInfo_v2_t found[MOST], unsigned first)
{
    const struct fake_page *page = nvml.client.page;
    const enum listed cuda = mps_runs(unit) ? MPS_CLIENTS : COMPUTE;
    const bool mig = unit >= FAKE_GPUS;
    unsigned count = first;
    for (uint32_t slot = 0; slot < FAKE_SLOTS && count < MOST; slot++) {
        const struct fake_slot *of = &page->slot[slot];
        const bool is_listed = (of->kind == FAKE_CUDA && which == cuda) || (of->kind == FAKE_FOREIGN && which == COMPUTE);
        unsigned at = first;
        if (!is_listed || of->contexts[unit] + page->unit[unit].used_bytes[slot] == 0)
            continue;
        while (at < count && found[at].pid != (unsigned)of->pid)
            at++;
        if (at == count)
            found[count++] = (nvmlProcessInfo_v2_t){.pid = (unsigned)of->pid,
                                                    .gpuInstanceId = mig ? fake_gi_of(unit) : 0xffffffffu,
                                                    .computeInstanceId = mig ? 0 : 0xffffffffu};
        found[at].usedGpuMemory += page->unit[unit].used_bytes[slot] - page->unit[unit].unlisted_bytes[slot];
    }
    return count;
}

static nvmlReturn_t list_processes(const struct target *to, enum listed which, unsigned *count, void *infos, size_t width)
{
    static _Thread_local nvmlProcessInfo_v2_t found[MOST];
    const unsigned capacity = *count;
    *count = 0;
    page_lock(nvml.client.page);
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++) {
        const struct fake_unit *of = &nvml.client.page->unit[unit];
        if (unit == to->unit || (!to->mig && unit >= FAKE_GPUS && of->live && of->gpu == to->gpu))
            *count = add_processes(unit, which, found, *count);
    }
    page_unlock(nvml.client.page);
    CHECK(*count <= capacity, NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned i = 0; i < *count; i++)
        memcpy((char *)infos + i * width, &found[i], width);
    return NVML_SUCCESS;
}

/* A described process has its described name. One of this PID namespace has its own name, so that a container's
 * processes are listed by the names that they have in the container. */
static nvmlReturn_t name_of(unsigned pid, char *name, unsigned length)
{
    char here[FAKE_NAME];
    const char *described = NULL, *connected = NULL;
    for (const struct fake_slot *of = nvml.client.page->slot; of < nvml.client.page->slot + FAKE_SLOTS; of++) {
        if (of->kind == FAKE_FREE || of->pid != (int32_t)pid)
            continue;
        connected = of->name;
        described = of->kind == FAKE_FOREIGN ? of->name : described;
    }
    const char *found = described != NULL ? described : process_name((int32_t)pid, here) ? here : connected;
    CHECK(found != NULL, NVML_ERROR_NOT_FOUND);
    snprintf(name, length, "%.63s", found);
    return NVML_SUCCESS;
}

/* What ran since the last sample at or before a time, or since the oldest that is kept: a described process has no kernels. */
static nvmlReturn_t utilization_of(uint32_t gpu, nvmlProcessUtilizationSample_t *samples, unsigned *count, unsigned long long since_us)
{
    const struct fake_page *page = nvml.client.page;
    const uint64_t newest = atomic_load(&page->samples) - 1;
    const unsigned capacity = samples == NULL ? 0 : *count;
    uint64_t from = newest;
    while (from > 0 && newest - from < FAKE_SAMPLES - 2 && atomic_load(&page->sampled_us[from % FAKE_SAMPLES]) > since_us)
        from--; /* the one before the oldest of these is being written perhaps */
    *count = 0;
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++) {
        const struct fake_slot *of = &page->slot[slot];
        const unsigned percent = of->kind == FAKE_CUDA ? gpu_time_percent(page, of->sampled_ns[gpu], from, newest) : 0;
        if (percent == 0 || (*count)++ >= capacity)
            continue;
        samples[*count - 1] = (nvmlProcessUtilizationSample_t){.pid = (unsigned)of->pid,
                                                               .timeStamp = atomic_load(&page->sampled_us[newest % FAKE_SAMPLES]),
                                                               .smUtil = percent,
                                                               .memUtil = percent / 3};
    }
    CHECK(*count > 0, NVML_ERROR_NOT_FOUND);
    return *count <= capacity ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

enum { BLACKWELL = 10 }; /* NVML_DEVICE_ARCH_BLACKWELL */

/* Errors of links are counted on the first one. */
static uint64_t of_first_link(const struct target *to, unsigned link, enum fake_reading which)
{
    return link == 0 ? atomic_load(&to->on->reading[which]) : 0;
}

static nvmlReturn_t field_of(nvmlDevice_t device, nvmlFieldValue_t *field)
{
    struct target to;
    TRY(target_of(device, GPU, &to));
    const unsigned link = field->scopeId;
    switch (field->fieldId) {
#define FIELD(name, type, member, number)                                                                                      \
    case NVML_FI_##name:                                                                                                       \
        field->valueType = NVML_VALUE_TYPE_##type;                                                                             \
        field->value.member = (number);                                                                                        \
        return NVML_SUCCESS;
#define LINK_FIELD(name, supported, number)                                                                                    \
    case NVML_FI_##name:                                                                                                       \
        CHECK((supported) && to.on->links_wired > 0, NVML_ERROR_NOT_SUPPORTED);                                                \
        CHECK(link < to.on->links_wired, NVML_ERROR_INVALID_ARGUMENT);                                                         \
        field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;                                                                 \
        field->value.ullVal = (number);                                                                                        \
        return NVML_SUCCESS;
#include "fields.def"
    default: return NVML_ERROR_NOT_SUPPORTED;
    }
}

static nvmlReturn_t fields_of(nvmlDevice_t device, int count, nvmlFieldValue_t *fields)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; i < count; i++) {
        fields[i].timestamp = (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
        fields[i].latencyUsec = 0;
        fields[i].nvmlReturn = field_of(device, &fields[i]);
    }
    return NVML_SUCCESS;
}

#include "lists.def"
