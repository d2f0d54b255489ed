/* init.c - nvmlInit, and what a handle stands for. */
#define _GNU_SOURCE
#include "missing.h"
#include "internal.h"
#include "calls.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

struct nvml nvml = {.lock = PTHREAD_MUTEX_INITIALIZER, .cuda_version = 13000};

/* The driver numbers GPUs by their place on the bus. */
static uint64_t place_of(uint32_t gpu)
{
    const struct fake_gpu *of = &nvml.client.page->gpu[gpu];
    return (uint64_t)of->pci_domain << 16 | of->pci_bus << 8 | of->pci_device;
}

static void add_visible(uint32_t gpu)
{
    unsigned at = nvml.gpus++;
    for (; at > 0 && place_of(nvml.gpu[at - 1]) > place_of(gpu); at--)
        nvml.gpu[at] = nvml.gpu[at - 1];
    nvml.gpu[at] = gpu;
}

static bool came_later(const char *function)
{
    return nvml.client.page != NULL && !branch_has_nvml(nvml.client.page, function);
}

__attribute__((constructor)) static void hide_later(void)
{
    if (client_open(&nvml.client, FAKE_CTL) == 0) /* else nvmlInit reports it */
        nvml.cuda_version = (int)nvml.client.page->cuda_version;
    if (!hide_symbols(came_later)) {
        fprintf(stderr, "fake driver: the loader's table of symbols cannot be changed\n");
        abort();
    }
    client_close(&nvml.client);
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    nvmlReturn_t rc = NVML_SUCCESS;
    pthread_mutex_lock(&nvml.lock);
    if (nvml.users == 0) {
        rc = client_open(&nvml.client, FAKE_NVML) < 0 ? NVML_ERROR_DRIVER_NOT_LOADED : NVML_SUCCESS;
        nvml.gpus = 0;
        nvml.known = rc == NVML_SUCCESS ? nvml.client.page->gpus : 0;
        for (uint32_t gpu = 0; gpu < nvml.known; gpu++) {
            nvml.plugs[gpu] = atomic_load(&nvml.client.page->gpu[gpu].plugs);
            if (client_sees_gpu(&nvml.client, gpu))
                add_visible(gpu);
        }
    }
    if (rc == NVML_SUCCESS)
        nvml.users++;
    hang(__func__); /* with the lock, as NVML would */
    pthread_mutex_unlock(&nvml.lock);
    return rc;
}

static nvmlReturn_t shut_down(void)
{
    pthread_mutex_lock(&nvml.lock);
    if (nvml.users > 0 && --nvml.users == 0)
        client_close(&nvml.client);
    pthread_mutex_unlock(&nvml.lock);
    return NVML_SUCCESS;
}

/* TANGRAM_FAKE_NVML_MS=N: each call takes N ms longer. */
static void take_time(void)
{
    const char *ms = getenv("TANGRAM_FAKE_NVML_MS");
    const long each = ms == NULL ? 0 : strtol(ms, NULL, 10);
    struct timespec left = {.tv_sec = each / 1000, .tv_nsec = each % 1000 * 1000000};
    while (each > 0 && nanosleep(&left, &left) != 0 && errno == EINTR)
        continue;
}

void hang(const char *function)
{
    take_time();
    const struct fake_page *page = nvml.client.page;
    const uint32_t faults = page == NULL ? 0 : atomic_load(&page->faults);
    for (uint32_t i = 0; i < faults && i < FAKE_FAULTS; i++)
        fault_hang(&page->fault[i], function);
}

nvmlReturn_t ready(void)
{
    return nvml.users > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

void *handle_of(uint32_t unit)
{
    return &nvml.device[unit];
}

nvmlReturn_t target_of(const void *handle, enum accepted accepted, struct target *target)
{
    TRY(ready());
    const struct fake_page *page = nvml.client.page;
    const uintptr_t offset = (uintptr_t)handle - (uintptr_t)nvml.device;
    CHECK(offset < sizeof nvml.device && offset % sizeof nvml.device[0] == 0, NVML_ERROR_INVALID_ARGUMENT);
    target->unit = (uint32_t)(offset / sizeof nvml.device[0]);
    target->mig = target->unit >= FAKE_GPUS;
    target->of = &page->unit[target->unit];
    target->gpu = target->mig ? target->of->gpu : target->unit;
    CHECK(target->gpu < nvml.known && (!target->mig || target->of->live), NVML_ERROR_INVALID_ARGUMENT);
    target->on = &page->gpu[target->gpu];
    target->profile = target->mig ? fake_profile_of(page, target->of) : NULL;
    CHECK(atomic_load(&target->on->plugs) == nvml.plugs[target->gpu], NVML_ERROR_GPU_IS_LOST);
    CHECK((accepted != LIVE && accepted != GPU) || !atomic_load(&target->on->lost), NVML_ERROR_GPU_IS_LOST);
    CHECK(accepted != GPU || !target->mig, NVML_ERROR_NOT_SUPPORTED);
    CHECK(accepted != MIG || target->mig, NVML_ERROR_NOT_SUPPORTED);
    CHECK(accepted != INSTANCE || target->mig, NVML_ERROR_INVALID_ARGUMENT);
    return NVML_SUCCESS;
}

#include "init.def"
