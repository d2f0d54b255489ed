/* gpus.c - GPUs as models.def has them and the description wants them, and the links between them. */
#define _GNU_SOURCE
#include "daemon.h"
#include "mig.h"

#include <stdio.h>
#include <string.h>

static const struct fake_gpu models[] = {
#define MODEL(...) {__VA_ARGS__, .minor = 0},
#define PROFILE(...)
#include "models.def"
#undef MODEL
#undef PROFILE
};

static const struct {
    const char *model;
    struct fake_profile is;
} profiles[] = {
#define MODEL(...)
#define PROFILE(model, ...) {model, {__VA_ARGS__}},
#include "models.def"
};

/* Options of a GPU line: key=value. */

static const char coherent[][8] = {"no", "numa", "cdmm", "unified"}; /* as enum fake_coherent */

/* Right is what is printed the same again. */
static void set_uuid(struct fake_gpu *gpu, const char *text)
{
    const char *at = text + strcspn(text, "-");
    for (unsigned i = 0; i < 16 && *at != '\0'; i++) {
        at += *at == '-';
        sscanf(at, "%2hhx", &gpu->uuid_bytes[i]);
        at += strnlen(at, 2);
    }
    print_uuid("GPU-", gpu->uuid_bytes, gpu->uuid);
    if (strcmp(gpu->uuid, text) != 0)
        fail("uuid is \"%s\", must look like GPU-01234567-89ab-cdef-0123-456789abcdef", text);
}

static void set_bus(struct fake_gpu *gpu, const char *value)
{
    char more;
    const int got = sscanf(value, "%x:%x:%x.0%c", &gpu->pci_domain, &gpu->pci_bus, &gpu->pci_device, &more);
    if (got != 3 || gpu->pci_bus > 255 || gpu->pci_device > 31 || gpu->pci_domain > 0xffff)
        fail("bus is \"%s\", must look like 0000:17:00.0", value);
}

static void set_memory(struct fake_gpu *gpu, uint64_t mib)
{
    gpu->total_bytes = mib * FAKE_MIB;
    gpu->reserved_bytes = 0; /* a size given is a size to have: tests count on it */
}

static void set_option(struct fake_gpu *gpu, const char *key, const char *value, uint64_t *count)
{
#define OPTION(name, set) if (strcmp(key, #name) == 0) set; else
#include "options.def"
        fail("GPU: the option is \"%s\", must be one of uuid, bus, serial, count, memory_mib, context_mib, coherent, numa, minor", key);
}

void set_options(struct fake_gpu *gpu, const char *options, uint64_t *count)
{
    char text[1024], *rest = NULL;
    snprintf(text, sizeof text, "%s", options);
    for (char *key = strtok_r(text, " \t", &rest); key != NULL; key = strtok_r(NULL, " \t", &rest)) {
        char *value = strchr(key, '=');
        if (value == NULL)
            fail("GPU: \"%s\" is not option=value", key);
        *value++ = '\0';
        set_option(gpu, key, value, count);
    }
}

void fit_unit(uint32_t index)
{
    struct fake_unit *unit = &driver.page->unit[index];
    const struct fake_gpu *gpu = &driver.page->gpu[index];
    unit->live = 1;
    unit->gpu = index;
    unit->limit_bytes = gpu->total_bytes - gpu->reserved_bytes;
    memcpy(unit->uuid, gpu->uuid, sizeof unit->uuid);
    memcpy(unit->uuid_bytes, gpu->uuid_bytes, sizeof unit->uuid_bytes);
}

/* The next GPU. Returns how many the line wants. */
static uint64_t add_gpu(const struct fake_gpu *model, const char *options)
{
    const uint32_t index = driver.page->gpus;
    struct fake_gpu *gpu = &driver.page->gpu[index];
    uint64_t count = 1;
    char text[1024];
    if (index == FAKE_GPUS)
        fail("GPU: more than %u GPUs", FAKE_GPUS);
    *gpu = *model;
    gpu->minor = index;
    gpu->numa = (int32_t)(index / 4);
    gpu->pci_bus = 0x17 + 0x12 * index;
    snprintf(gpu->serial, sizeof gpu->serial, "16500%08u", index);
    snprintf(text, sizeof text, "%s/%u", driver.page->seed, index);
    make_uuid("GPU-", text, gpu->uuid, gpu->uuid_bytes);
    for (unsigned i = 0; i < FAKE_LINKS; i++)
        gpu->link_peer[i] = -1;
    for (size_t i = 0; i < sizeof profiles / sizeof profiles[0]; i++)
        if (strcmp(profiles[i].model, gpu->model) == 0)
            gpu->profile[gpu->profiles++] = profiles[i].is;
    set_options(gpu, options, &count);
    fit_unit(index);
    driver.page->gpus++;
    return count;
}

void add_gpus(char **word)
{
    const size_t model = read_name("GPU: the model", word[0], models, sizeof models[0], sizeof models / sizeof models[0]);
    for (uint64_t made = 0, count = 1; made < count; made++)
        count = add_gpu(&models[model], word[1]);
}

uint32_t read_gpu(const char *word)
{
    if (driver.page->gpus == 0)
        fail("GPU is \"%s\", but there are no GPUs yet", word);
    return (uint32_t)read_number("GPU", word, 0, driver.page->gpus - 1);
}

/* The next links of a GPU that lead nowhere. */
static void wire(uint32_t gpu, int32_t peer, uint64_t lanes)
{
    struct fake_gpu *of = &driver.page->gpu[gpu];
    for (unsigned i = 0; i < of->links_wired && lanes > 0; i++)
        if (of->link_peer[i] == -1) {
            of->link_peer[i] = peer;
            lanes--;
        }
    if (lanes > 0)
        fail("link: GPU %u (%s) has %u NVLinks, %u more are requested", gpu, of->model, of->links_wired, (unsigned)lanes);
}

void add_link(char **word)
{
    const uint32_t gpu = read_gpu(word[0]), peer = strcmp(word[1], "switch") == 0 ? FAKE_GPUS : read_gpu(word[1]);
    const uint64_t lanes = read_number("lanes", word[2], 1, FAKE_LINKS);
    if (gpu == peer)
        fail("link: GPU %u cannot be linked to itself", gpu);
    wire(gpu, peer == FAKE_GPUS ? -2 : (int32_t)peer, lanes);
    if (peer != FAKE_GPUS)
        wire(peer, (int32_t)gpu, lanes);
}

void add_switch(char **word)
{
    const uint64_t lanes = read_number("lanes", word[1], 1, FAKE_LINKS);
    if (strcmp(word[0], "all") != 0)
        fail("links: must be \"links all LANES\"");
    for (uint32_t gpu = 0; gpu < driver.page->gpus; gpu++)
        wire(gpu, -2, lanes);
}
