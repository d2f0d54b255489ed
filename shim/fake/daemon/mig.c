/* mig.c - the lines that change MIG mode and instances; common/mig.c places them. */
#include "daemon.h"
#include "mig.h"

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
    mig_set_mode(driver.page, gpu, on);
}

static void create(uint32_t gpu, const char *name)
{
    const struct fake_gpu *of = &driver.page->gpu[gpu];
    char what[64];
    snprintf(what, sizeof what, "GPU %u: the MIG profile", gpu);
    const uint32_t profile = (uint32_t)read_name(what, name, of->profile, sizeof of->profile[0], of->profiles);
    if (!of->mig_on)
        fail("GPU %u: MIG mode is off", gpu);
    const int start = mig_place(driver.page, gpu, profile);
    if (start < 0)
        fail("GPU %u: a %s does not fit beside the instances that exist", gpu, name);
    driver.page->unit[mig_create(driver.page, gpu, profile, (uint32_t)start)].compute = 1;
}

static void destroy(uint32_t gpu, const char *gi)
{
    const uint32_t unit = read_instance(gpu, gi);
    if (page_unit_used(driver.page, unit) > 0)
        fail("GPU %u: GPU instance %s is in use", gpu, gi);
    driver.page->unit[unit].live = driver.page->unit[unit].compute = 0;
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
