/* usage.c - memory, processes, utilisation. */
#define _GNU_SOURCE
#include "internal.h"

#include <time.h>

static uint64_t used_by_all(const struct target *to)
{
    return to->mig ? page_unit_used(nvml.client.page, to->unit) : page_card_used(nvml.client.page, to->card);
}

static uint64_t total_of(const struct target *to)
{
    return to->mig ? to->of->limit_bytes : to->on->total_bytes;
}

static uint64_t reserved_of(const struct target *to)
{
    return to->mig ? 0 : to->on->reserved_bytes;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    struct target to;
    TRY(live_target(device, &to));
    CHECK(memory != NULL, NVML_ERROR_INVALID_ARGUMENT);
    const uint64_t used = used_by_all(&to) + reserved_of(&to); /* version 1 counts what is reserved as used */
    memory->total = total_of(&to);
    memory->used = used;
    memory->free = memory->total > used ? memory->total - used : 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    struct target to;
    TRY(live_target(device, &to));
    CHECK(memory != NULL, NVML_ERROR_INVALID_ARGUMENT);
    CHECK(memory->version == (sizeof *memory | 2u << 24), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    memory->total = total_of(&to);
    memory->reserved = reserved_of(&to);
    memory->used = used_by_all(&to);
    memory->free = memory->total - memory->reserved > memory->used ? memory->total - memory->reserved - memory->used : 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    struct target to;
    TRY(live_target(device, &to));
    CHECK(memory != NULL, NVML_ERROR_INVALID_ARGUMENT);
    memory->bar1Total = 256ull << 30;
    memory->bar1Used = 1 << 20;
    memory->bar1Free = memory->bar1Total - memory->bar1Used;
    return NVML_SUCCESS;
}

#define MOST (FAKE_SLOTS * 2)

/* One entry per process and unit: several connections of a process are one process. Returns how many. */
static unsigned processes(const struct target *to, nvmlProcessInfo_v2_t found[MOST])
{
    unsigned count = 0;
    struct fake_page *page = nvml.client.page;
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++) {
        if (unit != to->unit && (to->mig || page->unit[unit].card != to->card || !page->unit[unit].live || unit < FAKE_CARDS))
            continue;
        const unsigned first = count;
        for (uint32_t slot = 0; slot < FAKE_SLOTS && count < MOST; slot++) {
            const struct fake_slot *of = &page->slot[slot];
            if ((of->kind != FAKE_CUDA && of->kind != FAKE_FOREIGN) || of->contexts[unit] + of->used_bytes[unit] == 0)
                continue;
            unsigned at = first;
            while (at < count && found[at].pid != (unsigned)of->pid)
                at++;
            if (at == count)
                found[count++] = (nvmlProcessInfo_v2_t){.pid = (unsigned)of->pid,
                                                        .gpuInstanceId = unit < FAKE_CARDS ? 0xffffffffu : page->unit[unit].gi,
                                                        .computeInstanceId = unit < FAKE_CARDS ? 0xffffffffu : 0};
            found[at].usedGpuMemory += of->used_bytes[unit];
        }
    }
    return count;
}

static nvmlReturn_t list(nvmlDevice_t device, unsigned *count, void *infos, size_t width)
{
    struct target to;
    static _Thread_local nvmlProcessInfo_v2_t found[MOST];
    TRY(live_target(device, &to));
    CHECK(count != NULL && (infos != NULL || *count == 0), NVML_ERROR_INVALID_ARGUMENT);
    page_lock(nvml.client.page);
    const unsigned have = processes(&to, found);
    page_unlock(nvml.client.page);
    const unsigned room = *count;
    *count = have;
    CHECK(have <= room, NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned i = 0; i < have; i++)
        memcpy((char *)infos + i * width, &found[i], width); /* version 1 is a prefix of 2 */
    return NVML_SUCCESS;
}

static nvmlReturn_t none(nvmlDevice_t device, unsigned *count)
{
    struct target to;
    TRY(live_target(device, &to));
    CHECK(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *count = 0;
    return NVML_SUCCESS;
}

#define LISTS(function, answer)                                                                                                \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *infos)                            \
    {                                                                                                                          \
        (void)infos;                                                                                                           \
        return answer(nvmlProcessInfo_v1_t);                                                                                   \
    }                                                                                                                          \
    EXPORT nvmlReturn_t function##_v2(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *infos)                       \
    {                                                                                                                          \
        (void)infos;                                                                                                           \
        return answer(nvmlProcessInfo_v2_t);                                                                                   \
    }                                                                                                                          \
    EXPORT nvmlReturn_t function##_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos)                          \
    {                                                                                                                          \
        (void)infos;                                                                                                           \
        return answer(nvmlProcessInfo_t);                                                                                      \
    }
#define ALL_OF_THEM(type) list(device, count, infos, sizeof(type))
#define NONE_OF_THEM(type) none(device, count)

LISTS(nvmlDeviceGetComputeRunningProcesses, ALL_OF_THEM)
LISTS(nvmlDeviceGetGraphicsRunningProcesses, NONE_OF_THEM)
LISTS(nvmlDeviceGetMPSComputeRunningProcesses, NONE_OF_THEM)

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    struct target to;
    TRY(whole_card(device, &to));
    CHECK(rates != NULL, NVML_ERROR_INVALID_ARGUMENT);
    CHECK(!to.on->mig_on, NVML_ERROR_NOT_SUPPORTED); /* as the real one: not attributed in MIG mode */
    rates->gpu = atomic_load(&to.of->percent);
    rates->memory = rates->gpu / 3;
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
    TRY(whole_card(device, &to));
    CHECK(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    const struct fake_page *page = nvml.client.page;
    const uint64_t taken = atomic_load(&page->samples);
    unsigned have = 0;
    for (uint32_t slot = 0; slot < FAKE_SLOTS && taken > 0; slot++) {
        const struct fake_slot *of = &page->slot[slot];
        const unsigned percent = of->kind == FAKE_CUDA ? average(of, to.card, since_us) : 0;
        if (percent == 0)
            continue;
        if (samples != NULL && have < *count)
            samples[have] = (nvmlProcessUtilizationSample_t){.pid = (unsigned)of->pid,
                                                             .timeStamp = atomic_load(&page->sampled_us[(taken - 1) % FAKE_SAMPLES]),
                                                             .smUtil = percent,
                                                             .memUtil = percent / 3};
        have++;
    }
    const unsigned room = *count;
    *count = have;
    CHECK(have > 0, NVML_ERROR_NOT_FOUND);
    return samples != NULL && have <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

static nvmlReturn_t field_of(nvmlDevice_t device, nvmlFieldValue_t *field)
{
    struct target to;
    TRY(whole_card(device, &to));
    field->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    switch (field->fieldId) {
    case NVML_FI_DEV_RETIRED_PENDING: field->value.uiVal = 0; return NVML_SUCCESS;
    case NVML_FI_DEV_MEMORY_TEMP: field->value.uiVal = 35; return NVML_SUCCESS;
    case NVML_FI_DEV_NVLINK_LINK_COUNT: field->value.uiVal = to.on->links_wired; return NVML_SUCCESS;
    case NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: field->value.uiVal = to.on->links_wired > 0 ? 26562 : 0; return NVML_SUCCESS;
    case NVML_FI_DEV_POWER_INSTANT: field->value.uiVal = to.on->power_watts * 1000 / 8; return NVML_SUCCESS;
    case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
        field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        field->value.ullVal = atomic_load(&to.of->ran_ns) / 1000000 * to.on->power_watts;
        return NVML_SUCCESS;
    default: return NVML_ERROR_NOT_SUPPORTED;
    }
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *fields)
{
    struct target to;
    TRY(live_target(device, &to));
    CHECK(fields != NULL && count > 0, NVML_ERROR_INVALID_ARGUMENT);
    for (int i = 0; i < count; i++) {
        fields[i].timestamp = (long long)now_us();
        fields[i].latencyUsec = 0;
        fields[i].nvmlReturn = field_of(device, &fields[i]);
    }
    return NVML_SUCCESS;
}
