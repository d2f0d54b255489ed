/* lists.c - what NVML answers with a list: processes, their use of a card, field values, places for instances. */
#define _GNU_SOURCE
#include "internal.h"

#include <stdio.h>
#include <time.h>

#define MOST (FAKE_SLOTS * 2)

/* Adds a slot's memory to its process: several connections of a process are one process. Returns how many there are now. */
static unsigned add_process(nvmlProcessInfo_v2_t found[MOST], unsigned first, unsigned count, const struct fake_slot *of, uint32_t unit)
{
    const bool mig = unit >= FAKE_CARDS;
    unsigned at = first;
    while (at < count && found[at].pid != (unsigned)of->pid)
        at++;
    if (at == count)
        found[count++] = (nvmlProcessInfo_v2_t){.pid = (unsigned)of->pid,
                                                .gpuInstanceId = mig ? nvml.client.page->unit[unit].gi : 0xffffffffu,
                                                .computeInstanceId = mig ? 0 : 0xffffffffu};
    found[at].usedGpuMemory += of->used_bytes[unit];
    return count;
}

static bool mps_runs(uint32_t unit)
{
    for (const struct fake_slot *of = nvml.client.page->slot; of < nvml.client.page->slot + FAKE_SLOTS; of++)
        if (of->kind == FAKE_FOREIGN && of->used_bytes[unit] > 0 && strcmp(of->name, "nvidia-cuda-mps-server") == 0)
            return true;
    return false;
}

/* One entry per process and unit, a card's instances included. Returns how many. */
static unsigned processes(const struct target *to, enum listed which, nvmlProcessInfo_v2_t found[MOST])
{
    unsigned count = 0;
    const struct fake_page *page = nvml.client.page;
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++) {
        const bool is_of_card = unit >= FAKE_CARDS && page->unit[unit].live && page->unit[unit].card == to->card;
        if (unit != to->unit && (to->mig || !is_of_card))
            continue;
        const enum listed cuda = mps_runs(unit) ? MPS_CLIENTS : COMPUTE;
        const unsigned first = count;
        for (uint32_t slot = 0; slot < FAKE_SLOTS && count < MOST; slot++) {
            const struct fake_slot *of = &page->slot[slot];
            const bool is_listed = (of->kind == FAKE_CUDA && which == cuda) || (of->kind == FAKE_FOREIGN && which == COMPUTE);
            if (is_listed && of->contexts[unit] + of->used_bytes[unit] > 0)
                count = add_process(found, first, count, of, unit);
        }
    }
    return count;
}

nvmlReturn_t list_processes(const struct target *to, enum listed which, unsigned *count, void *infos, size_t width)
{
    static _Thread_local nvmlProcessInfo_v2_t found[MOST];
    page_lock(nvml.client.page);
    const unsigned have = processes(to, which, found), room = *count;
    page_unlock(nvml.client.page);
    *count = have;
    CHECK(have <= room, NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned i = 0; i < have; i++)
        memcpy((char *)infos + i * width, &found[i], width);
    return NVML_SUCCESS;
}

/* A process that was described by its name there. One of this PID namespace goes by its own: who lists a container's
 * processes names them as the container does. */
EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length)
{
    char here[FAKE_NAME];
    const char *described = NULL, *connected = NULL;
    TRY(ready());
    CHECK(name != NULL && length > 0, NVML_ERROR_INVALID_ARGUMENT);
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

static unsigned long long now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (unsigned long long)now.tv_sec * 1000000u + (unsigned long long)now.tv_nsec / 1000u;
}

/* Of a slot on a whole card, over all samples after a time that are still remembered. */
static unsigned average(const struct fake_slot *of, uint32_t card, unsigned long long since_us)
{
    const struct fake_page *page = nvml.client.page;
    const uint64_t taken = atomic_load(&page->samples);
    unsigned sum = 0, count = 0;
    for (uint64_t back = 1; back < FAKE_SAMPLES && back <= taken; back++) { /* the oldest is being written perhaps */
        const uint64_t at = (taken - back) % FAKE_SAMPLES;
        if (atomic_load(&page->sampled_us[at]) <= since_us)
            break;
        sum += atomic_load(&of->sampled[card][at]);
        count++;
    }
    return count == 0 ? 0 : (sum + count / 2) / count;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned *count,
                                                    unsigned long long since_us)
{
    struct target to;
    TRY(target_of(device, CARD, &to));
    CHECK(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    const struct fake_page *page = nvml.client.page;
    const uint64_t taken = atomic_load(&page->samples);
    const unsigned room = samples == NULL ? 0 : *count;
    *count = 0;
    for (uint32_t slot = 0; slot < FAKE_SLOTS && taken > 0; slot++) {
        const struct fake_slot *of = &page->slot[slot];
        const unsigned percent = of->kind == FAKE_CUDA ? average(of, to.card, since_us) : 0;
        if (percent == 0 || (*count)++ >= room)
            continue;
        samples[*count - 1] = (nvmlProcessUtilizationSample_t){.pid = (unsigned)of->pid,
                                                               .timeStamp = atomic_load(&page->sampled_us[(taken - 1) % FAKE_SAMPLES]),
                                                               .smUtil = percent,
                                                               .memUtil = percent / 3};
    }
    CHECK(*count > 0, NVML_ERROR_NOT_FOUND);
    return *count <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

static nvmlReturn_t field_of(nvmlDevice_t device, nvmlFieldValue_t *field)
{
    struct target to;
    TRY(target_of(device, CARD, &to));
    switch (field->fieldId) {
#define FIELD(name, type, member, number)                                                                                      \
    case NVML_FI_##name:                                                                                                       \
        field->valueType = NVML_VALUE_TYPE_##type;                                                                             \
        field->value.member = (number);                                                                                        \
        return NVML_SUCCESS;
#include "fields.def"
    default: return NVML_ERROR_NOT_SUPPORTED;
    }
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *fields)
{
    struct target to;
    TRY(target_of(device, LIVE, &to));
    CHECK(fields != NULL && count > 0, NVML_ERROR_INVALID_ARGUMENT);
    for (int i = 0; i < count; i++) {
        fields[i].timestamp = (long long)now_us();
        fields[i].latencyUsec = 0;
        fields[i].nvmlReturn = field_of(device, &fields[i]);
    }
    return NVML_SUCCESS;
}

/* GPU instances. */

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned id, nvmlGpuInstancePlacement_t *places, unsigned *count)
{
    struct target to;
    TRY(target_of(device, CARD, &to));
    CHECK(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    const struct fake_profile *profile = to.on->profile;
    while (profile < to.on->profile + FAKE_PROFILES && (profile->bytes == 0 || profile->id != id))
        profile++;
    CHECK(profile < to.on->profile + FAKE_PROFILES, NVML_ERROR_NOT_SUPPORTED);
    const unsigned room = *count;
    *count = 0;
    for (unsigned start = 0; start <= profile->last_start; start += profile->memory, (*count)++)
        if (places != NULL && *count < room)
            places[*count] = (nvmlGpuInstancePlacement_t){.start = start, .size = profile->memory};
    return places == NULL || *count <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

ALIAS(nvmlDeviceGetGpuInstancePossiblePlacements, nvmlDeviceGetGpuInstancePossiblePlacements_v2)
