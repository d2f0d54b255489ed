/* answers.c - what NVML answers of the system and of a device: the table answers.def, and what its values are made of. */
#define _GNU_SOURCE
#include "internal.h"
#include "calls.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#define NOBODY (-1)

static nvmlReturn_t __attribute__((format(printf, 3, 4))) put_text(char *to, unsigned capacity, const char *format, ...)
{
    CHECK(to != NULL, NVML_ERROR_INVALID_ARGUMENT);
    char text[128];
    va_list values;
    va_start(values, format);
    const int length = vsnprintf(text, sizeof text, format, values);
    va_end(values);
    CHECK(length >= 0 && (size_t)length < sizeof text && (unsigned)length < capacity, NVML_ERROR_INSUFFICIENT_SIZE);
    memcpy(to, text, (size_t)length + 1);
    return NVML_SUCCESS;
}

/* Finding a device. */

enum named_by { UUID, SERIAL, BUS };

static bool is_named(uint32_t unit, enum named_by by, const char *name)
{
    const struct fake_gpu *gpu = &nvml.client.page->gpu[unit % FAKE_GPUS];
    unsigned domain = 0, bus, device;
    if (by == UUID)
        return strcmp(nvml.client.page->unit[unit].uuid, name) == 0;
    if (by == SERIAL)
        return unit < FAKE_GPUS && strcmp(gpu->serial, name) == 0;
    if (sscanf(name, "%x:%x:%x", &domain, &bus, &device) != 3) {
        domain = 0;
        if (sscanf(name, "%x:%x", &bus, &device) != 2)
            return false;
    }
    return unit < FAKE_GPUS && gpu->pci_domain == domain && gpu->pci_bus == bus && gpu->pci_device == device;
}

/* The GPU or instance that is meant, if it is visible. */
static int unit_named(enum named_by by, const char *name)
{
    const struct client *client = &nvml.client;
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++) {
        if (!is_named(unit, by, name))
            continue;
        if (unit >= FAKE_GPUS ? client_sees_instance(client, unit) : unit < nvml.known && client_sees_gpu(client, unit))
            return (int)unit;
    }
    return NOBODY;
}

static int instance_by_id(uint32_t gpu, unsigned gi)
{
    const uint32_t unit = fake_unit_of_instance(gpu, gi);
    return gi < FAKE_INSTANCES && client_sees_instance(&nvml.client, unit) ? (int)unit : NOBODY;
}

/* Also one that has no compute instance yet, and so no device node. */
static int gpu_instance_by_id(uint32_t gpu, unsigned gi)
{
    const uint32_t unit = fake_unit_of_instance(gpu, gi);
    if (gi < FAKE_INSTANCES && nvml.client.page->unit[unit].live && !nvml.client.page->unit[unit].compute)
        return (int)unit;
    return instance_by_id(gpu, gi);
}

/* By the order of their IDs. */
static int instance_by_index(uint32_t gpu, unsigned index)
{
    unsigned gi = 0;
    while (gi < FAKE_INSTANCES && (instance_by_id(gpu, gi) == NOBODY || index-- > 0))
        gi++;
    return instance_by_id(gpu, gi);
}

static unsigned index_of(const struct target *to)
{
    unsigned index = 0;
    if (to->mig)
        for (unsigned gi = 0; gi < fake_gi_of(to->unit); gi++)
            index += instance_by_id(to->gpu, gi) != NOBODY;
    else
        while (index < nvml.gpus && nvml.gpu[index] != to->gpu)
            index++;
    return index;
}

/* What it is. */

struct name {
    char text[24];
};

/* NVML's name is 1g.18gb+me, device plugins use 1g.18gb.me. Both write 1g.24gb-me. */
static struct name nvml_name(const struct fake_profile *profile)
{
    struct name name;
    snprintf(name.text, sizeof name.text, "%s", profile->name);
    char *suffix = strstr(name.text, "gb.");
    if (suffix != NULL)
        suffix[2] = '+';
    return name;
}

static nvmlPciInfo_t pci_of(const struct fake_gpu *gpu)
{
    nvmlPciInfo_t pci = {.domain = gpu->pci_domain, .bus = gpu->pci_bus, .device = gpu->pci_device, .pciDeviceId = gpu->pci_id,
                         .pciSubSystemId = gpu->pci_subsystem};
    snprintf(pci.busId, sizeof pci.busId, "%08X:%02X:%02X.0", pci.domain, pci.bus, pci.device);
    snprintf(pci.busIdLegacy, sizeof pci.busIdLegacy, "%04X:%02X:%02X.0", pci.domain & 0xffff, pci.bus & 0xff, pci.device & 0xff);
    return pci;
}

/* Of a GPU, or of one of the four switches of an eight-GPU board. */
static nvmlPciInfo_t pci_of_peer(int peer, unsigned link)
{
    const struct fake_gpu link_switch = {.pci_bus = 0xc0 + link % 4, .pci_id = 0x22a310de};
    return pci_of(peer >= 0 && peer < (int)FAKE_GPUS ? &nvml.client.page->gpu[peer] : &link_switch);
}

static void set_bits(unsigned words, unsigned long *set, unsigned long first, unsigned long count)
{
    memset(set, 0, words * sizeof *set);
    for (unsigned long bit = first; bit < first + count && bit / 64 < words; bit++)
        set[bit / 64] |= 1ul << (bit % 64);
}

/* How it is doing. */

static unsigned busy_percent(const struct target *to)
{
    unsigned most = gpu_time_busy(nvml.client.page, to->unit);
    for (uint32_t i = 0; !to->mig && i < FAKE_INSTANCES; i++) {
        const unsigned percent = gpu_time_busy(nvml.client.page, fake_unit_of_instance(to->gpu, i));
        most = percent > most ? percent : most;
    }
    return most;
}

static uint64_t reading(const struct target *to, enum fake_reading which)
{
    return atomic_load(&to->on->reading[which]);
}

static unsigned temperature_of(const struct target *to)
{
    const unsigned set = (unsigned)reading(to, READING_temperature_c);
    return set != 0 ? set : 30 + busy_percent(to) * 35 / 100;
}

static nvmlMemory_v2_t memory_v2_of(const struct target *to)
{
    struct fake_page *page = nvml.client.page;
    nvmlMemory_v2_t memory = {.total = to->mig ? to->of->limit_bytes : to->on->total_bytes,
                              .reserved = to->mig ? 0 : to->on->reserved_bytes,
                              .used = to->mig ? page_unit_used(page, to->unit) : page_gpu_used(page, to->gpu)};
    const uint64_t gone = memory.reserved + memory.used;
    memory.free = memory.total > gone ? memory.total - gone : 0;
    return memory;
}

static nvmlMemory_t memory_of(const struct target *to)
{
    const nvmlMemory_v2_t memory = memory_v2_of(to);
    return (nvmlMemory_t){.total = memory.total, .free = memory.free, .used = memory.used + memory.reserved};
}

/* Links. */

static bool may_be_link(const struct fake_gpu *gpu, unsigned link)
{
    return gpu->links_wired == 0 || (link < gpu->links_wired && link < FAKE_LINKS);
}

bool is_connected(const struct fake_gpu *gpu, unsigned link)
{
    return gpu->links_wired > 0 && gpu->link_peer[link] != -1 && link >= atomic_load(&gpu->reading[READING_links_down]);
}

static nvmlReturn_t both(nvmlDevice_t a, struct target *to_a, nvmlDevice_t b, struct target *to_b)
{
    TRY(target_of(a, GPU, to_a));
    return target_of(b, GPU, to_b);
}

static nvmlGpuP2PStatus_t peer_status(const struct target *a, const struct target *b, nvmlGpuP2PCapsIndex_t which)
{
    bool direct = which != NVML_P2P_CAPS_INDEX_NVLINK && a->on->numa == b->on->numa, switch_of_a = false, switch_of_b = false;
    for (unsigned i = 0; i < FAKE_LINKS; i++) {
        direct |= a->on->link_peer[i] == (int)b->gpu;
        switch_of_a |= a->on->link_peer[i] == -2;
        switch_of_b |= b->on->link_peer[i] == -2;
    }
    return direct || (switch_of_a && switch_of_b) ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
}

/* MIG. */

static const struct fake_profile *profile_numbered(const struct fake_gpu *gpu, unsigned number)
{
    for (uint32_t i = 0; i < gpu->profiles && i < FAKE_PROFILES; i++)
        if (gpu->profile[i].nvml == number)
            return &gpu->profile[i];
    return NULL;
}

/* NVML numbers compute profiles by slices: 1, 2, 3, 4, 7. */
static unsigned compute_number(const struct fake_profile *profile)
{
    return profile->compute == 7 ? 4 : profile->compute - 1;
}

/* What an instance shares with the others in its GPU instance, and what it has. */
#define SHARED(profile)                                                                                                        \
    .multiprocessorCount = (profile)->sms, .sharedCopyEngineCount = (profile)->copy_engines,                                   \
    .sharedDecoderCount = (profile)->decoders, .sharedJpegCount = (profile)->jpegs, .sharedOfaCount = (profile)->ofas
#define OWNED(profile)                                                                                                         \
    .id = (profile)->id, .sliceCount = (profile)->compute, .instanceCount = (profile)->most,                                   \
    .multiprocessorCount = (profile)->sms, .copyEngineCount = (profile)->copy_engines, .decoderCount = (profile)->decoders,    \
    .jpegCount = (profile)->jpegs, .ofaCount = (profile)->ofas, .memorySizeMB = (profile)->bytes / FAKE_MIB

static nvmlGpuInstanceProfileInfo_v2_t profile_info_v2(const struct fake_profile *profile)
{
    nvmlGpuInstanceProfileInfo_v2_t info = {OWNED(profile)};
    snprintf(info.name, sizeof info.name, "MIG %s", nvml_name(profile).text);
    return info;
}

#include "answers.def"

EXPORT const char *nvmlErrorString(nvmlReturn_t result)
{
    switch ((int)result) {
#define TEXT_OF(name, text) case NVML_##name: return text;
#include "errors.def"
    default: return "Unknown Error";
    }
}
