/* mig.c - what NVML changes of MIG: mode, GPU instances and their compute instances. */
#include "internal.h"
#include "calls.h"
#include "mig.h"

/* The index of the profile that has this ID; FAKE_PROFILES: none has. */
static uint32_t profile_of(const struct fake_gpu *gpu, unsigned id)
{
    uint32_t profile = 0;
    while (profile < FAKE_PROFILES && (profile >= gpu->profiles || gpu->profile[profile].id != id))
        profile++;
    return profile;
}

/* As the real one: while the GPU is in use the mode is pending, and the call succeeds. */
static nvmlReturn_t set_mode(const struct target *to, unsigned mode, nvmlReturn_t *activation)
{
    struct fake_page *page = nvml.client.page;
    shared_mutex_lock(&page->commands);
    if (page_gpu_used(page, to->gpu) > 0) {
        page->gpu[to->gpu].mig_pending = mode;
        *activation = NVML_ERROR_IN_USE;
    } else {
        if (page->gpu[to->gpu].mig_on != mode)
            mig_set_mode(page, to->gpu, mode != 0);
        page->gpu[to->gpu].mig_pending = mode;
        *activation = NVML_SUCCESS;
    }
    pthread_mutex_unlock(&page->commands);
    return NVML_SUCCESS;
}

static nvmlReturn_t placements_of(const struct target *to, uint32_t profile, nvmlGpuInstancePlacement_t *placements, unsigned *count)
{
    const struct fake_profile *is = &to->on->profile[profile];
    const unsigned places = is->last_start / is->memory + 1, room = *count;
    *count = places;
    if (placements == NULL)
        return NVML_SUCCESS;
    CHECK(room >= places, NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned i = 0; i < places; i++)
        placements[i] = (nvmlGpuInstancePlacement_t){.start = i * is->memory, .size = is->memory};
    return NVML_SUCCESS;
}

static unsigned places_left(const struct target *to, uint32_t profile)
{
    const struct fake_profile *is = &to->on->profile[profile];
    unsigned left = 0;
    for (uint32_t start = 0; start <= is->last_start; start += is->memory)
        left += mig_fits(nvml.client.page, to->gpu, profile, start);
    return left < is->most ? left : is->most;
}

static nvmlReturn_t create(const struct target *to, uint32_t profile, const nvmlGpuInstancePlacement_t *placement, nvmlGpuInstance_t *made)
{
    struct fake_page *page = nvml.client.page;
    const struct fake_profile *is = &to->on->profile[profile];
    CHECK(placement == NULL || (placement->size == is->memory && mig_may_start(is, placement->start)), NVML_ERROR_INVALID_ARGUMENT);
    nvmlReturn_t rc = NVML_ERROR_INSUFFICIENT_RESOURCES;
    shared_mutex_lock(&page->commands);
    const int start = placement == NULL ? mig_place(page, to->gpu, profile) : (int)placement->start;
    if (start >= 0 && mig_fits(page, to->gpu, profile, (uint32_t)start)) {
        *made = handle_of(mig_create(page, to->gpu, profile, (uint32_t)start));
        rc = NVML_SUCCESS;
    }
    pthread_mutex_unlock(&page->commands);
    return rc;
}

static nvmlReturn_t list_instances(const struct target *to, uint32_t profile, nvmlGpuInstance_t *instances, unsigned *count)
{
    *count = 0;
    for (uint32_t gi = 0; gi < FAKE_INSTANCES; gi++) {
        const uint32_t unit = fake_unit_of_instance(to->gpu, gi);
        if (nvml.client.page->unit[unit].live && nvml.client.page->unit[unit].profile == profile)
            instances[(*count)++] = handle_of(unit);
    }
    return NVML_SUCCESS;
}

static nvmlReturn_t destroy(const struct target *to)
{
    struct fake_page *page = nvml.client.page;
    shared_mutex_lock(&page->commands);
    const bool idle = !page->unit[to->unit].compute;
    if (idle)
        page->unit[to->unit].live = 0;
    pthread_mutex_unlock(&page->commands);
    return idle ? NVML_SUCCESS : NVML_ERROR_IN_USE;
}

/* NVML numbers compute profiles by slices: 1, 2, 3, 4, 7. */
static unsigned compute_number(const struct fake_profile *profile)
{
    return profile->compute == 7 ? 4 : profile->compute - 1;
}

static nvmlReturn_t create_compute(const struct target *to, nvmlComputeInstance_t *made)
{
    struct fake_page *page = nvml.client.page;
    shared_mutex_lock(&page->commands);
    const bool was = page->unit[to->unit].compute != 0;
    page->unit[to->unit].compute = 1;
    pthread_mutex_unlock(&page->commands);
    *made = handle_of(to->unit);
    return was ? NVML_ERROR_INSUFFICIENT_RESOURCES : NVML_SUCCESS;
}

static nvmlReturn_t destroy_compute(const struct target *to)
{
    struct fake_page *page = nvml.client.page;
    CHECK(to->of->compute, NVML_ERROR_INVALID_ARGUMENT);
    shared_mutex_lock(&page->commands);
    const bool idle = page_unit_used(page, to->unit) == 0;
    if (idle)
        page->unit[to->unit].compute = 0;
    pthread_mutex_unlock(&page->commands);
    return idle ? NVML_SUCCESS : NVML_ERROR_IN_USE;
}

static nvmlReturn_t list_compute(const struct target *to, unsigned number, nvmlComputeInstance_t *instances, unsigned *count)
{
    *count = 0;
    if (to->of->compute && number == compute_number(to->profile))
        instances[(*count)++] = handle_of(to->unit);
    return NVML_SUCCESS;
}

#include "mig.def"
