/* mig.c - MIG mode and GPU instances, placed as NVIDIA documents them (daemon/models.def).
 *
 * A GPU instance begins at a memory slice that its profile allows. Instances never overlap; together they have no more compute slices,
 * decoders and OFAs than the GPU, which are those of its largest profile. Each has at most one compute instance, as large as itself.
 */
#include "mig.h"

#include <stdio.h>
#include <string.h>

static uint64_t mix(uint64_t x) /* splitmix64 */
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

void print_uuid(const char *prefix, const uint8_t bytes[16], char text[48])
{
    int at = snprintf(text, 48, "%s", prefix);
    for (unsigned i = 0; i < 16; i++)
        at += snprintf(text + at, 48 - (size_t)at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", bytes[i]);
}

void make_uuid(const char *prefix, const char *seed, char text[48], uint8_t bytes[16])
{
    uint64_t state = 0;
    for (const char *c = seed; *c != '\0'; c++)
        state = mix(state ^ (uint64_t)(unsigned char)*c);
    memcpy(bytes, &state, 8);
    state = mix(state);
    memcpy(bytes + 8, &state, 8);
    bytes[6] = (uint8_t)((bytes[6] & 0x0f) | 0x40); /* RFC 4122, version 4 */
    bytes[8] = (uint8_t)((bytes[8] & 0x3f) | 0x80);
    print_uuid(prefix, bytes, text);
}

static struct fake_unit *instance_of(struct fake_page *page, uint32_t gpu, uint32_t gi)
{
    return &page->unit[fake_unit_of_instance(gpu, gi)];
}

struct taken {
    uint32_t memory; /* bit s = memory slice s */
    uint32_t compute, decoders, ofas;
};

static void add_to(struct taken *taken, const struct fake_profile *is, uint32_t start)
{
    taken->memory |= ((1u << is->memory) - 1) << start;
    taken->compute += is->compute;
    taken->decoders += is->decoders;
    taken->ofas += is->ofas;
}

static struct taken taken_of(struct fake_page *page, uint32_t gpu)
{
    struct taken taken = {0};
    for (uint32_t gi = 0; gi < FAKE_INSTANCES; gi++) {
        const struct fake_unit *unit = instance_of(page, gpu, gi);
        if (unit->live)
            add_to(&taken, fake_profile_of(page, unit), unit->start);
    }
    return taken;
}

static struct taken all_of(const struct fake_gpu *gpu)
{
    struct taken all = {0};
    for (uint32_t i = 0; i < gpu->profiles && i < FAKE_PROFILES; i++) {
        const struct fake_profile *is = &gpu->profile[i];
        all.compute = is->compute > all.compute ? is->compute : all.compute;
        all.decoders = is->decoders > all.decoders ? is->decoders : all.decoders;
        all.ofas = is->ofas > all.ofas ? is->ofas : all.ofas;
    }
    return all;
}

bool mig_may_start(const struct fake_profile *is, uint32_t start)
{
    return start <= is->last_start && start % is->memory == 0;
}

bool mig_fits(struct fake_page *page, uint32_t gpu, uint32_t profile, uint32_t start)
{
    const struct fake_profile *is = &page->gpu[gpu].profile[profile];
    struct taken taken = taken_of(page, gpu);
    const struct taken all = all_of(&page->gpu[gpu]);
    if (!mig_may_start(is, start) || (taken.memory & (((1u << is->memory) - 1) << start)) != 0)
        return false;
    add_to(&taken, is, start);
    return taken.compute <= all.compute && taken.decoders <= all.decoders && taken.ofas <= all.ofas;
}

int mig_place(struct fake_page *page, uint32_t gpu, uint32_t profile)
{
    const struct fake_profile *is = &page->gpu[gpu].profile[profile];
    int start = (int)is->last_start;
    while (start >= 0 && !mig_fits(page, gpu, profile, (uint32_t)start))
        start -= (int)is->memory;
    return start;
}

/* By size and place, but for halves of a GPU, which have the first free of 1 and 2. */
static uint32_t new_gi(struct fake_page *page, uint32_t gpu, const struct fake_profile *profile, uint32_t start)
{
    const struct fake_gpu *of = &page->gpu[gpu];
    uint32_t memory = 0;
    for (uint32_t i = 0; i < of->profiles && i < FAKE_PROFILES; i++)
        memory = of->profile[i].memory > memory ? of->profile[i].memory : memory;
    if (profile->memory == memory)
        return 0;
    if (profile->memory * 2 == memory)
        return instance_of(page, gpu, 1)->live ? 2 : 1;
    return (profile->memory * 4 == memory ? 3 : 7) + start / profile->memory;
}

uint32_t mig_create(struct fake_page *page, uint32_t gpu, uint32_t profile, uint32_t start)
{
    const struct fake_gpu *of = &page->gpu[gpu];
    const uint32_t gi = new_gi(page, gpu, &of->profile[profile], start);
    struct fake_unit *made = instance_of(page, gpu, gi);
    char seed[128];
    made->gpu = gpu;
    made->profile = profile;
    made->start = start;
    made->compute = 0;
    made->limit_bytes = of->profile[profile].bytes;
    snprintf(seed, sizeof seed, "%s/%u/%u/%s", page->seed, gpu, gi, of->profile[profile].name);
    make_uuid("MIG-", seed, made->uuid, made->uuid_bytes);
    made->live = 1;
    return fake_unit_of_instance(gpu, gi);
}

void mig_set_mode(struct fake_page *page, uint32_t gpu, bool on)
{
    for (uint32_t gi = 0; gi < FAKE_INSTANCES && !on; gi++)
        instance_of(page, gpu, gi)->live = instance_of(page, gpu, gi)->compute = 0;
    page->gpu[gpu].mig_on = page->gpu[gpu].mig_pending = on;
    page->unit[gpu].live = !on;
}
