/* mig.c - MIG mode and GPU instances, placed as NVIDIA documents them.
 *
 * A GPU has 8 memory and 7 compute slices. An instance begins at a slice that its profile allows (models.def) and has one compute
 * instance as large as itself.
 */
#include "daemon.h"

#include <stdio.h>
#include <string.h>

static struct fake_unit *instance_of(uint32_t gpu, uint32_t gi)
{
    return &driver.page->unit[fake_unit_of_instance(gpu, gi)];
}

static uint32_t read_instance(uint32_t gpu, const char *word)
{
    const uint32_t gi = (uint32_t)read_number("GPU instance", word, 0, FAKE_INSTANCES - 1);
    if (!instance_of(gpu, gi)->live)
        fail("GPU %u: there is no GPU instance %u, must be one that status names", gpu, gi);
    return fake_unit_of_instance(gpu, gi);
}

uint32_t read_unit(const char *word)
{
    char gpu[32];
    const char *colon = strchr(word, ':');
    snprintf(gpu, sizeof gpu, "%.*s", (int)strcspn(word, ":"), word);
    return colon == NULL ? read_gpu(gpu) : read_instance(read_gpu(gpu), colon + 1);
}

static void set_mode(uint32_t gpu, bool on)
{
    struct fake_gpu *of = &driver.page->gpu[gpu];
    if (of->profiles == 0)
        fail("GPU %u: %s has no MIG", gpu, of->name);
    if (page_gpu_used(driver.page, gpu) > 0)
        fail("GPU %u: in use, MIG mode can change only while no process has memory on it", gpu);
    for (uint32_t gi = 0; gi < FAKE_INSTANCES && !on; gi++)
        instance_of(gpu, gi)->live = 0;
    of->mig_on = on;
    driver.page->unit[gpu].live = !on;
}

/* By size and place, but for halves of a GPU, which have the first free of 1 and 2. */
static uint32_t new_gi(uint32_t gpu, const struct fake_profile *profile, uint32_t start)
{
    switch (profile->memory) {
    case 8: return 0;
    case 4: return instance_of(gpu, 1)->live ? 2 : 1;
    case 2: return 3 + start / 2;
    default: return 7 + start;
    }
}

/* The memory slice at which another instance of a profile begins: the highest that is free, as the driver does. -1: there is none. */
static int place(uint32_t gpu, uint32_t profile)
{
    const struct fake_profile *is = &driver.page->gpu[gpu].profile[profile];
    uint32_t memory = 0, compute = 0, of_profile = 0; /* taken: bit s = memory slice s */
    int start = (int)is->last_start;
    for (uint32_t gi = 0; gi < FAKE_INSTANCES; gi++) {
        const struct fake_unit *unit = instance_of(gpu, gi);
        const struct fake_profile *its = fake_profile_of(driver.page, unit);
        if (!unit->live)
            continue;
        memory |= ((1u << its->memory) - 1) << unit->start;
        compute += its->compute;
        of_profile += unit->profile == profile;
    }
    while (start >= 0 && (memory & (((1u << is->memory) - 1) << start)) != 0)
        start -= (int)is->memory;
    return of_profile < is->most && compute + is->compute <= 7 ? start : -1;
}

static void create(uint32_t gpu, const char *name)
{
    const struct fake_gpu *of = &driver.page->gpu[gpu];
    char what[64], seed[128];
    snprintf(what, sizeof what, "GPU %u: the MIG profile", gpu);
    const uint32_t profile = (uint32_t)read_name(what, name, of->profile, sizeof of->profile[0], of->profiles);
    if (!of->mig_on)
        fail("GPU %u: MIG mode is off", gpu);
    const int start = place(gpu, profile);
    if (start < 0)
        fail("GPU %u: a %s does not fit beside the instances that exist", gpu, name);
    const uint32_t gi = new_gi(gpu, &of->profile[profile], (uint32_t)start);
    struct fake_unit *made = instance_of(gpu, gi);
    made->gpu = gpu;
    made->profile = profile;
    made->start = (uint32_t)start;
    made->limit_bytes = of->profile[profile].bytes;
    snprintf(seed, sizeof seed, "%s/%u/%u/%s", driver.page->seed, gpu, gi, name);
    make_uuid("MIG-", seed, made->uuid, made->uuid_bytes);
    made->live = 1;
}

static void destroy(uint32_t gpu, const char *gi)
{
    const uint32_t unit = read_instance(gpu, gi);
    if (page_unit_used(driver.page, unit) > 0)
        fail("GPU %u: GPU instance %s is in use", gpu, gi);
    driver.page->unit[unit].live = 0;
}

void add_mig(char **word)
{
    const uint32_t gpu = read_gpu(word[0]);
    char *rest = NULL;
    set_mode(gpu, true);
    for (char *profile = strtok_r(word[1], " \t", &rest); profile != NULL; profile = strtok_r(NULL, " \t", &rest))
        create(gpu, profile);
}

void change_mig(char **word)
{
    const uint32_t gpu = read_gpu(word[0]);
    const bool on = strcmp(word[1], "on") == 0;
    if (strcmp(word[1], "create") == 0)
        create(gpu, word[2]);
    else if (strcmp(word[1], "destroy") == 0)
        destroy(gpu, word[2]);
    else if ((on || strcmp(word[1], "off") == 0) && word[2][0] == '\0')
        set_mode(gpu, on);
    else
        fail("mig: must be on, off, create PROFILE or destroy GI");
}
