/* device.c - what a card is: name, numbers, place. */
#define _GNU_SOURCE
#include "internal.h"

#include <stdio.h>
#include <unistd.h>

/* A function that answers one number of a card: value is an expression of `to` (struct target). */
#define NUMBER(function, type, find, value)                                                                                    \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, type *answer)                                                            \
    {                                                                                                                          \
        struct target to;                                                                                                      \
        TRY(find(device, &to));                                                                                                \
        CHECK(answer != NULL, NVML_ERROR_INVALID_ARGUMENT);                                                                    \
        *answer = (type)(value);                                                                                               \
        return NVML_SUCCESS;                                                                                                   \
    }
#define TEXT(function, value)                                                                                                  \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, char *answer, unsigned room)                                             \
    {                                                                                                                          \
        struct target to;                                                                                                      \
        TRY(target_of(device, &to));                                                                                           \
        return put_text(answer, room, value);                                                                                  \
    }

NUMBER(nvmlDeviceGetMinorNumber, unsigned, target_of, to.on->minor)
NUMBER(nvmlDeviceGetBrand, nvmlBrandType_t, target_of, to.on->brand)
NUMBER(nvmlDeviceGetArchitecture, nvmlDeviceArchitecture_t, target_of, to.on->architecture)
NUMBER(nvmlDeviceGetBoardId, unsigned, target_of, to.on->pci_bus << 8)
NUMBER(nvmlDeviceGetMultiGpuBoard, unsigned, target_of, 0)
NUMBER(nvmlDeviceGetModuleId, unsigned, target_of, to.card)
NUMBER(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, whole_card, NVML_FEATURE_ENABLED)
NUMBER(nvmlDeviceGetDisplayMode, nvmlEnableState_t, whole_card, NVML_FEATURE_DISABLED)
NUMBER(nvmlDeviceGetDisplayActive, nvmlEnableState_t, whole_card, NVML_FEATURE_DISABLED)
NUMBER(nvmlDeviceGetComputeMode, nvmlComputeMode_t, whole_card, NVML_COMPUTEMODE_DEFAULT)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, whole_card, to.on->architecture >= 9 ? 5 : to.on->architecture >= 7 ? 4 : 3)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, whole_card, to.on->architecture >= 9 ? 5 : to.on->architecture >= 7 ? 4 : 3)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, whole_card, 16)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, whole_card, 16)
NUMBER(nvmlDeviceGetMemoryBusWidth, unsigned, whole_card, to.on->bus_bits)
NUMBER(nvmlDeviceGetNumGpuCores, unsigned, whole_card, to.on->sms * (to.on->architecture >= 8 || to.on->cc_minor == 6 ? 128 : 64))

TEXT(nvmlDeviceGetUUID, to.mig ? to.of->uuid : to.on->uuid)
TEXT(nvmlDeviceGetSerial, to.on->serial)
TEXT(nvmlDeviceGetVbiosVersion, "96.00.89.00.01")
TEXT(nvmlDeviceGetBoardPartNumber, "900-00000-0000-000")
TEXT(nvmlDeviceGetInforomImageVersion, "G520.0200.00.05")

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned room)
{
    struct target to;
    char text[96];
    TRY(target_of(device, &to));
    snprintf(text, sizeof text, to.mig ? "%.60s MIG %.20s" : "%.60s", to.on->name, to.on->profile[to.of->profile].name);
    char *media = to.mig ? strstr(text, ".me") : NULL;
    if (media != NULL)
        *media = '+'; /* NVML says 1g.18gb+me, device plugins 1g.18gb.me */
    return put_text(name, room, text);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    struct target to;
    TRY(target_of(device, &to));
    CHECK(index != NULL, NVML_ERROR_INVALID_ARGUMENT);
    uint32_t units[FAKE_INSTANCES];
    const unsigned count = to.mig ? instances_of(to.card, units) : nvml.cards;
    for (unsigned i = 0; i < count; i++)
        if ((to.mig ? units[i] : nvml.card[i]) == to.unit)
            return *index = i, NVML_SUCCESS;
    return NVML_ERROR_INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    struct target to;
    TRY(target_of(device, &to));
    CHECK(major != NULL && minor != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *major = (int)to.on->cc_major;
    *minor = (int)to.on->cc_minor;
    return NVML_SUCCESS;
}

void pci_text(const struct fake_card *card, char *to, size_t room)
{
    snprintf(to, room, "%08X:%02X:%02X.0", card->pci_domain, card->pci_bus, card->pci_device);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    struct target to;
    TRY(target_of(device, &to));
    CHECK(pci != NULL, NVML_ERROR_INVALID_ARGUMENT);
    memset(pci, 0, sizeof *pci);
    pci->domain = to.on->pci_domain;
    pci->bus = to.on->pci_bus;
    pci->device = to.on->pci_device;
    pci->pciDeviceId = to.on->pci_id;
    pci->pciSubSystemId = to.on->pci_subsystem;
    pci_text(to.on, pci->busId, sizeof pci->busId);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", to.on->pci_domain & 0xffff, to.on->pci_bus & 0xff,
             to.on->pci_device & 0xff);
    return NVML_SUCCESS;
}

ALIAS(nvmlDeviceGetPciInfo_v2, nvmlDeviceGetPciInfo_v3)
ALIAS(nvmlDeviceGetPciInfo, nvmlDeviceGetPciInfo_v3)

EXPORT nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci)
{
    struct target to;
    TRY(target_of(device, &to));
    CHECK(pci != NULL, NVML_ERROR_INVALID_ARGUMENT);
    CHECK(pci->version == (sizeof *pci | 1u << 24), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    pci->domain = to.on->pci_domain;
    pci->bus = to.on->pci_bus;
    pci->device = to.on->pci_device;
    pci->pciDeviceId = to.on->pci_id;
    pci->pciSubSystemId = to.on->pci_subsystem;
    pci->baseClass = 3; /* display controller */
    pci->subClass = 2;  /* 3D */
    pci_text(to.on, pci->busId, sizeof pci->busId);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned *node)
{
    struct target to;
    TRY(target_of(device, &to));
    CHECK(node != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *node = (unsigned)to.on->numa;
    return NVML_SUCCESS;
}

/* Every processor of the machine: the nodes of the description are not the machine's. */
static nvmlReturn_t all_processors(nvmlDevice_t device, unsigned words, unsigned long *set)
{
    struct target to;
    TRY(target_of(device, &to));
    CHECK(set != NULL && words > 0, NVML_ERROR_INVALID_ARGUMENT);
    memset(set, 0, words * sizeof *set);
    const unsigned long count = (unsigned long)sysconf(_SC_NPROCESSORS_CONF);
    for (unsigned long cpu = 0; cpu < count && cpu / 64 < words; cpu++)
        set[cpu / 64] |= 1ul << (cpu % 64);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned words, unsigned long *set)
{
    return all_processors(device, words, set);
}

EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned words, unsigned long *set, nvmlAffinityScope_t scope)
{
    (void)scope;
    return all_processors(device, words, set);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned words, unsigned long *set, nvmlAffinityScope_t scope)
{
    struct target to;
    (void)scope;
    TRY(target_of(device, &to));
    CHECK(set != NULL && words > 0, NVML_ERROR_INVALID_ARGUMENT);
    memset(set, 0, words * sizeof *set);
    if (to.on->numa >= 0 && (unsigned)to.on->numa / 64 < words)
        set[(unsigned)to.on->numa / 64] = 1ul << ((unsigned)to.on->numa % 64);
    return NVML_SUCCESS;
}

static unsigned busy_percent(const struct target *to)
{
    unsigned most = atomic_load(&to->of->percent);
    for (uint32_t i = 0; !to->mig && i < FAKE_INSTANCES; i++) {
        const unsigned percent = atomic_load(&nvml.client.page->unit[fake_unit_of_instance(to->card, i)].percent);
        most = percent > most ? percent : most;
    }
    return most;
}

/* Guessed, and plausible: idle at an eighth of the limit, 30 C; busy at the limit, 65 C. */
static unsigned milliwatts(const struct target *to)
{
    const unsigned most = to->on->power_watts * 1000;
    return most / 8 + (most - most / 8) / 100 * busy_percent(to);
}

NUMBER(nvmlDeviceGetPowerUsage, unsigned, whole_card, milliwatts(&to))
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, whole_card, to.on->power_watts * 1000)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, whole_card, to.on->power_watts * 1000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, whole_card, to.on->power_watts * 1000)
NUMBER(nvmlDeviceGetPowerManagementMode, nvmlEnableState_t, whole_card, NVML_FEATURE_ENABLED)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, whole_card,
       atomic_load(&to.of->ran_ns) / 1000000 * to.on->power_watts)
NUMBER(nvmlDeviceGetPerformanceState, nvmlPstates_t, whole_card, NVML_PSTATE_0)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, whole_card, 0)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, whole_card, 0)

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned *celsius)
{
    struct target to;
    TRY(whole_card(device, &to));
    CHECK(celsius != NULL && sensor == NVML_TEMPERATURE_GPU, NVML_ERROR_INVALID_ARGUMENT);
    *celsius = 30 + busy_percent(&to) * 35 / 100;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, nvmlTemperatureThresholds_t which, unsigned *celsius)
{
    struct target to;
    TRY(whole_card(device, &to));
    CHECK(celsius != NULL && which < NVML_TEMPERATURE_THRESHOLD_COUNT, NVML_ERROR_INVALID_ARGUMENT);
    *celsius = which == NVML_TEMPERATURE_THRESHOLD_SHUTDOWN ? 92 : 87;
    return NVML_SUCCESS;
}

static nvmlReturn_t clock_of(nvmlDevice_t device, nvmlClockType_t type, unsigned *mhz)
{
    struct target to;
    TRY(whole_card(device, &to));
    CHECK(mhz != NULL && type < NVML_CLOCK_COUNT, NVML_ERROR_INVALID_ARGUMENT);
    *mhz = type == NVML_CLOCK_MEM ? to.on->memory_clock_mhz : to.on->clock_mhz;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned *mhz)
{
    return clock_of(device, type, mhz);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned *mhz)
{
    return clock_of(device, type, mhz);
}

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *now, nvmlEnableState_t *pending)
{
    struct target to;
    TRY(whole_card(device, &to));
    CHECK(now != NULL && pending != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *now = *pending = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter, unsigned long long *count)
{
    struct target to;
    (void)type, (void)counter;
    TRY(whole_card(device, &to));
    CHECK(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *count = 0;
    return NVML_SUCCESS;
}
