/* mig.c - MIG mode and GPU instances, placed as NVIDIA documents them.
 *
 * A card has 8 memory and 7 compute slices. An instance begins where its profile says (models.def) and has one compute
 * instance as large as itself.
 */
#include "daemon.h"

#include <stdio.h>
#include <string.h>

/* FAKE_UNITS: there is none. */
static uint32_t unit_of_gi(const struct fake_page *page, uint64_t card, uint64_t gi)
{
    for (uint32_t i = 0; i < FAKE_INSTANCES; i++) {
        const uint32_t unit = fake_unit_of_instance((uint32_t)card, i);
        if (page->unit[unit].live && page->unit[unit].gi == gi)
            return unit;
    }
    return FAKE_UNITS;
}

static bool find_unit(const struct fake_page *page, uint64_t card, const char *gi_word, uint64_t *unit, struct text *why)
{
    uint64_t gi;
    if (!parse_number("GPU instance", gi_word, 0, 14, &gi, why))
        return false;
    *unit = unit_of_gi(page, card, gi);
    if (*unit == FAKE_UNITS)
        say(why, "card %u: there is no GPU instance %u, must be one that status names", (unsigned)card, (unsigned)gi);
    return *unit != FAKE_UNITS;
}

bool parse_unit(const struct daemon *daemon, const char *word, uint64_t *unit, struct text *why)
{
    char card[32];
    const char *colon = strchr(word, ':');
    snprintf(card, sizeof card, "%.*s", (int)strcspn(word, ":"), word);
    return parse_card(daemon, card, unit, why) && (colon == NULL || find_unit(daemon->page, *unit, colon + 1, unit, why));
}

static bool set_mode(struct fake_page *page, uint32_t card, bool on, struct text *why)
{
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

/* By size and place, but for halves of a card, which have the first free of 1 and 2. */
static uint32_t gi_at(const struct fake_page *page, uint32_t card, const struct fake_profile *profile, uint32_t start)
{
    switch (profile->memory) {
    case 8: return 0;
    case 4: return unit_of_gi(page, card, 1) == FAKE_UNITS ? 1 : 2;
    case 2: return 3 + start / 2;
    default: return 7 + start;
    }
}

/* Puts an instance into the highest place that is free, as the driver does. False: there is none. */
static bool place(struct fake_page *page, uint32_t card, uint32_t profile, const char *seed)
{
    const struct fake_profile *is = &page->card[card].profile[profile];
    uint32_t memory = 0, compute = 0, of_profile = 0; /* taken: bit s = memory slice s */
    struct fake_unit *made = NULL;
    for (uint32_t i = FAKE_INSTANCES; i-- > 0;) {
        struct fake_unit *unit = &page->unit[fake_unit_of_instance(card, i)];
        const struct fake_profile *its = &page->card[card].profile[unit->profile];
        if (!unit->live) {
            made = unit;
            continue;
        }
        memory |= ((1u << its->memory) - 1) << unit->start;
        compute += its->compute;
        of_profile += unit->profile == profile;
    }
    if (made == NULL || of_profile >= is->most || compute + is->compute > 7)
        return false;
    for (int start = (int)is->last_start; start >= 0; start -= (int)is->memory) {
        if (memory & (((1u << is->memory) - 1) << start))
            continue;
        made->card = card;
        made->profile = profile;
        made->start = (uint32_t)start;
        made->gi = gi_at(page, card, is, made->start);
        made->limit_bytes = is->bytes;
        make_uuid("MIG-", seed, 2 + card, made->gi, made->uuid, made->uuid_bytes);
        made->live = 1;
        return true;
    }
    return false;
}

static bool create(struct daemon *daemon, uint32_t card, const char *profile, struct text *why)
{
    const struct fake_card *of = &daemon->page->card[card];
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
    char seed[128];
    snprintf(seed, sizeof seed, "%s/%s", daemon->seed, profile);
    if (place(daemon->page, card, p, seed))
        return true;
    say(why, "card %u: no room for a %s beside the instances that exist", card, profile);
    return false;
}

static bool destroy(struct fake_page *page, uint32_t card, const char *gi, struct text *why)
{
    uint64_t unit;
    if (!find_unit(page, card, gi, &unit, why))
        return false;
    if (page_unit_used(page, (uint32_t)unit) > 0)
        return say(why, "card %u: GPU instance %s is in use", card, gi), false;
    page->unit[unit].live = 0;
    return true;
}

bool add_mig(struct daemon *daemon, const struct value *value, struct text *why)
{
    const uint32_t card = (uint32_t)value[0].number;
    bool good = set_mode(daemon->page, card, true, why);
    char *at = value[1].word, *profile;
    while (good && (profile = next_word(&at)) != NULL)
        good = create(daemon, card, profile, why);
    return good;
}

bool change_mig(struct daemon *daemon, const struct value *value, struct text *why)
{
    const uint32_t card = (uint32_t)value[0].number;
    char *at = value[2].word;
    const char *what = value[1].word, *which = next_word(&at);
    const bool mode = strcmp(what, "on") == 0 || strcmp(what, "off") == 0;
    if (mode && which == NULL)
        return set_mode(daemon->page, card, strcmp(what, "on") == 0, why);
    if (strcmp(what, "create") == 0 && which != NULL)
        return create(daemon, card, which, why);
    if (strcmp(what, "destroy") == 0 && which != NULL)
        return destroy(daemon->page, card, which, why);
    say(why, "mig: must be on, off, create PROFILE or destroy GI");
    return false;
}
