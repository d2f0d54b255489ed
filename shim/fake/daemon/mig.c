/* mig.c - MIG mode and GPU instances, placed as NVIDIA documents them.
 *
 * A card has 8 memory and 7 compute slices. An instance of a profile with m memory slices begins at a multiple of m
 * (3g and 4g: of 4) and has one compute instance as large as itself.
 */
#include "daemon.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int unit_of_gi(const struct fake_page *page, uint32_t card, uint32_t gi)
{
    for (uint32_t i = 0; i < FAKE_INSTANCES; i++) {
        const uint32_t unit = fake_unit_of_instance(card, i);
        if (page->unit[unit].live && page->unit[unit].gi == gi)
            return (int)unit;
    }
    return -1;
}

/* By size and place, but for halves of a card, which have the first free of 1 and 2. */
static uint32_t gi_at(const struct fake_page *page, uint32_t card, const struct fake_profile *profile, uint32_t start)
{
    if (profile->memory == 8)
        return 0;
    if (profile->memory == 4)
        return unit_of_gi(page, card, 1) < 0 ? 1 : 2;
    return profile->memory == 2 ? 3 + start / 2 : 7 + start;
}

bool mig_set_mode(struct daemon *daemon, uint32_t card, bool on, struct text *why)
{
    struct fake_page *page = daemon->page;
    struct fake_card *of = &page->card[card];
    if (!of->mig_capable)
        return say(why, "card %u: %s has no MIG", card, of->name), false;
    if (page_card_used(page, card) > 0)
        return say(why, "card %u: in use, MIG mode can change only when no process holds memory on it", card), false;
    for (uint32_t i = 0; i < FAKE_INSTANCES && !on; i++)
        page->unit[fake_unit_of_instance(card, i)].live = 0;
    of->mig_on = on;
    page->unit[card].live = !on;
    return true;
}

struct taken {
    uint32_t memory; /* bit s = memory slice s is used */
    uint32_t compute, of_profile;
    int free_index;
};

static struct taken taken_on(const struct fake_page *page, uint32_t card, uint32_t profile)
{
    struct taken taken = {.free_index = -1};
    for (uint32_t i = FAKE_INSTANCES; i-- > 0;) {
        const struct fake_unit *unit = &page->unit[fake_unit_of_instance(card, i)];
        if (!unit->live) {
            taken.free_index = (int)i;
            continue;
        }
        const struct fake_profile *its = &page->card[card].profile[unit->profile];
        taken.memory |= ((1u << its->memory) - 1) << unit->start;
        taken.compute += its->compute;
        taken.of_profile += unit->profile == profile;
    }
    return taken;
}

/* Memory slice at which the profile begins, or -1. The highest place that is free, as the driver takes them. */
static int find_start(const struct fake_profile *profile, const struct taken *taken)
{
    if (taken->of_profile >= profile->most || taken->compute + profile->compute > 7 || taken->free_index < 0)
        return -1;
    for (int start = (int)profile->last_start; start >= 0; start -= (int)profile->memory)
        if ((taken->memory & (((1u << profile->memory) - 1) << start)) == 0)
            return start;
    return -1;
}

bool mig_create(struct daemon *daemon, uint32_t card, const char *profile, struct text *why)
{
    struct fake_page *page = daemon->page;
    struct fake_card *of = &page->card[card];
    uint32_t p = 0;
    while (p < of->profiles && strcmp(of->profile[p].name, profile) != 0)
        p++;
    if (p == of->profiles) {
        say(why, "card %u: the MIG profile is \"%s\", must be one of:", card, profile);
        for (uint32_t i = 0; i < of->profiles; i++)
            say(why, " %s", of->profile[i].name);
        return false;
    }
    if (!of->mig_on)
        return say(why, "card %u: MIG mode is off", card), false;
    const struct taken taken = taken_on(page, card, p);
    const int start = find_start(&of->profile[p], &taken);
    if (start < 0)
        return say(why, "card %u: no room for a %s beside the instances that exist", card, profile), false;
    struct fake_unit *unit = &page->unit[fake_unit_of_instance(card, (uint32_t)taken.free_index)];
    unit->card = card;
    unit->profile = p;
    unit->start = (uint32_t)start;
    unit->gi = gi_at(page, card, &of->profile[p], (uint32_t)start);
    unit->limit_bytes = of->profile[p].bytes;
    char seed[128];
    snprintf(seed, sizeof seed, "%s/%s", daemon->seed, profile);
    make_uuid("MIG-", seed, 2 + card, unit->gi, unit->uuid, unit->uuid_bytes);
    unit->live = 1;
    return true;
}

bool mig_destroy(struct daemon *daemon, uint32_t card, uint32_t gi, struct text *why)
{
    const int unit = unit_of_gi(daemon->page, card, gi);
    if (unit < 0)
        return say(why, "card %u: there is no GPU instance %u", card, gi), false;
    if (page_unit_used(daemon->page, (uint32_t)unit) > 0)
        return say(why, "card %u: GPU instance %u is in use", card, gi), false;
    daemon->page->unit[unit].live = 0;
    return true;
}

bool parse_unit(const struct daemon *daemon, const char *word, uint32_t *unit, struct text *why)
{
    char card_word[32];
    snprintf(card_word, sizeof card_word, "%s", word);
    char *colon = strchr(card_word, ':');
    if (colon != NULL)
        *colon = '\0';
    uint32_t card;
    if (!parse_card(daemon, card_word, &card, why))
        return false;
    *unit = card;
    if (colon == NULL)
        return true;
    uint64_t gi;
    if (!parse_number("GPU instance", colon + 1, 0, 14, &gi, why))
        return false;
    const int found = unit_of_gi(daemon->page, card, (uint32_t)gi);
    if (found < 0)
        return say(why, "card %u: there is no GPU instance %u", card, (unsigned)gi), false;
    *unit = (uint32_t)found;
    return true;
}
