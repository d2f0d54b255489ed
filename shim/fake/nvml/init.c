/* init.c - nvmlInit, handles, and what the system is. */
#define _GNU_SOURCE
#include "branch.h"
#include "hide.h"
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>

static int cuda_version = 13000; /* of the driver that was there when the library was loaded */
static struct client at_load;

static bool came_later(const char *function)
{
    return at_load.page != NULL && !branch_has_nvml(at_load.page, function);
}

__attribute__((constructor)) static void hide_later(void)
{
    if (client_open(&at_load, FAKE_CTL) == 0) /* else nvmlInit says so */
        cuda_version = (int)at_load.page->cuda_version;
    if (!hide_symbols(came_later)) {
        fprintf(stderr, "fake driver: the loader's table of symbols cannot be changed\n");
        abort();
    }
    client_close(&at_load);
}

struct nvml nvml = {.lock = PTHREAD_MUTEX_INITIALIZER, .client = {.socket = -1}};

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    nvmlReturn_t rc = NVML_SUCCESS;
    pthread_mutex_lock(&nvml.lock);
    if (nvml.users == 0) {
        rc = client_open(&nvml.client, FAKE_NVML) < 0 ? NVML_ERROR_DRIVER_NOT_LOADED : NVML_SUCCESS;
        nvml.cards = 0;
        for (uint32_t card = 0; rc == NVML_SUCCESS && card < nvml.client.page->cards; card++)
            if (client_sees_card(&nvml.client, card))
                nvml.card[nvml.cards++] = card;
        for (uint32_t unit = 0; unit < FAKE_UNITS; unit++)
            nvml.device[unit].unit = unit;
    }
    if (rc == NVML_SUCCESS)
        nvml.users++;
    pthread_mutex_unlock(&nvml.lock);
    return rc;
}

EXPORT nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

EXPORT nvmlReturn_t nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

EXPORT nvmlReturn_t nvmlShutdown(void)
{
    TRY(ready());
    pthread_mutex_lock(&nvml.lock);
    if (nvml.users > 0 && --nvml.users == 0)
        client_close(&nvml.client);
    pthread_mutex_unlock(&nvml.lock);
    return NVML_SUCCESS;
}

nvmlReturn_t ready(void)
{
    return nvml.users > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

nvmlDevice_t handle_of(uint32_t unit)
{
    return &nvml.device[unit];
}

nvmlReturn_t target_of(nvmlDevice_t device, struct target *target)
{
    TRY(ready());
    const uintptr_t at = (uintptr_t)device, first = (uintptr_t)&nvml.device[0];
    CHECK(at >= first && at < first + sizeof nvml.device && (at - first) % sizeof nvml.device[0] == 0, NVML_ERROR_INVALID_ARGUMENT);
    target->unit = (uint32_t)((at - first) / sizeof nvml.device[0]);
    target->mig = target->unit >= FAKE_CARDS;
    target->of = &nvml.client.page->unit[target->unit];
    target->card = target->mig ? target->of->card : target->unit;
    CHECK(target->card < nvml.client.page->cards && (!target->mig || target->of->live), NVML_ERROR_INVALID_ARGUMENT);
    target->on = &nvml.client.page->card[target->card];
    return NVML_SUCCESS;
}

nvmlReturn_t live_target(nvmlDevice_t device, struct target *target)
{
    TRY(target_of(device, target));
    return atomic_load(&target->on->lost) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

nvmlReturn_t whole_card(nvmlDevice_t device, struct target *target)
{
    TRY(live_target(device, target));
    return target->mig ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

nvmlReturn_t put_text(char *to, unsigned room, const char *text)
{
    CHECK(to != NULL, NVML_ERROR_INVALID_ARGUMENT);
    CHECK(strlen(text) < room, NVML_ERROR_INSUFFICIENT_SIZE);
    memcpy(to, text, strlen(text) + 1);
    return NVML_SUCCESS;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t result)
{
    switch ((int)result) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT: return "Timeout";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    case NVML_ERROR_IN_USE: return "In use by another client";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    TRY(ready());
    return put_text(version, length, nvml.client.page->driver_version);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
    char text[48];
    TRY(ready());
    snprintf(text, sizeof text, "%u.%s", nvml.client.page->cuda_version / 1000, nvml.client.page->driver_version);
    return put_text(version, length, text);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    CHECK(version != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *version = nvml.users > 0 ? (int)nvml.client.page->cuda_version : cuda_version;
    return NVML_SUCCESS;
}

ALIAS(nvmlSystemGetCudaDriverVersion_v2, nvmlSystemGetCudaDriverVersion)

static const char *slot_name(unsigned pid, bool foreign_only)
{
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++) {
        const struct fake_slot *of = &nvml.client.page->slot[slot];
        if (of->kind != FAKE_FREE && of->pid == (int)pid && (of->kind == FAKE_FOREIGN || !foreign_only))
            return of->name;
    }
    return NULL;
}

/* A process of this PID namespace, by its own name: who lists a container's processes names them as the container does. */
static const char *name_here(unsigned pid, char name[64])
{
    char path[32];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "re");
    const size_t got = file == NULL ? 0 : fread(name, 1, 63, file);
    if (file != NULL)
        fclose(file);
    name[got] = '\0';
    return name[0] != '\0' ? name : NULL;
}

EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length)
{
    char here[64];
    TRY(ready());
    CHECK(name != NULL && length > 0, NVML_ERROR_INVALID_ARGUMENT);
    const char *found = slot_name(pid, true);
    if (found == NULL)
        found = name_here(pid, here);
    if (found == NULL)
        found = slot_name(pid, false);
    CHECK(found != NULL, NVML_ERROR_NOT_FOUND);
    snprintf(name, length, "%.63s", found);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    TRY(ready());
    CHECK(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *count = nvml.cards;
    return NVML_SUCCESS;
}

ALIAS(nvmlDeviceGetCount, nvmlDeviceGetCount_v2)

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    TRY(ready());
    CHECK(device != NULL && index < nvml.cards, NVML_ERROR_INVALID_ARGUMENT);
    *device = handle_of(nvml.card[index]);
    return NVML_SUCCESS;
}

ALIAS(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2)

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    TRY(ready());
    CHECK(device != NULL && uuid != NULL, NVML_ERROR_INVALID_ARGUMENT);
    for (unsigned i = 0; i < nvml.cards; i++) {
        uint32_t units[FAKE_INSTANCES];
        if (strcmp(nvml.client.page->card[nvml.card[i]].uuid, uuid) == 0)
            return *device = handle_of(nvml.card[i]), NVML_SUCCESS;
        const unsigned count = instances_of(nvml.card[i], units);
        for (unsigned k = 0; k < count; k++)
            if (strcmp(nvml.client.page->unit[units[k]].uuid, uuid) == 0)
                return *device = handle_of(units[k]), NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    TRY(ready());
    CHECK(device != NULL && serial != NULL, NVML_ERROR_INVALID_ARGUMENT);
    for (unsigned i = 0; i < nvml.cards; i++)
        if (strcmp(nvml.client.page->card[nvml.card[i]].serial, serial) == 0)
            return *device = handle_of(nvml.card[i]), NVML_SUCCESS;
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *device)
{
    unsigned domain = 0, bus, slot;
    TRY(ready());
    CHECK(device != NULL && id != NULL, NVML_ERROR_INVALID_ARGUMENT);
    if (sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3 && (domain = 0, sscanf(id, "%x:%x", &bus, &slot) != 2))
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned i = 0; i < nvml.cards; i++) {
        const struct fake_card *card = &nvml.client.page->card[nvml.card[i]];
        if (card->pci_domain == domain && card->pci_bus == bus && card->pci_device == slot)
            return *device = handle_of(nvml.card[i]), NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

ALIAS(nvmlDeviceGetHandleByPciBusId, nvmlDeviceGetHandleByPciBusId_v2)
