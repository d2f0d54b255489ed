/* plug.c - GPUs that are put into the machine and taken out while it runs, and what their sensors show.
 *
 * Programs see a change in two ways. The folder of the PCI driver has a link for each GPU, which is made anew each time. A session of NVML that began
 * before the change finds the GPU lost, and does not find a new one. */
#define _GNU_SOURCE
#include "daemon.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char readings[][20] = {
#define READING(name) #name,
#include "readings.def"
#undef READING
};

static void path_of(const struct fake_gpu *gpu, char *path, size_t size)
{
    if (snprintf(path, size, "%s/%04x:%02x:%02x.0", driver.page->bus_folder, gpu->pci_domain, gpu->pci_bus, gpu->pci_device) >= (int)size)
        fail("the folder of the bus: %s", strerror(ENAMETOOLONG));
}

static void unlink_gpu(uint32_t index)
{
    char path[256];
    if (driver.page->bus_folder[0] == '\0')
        return;
    path_of(&driver.page->gpu[index], path, sizeof path);
    unlink(path);
}

/* The target counts: so the link is another one than before. */
static void link_gpu(uint32_t index)
{
    char path[256], target[64];
    const struct fake_gpu *gpu = &driver.page->gpu[index];
    if (driver.page->bus_folder[0] == '\0')
        return;
    path_of(gpu, path, sizeof path);
    snprintf(target, sizeof target, "../../../../devices/pci%u/gpu%u", gpu->plugs, index);
    unlink(path);
    if (symlink(target, path) != 0)
        fail("%s: %s", path, strerror(errno));
}

void link_gpus(void)
{
    for (uint32_t gpu = 0; gpu < driver.page->gpus; gpu++)
        link_gpu(gpu);
}

void plug_gpu(char **word)
{
    const uint32_t before = driver.page->gpus;
    add_gpus(word);
    for (uint32_t gpu = before; gpu < driver.page->gpus; gpu++)
        link_gpu(gpu);
}

/* Memory there is gone with it. */
static void forget_memory(uint32_t unit)
{
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++) {
        atomic_store(&driver.page->unit[unit].used_bytes[slot], 0);
        atomic_store(&driver.page->unit[unit].unlisted_bytes[slot], 0);
    }
}

void unplug_gpu(char **word)
{
    const uint32_t index = read_gpu(word[0]);
    struct fake_gpu *gpu = &driver.page->gpu[index];
    if (atomic_load(&gpu->absent))
        fail("GPU %u: was taken out before", index);
    page_lock(driver.page);
    atomic_store(&gpu->absent, 1);
    atomic_store(&gpu->lost, 1);
    atomic_fetch_add(&gpu->plugs, 1);
    forget_memory(index);
    for (uint32_t i = 0; i < FAKE_INSTANCES; i++)
        forget_memory(fake_unit_of_instance(index, i));
    page_unlock(driver.page);
    unlink_gpu(index);
}

void replug_gpu(char **word)
{
    const uint32_t index = read_gpu(word[0]);
    struct fake_gpu *gpu = &driver.page->gpu[index];
    uint64_t count = 1;
    if (!atomic_load(&gpu->absent))
        fail("GPU %u: must be taken out first", index);
    set_options(gpu, word[1], &count);
    fit_unit(index);
    atomic_store(&gpu->xid, 0);
    atomic_store(&gpu->lost, 0);
    atomic_fetch_add(&gpu->plugs, 1);
    atomic_store(&gpu->absent, 0);
    link_gpu(index);
}

void set_reading(char **word)
{
    const uint32_t gpu = read_gpu(word[0]);
    const size_t which = read_name("the reading", word[1], readings, sizeof readings[0], FAKE_READINGS);
    atomic_store(&driver.page->gpu[gpu].reading[which], read_number(word[1], word[2], 0, UINT64_MAX));
}
