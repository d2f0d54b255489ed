/* cards.c - cards as models.def has them and the description wants them, and the links between them. */
#define _GNU_SOURCE
#include "daemon.h"

#include <stdio.h>
#include <string.h>

static const struct fake_card models[] = {
#define MODEL(model_, name_, pci, subsystem, major, minor_, arch, brand_, sms_, clock, memory_clock, bus, watts, l2, links, total, reserved, context) \
    {.model = model_, .name = name_, .pci_id = pci, .pci_subsystem = subsystem, .cc_major = major, .cc_minor = minor_, .architecture = arch, \
     .brand = brand_, .sms = sms_, .clock_mhz = clock, .memory_clock_mhz = memory_clock, .bus_bits = bus, .power_watts = watts, .l2_mib = l2, \
     .links_wired = links, .total_bytes = total * FAKE_MIB, .reserved_bytes = reserved * FAKE_MIB, .context_bytes = context * FAKE_MIB},
#define PROFILE(model, ...)
#include "models.def"
#undef MODEL
#undef PROFILE
};
#define MODELS (sizeof models / sizeof models[0])

static const struct {
    const char *model;
    struct fake_profile is;
} profiles[] = {
#define MODEL(...)
#define PROFILE(model_, name_, id_, number, compute_, memory_, most_, last, sms_, copy, decoder, jpeg, ofa, mib) \
    {model_, {.name = name_, .id = id_, .nvml = number, .compute = compute_, .memory = memory_, .most = most_, .last_start = last, .sms = sms_, \
              .copy_engines = copy, .decoders = decoder, .jpegs = jpeg, .ofas = ofa, .bytes = mib * FAKE_MIB}},
#include "models.def"
};
#define PROFILES (sizeof profiles / sizeof profiles[0])

static uint64_t mix(uint64_t x) /* splitmix64 */
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static void print_uuid(const char *prefix, const uint8_t bytes[16], char text[48])
{
    int at = snprintf(text, 48, "%s", prefix);
    for (unsigned i = 0; i < 16; i++)
        at += snprintf(text + at, 48 - (size_t)at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", bytes[i]);
}

void make_uuid(const char *prefix, const char *seed, uint32_t a, uint32_t b, char text[48], uint8_t bytes[16])
{
    uint64_t state = mix(((uint64_t)a << 32) | b);
    for (const char *c = seed; *c != '\0'; c++)
        state = mix(state ^ (uint64_t)(unsigned char)*c);
    const uint64_t halves[2] = {state, mix(state)};
    memcpy(bytes, halves, 16);
    bytes[6] = (uint8_t)((bytes[6] & 0x0f) | 0x40); /* RFC 4122, version 4 */
    bytes[8] = (uint8_t)((bytes[8] & 0x3f) | 0x80);
    print_uuid(prefix, bytes, text);
}

/* Right is what is printed the same again. */
static bool set_uuid(struct fake_card *card, const char *text, struct text *why)
{
    const char *at = text + strcspn(text, "-");
    for (unsigned i = 0; i < 16 && *at != '\0'; i++) {
        at += *at == '-';
        sscanf(at, "%2hhx", &card->uuid_bytes[i]);
        at += strnlen(at, 2);
    }
    print_uuid("GPU-", card->uuid_bytes, card->uuid);
    if (strcmp(card->uuid, text) != 0)
        say(why, "uuid is \"%s\", must look like GPU-01234567-89ab-cdef-0123-456789abcdef", text);
    return strcmp(card->uuid, text) == 0;
}

static bool set_bus(struct fake_card *card, const char *value, struct text *why)
{
    char more;
    if (sscanf(value, "%x:%x:%x.0%c", &card->pci_domain, &card->pci_bus, &card->pci_device, &more) == 3 && card->pci_bus <= 255 &&
        card->pci_device <= 31 && card->pci_domain <= 0xffff)
        return true;
    say(why, "bus is \"%s\", must look like 0000:17:00.0", value);
    return false;
}

struct described {
    struct fake_card card;
    uint64_t count, memory_bytes; /* 0: the model's */
};

static bool set_option(struct described *described, const char *key, const char *value, struct text *why)
{
    if (strcmp(key, "uuid") == 0)
        return set_uuid(&described->card, value, why);
    if (strcmp(key, "bus") == 0)
        return set_bus(&described->card, value, why);
    if (strcmp(key, "serial") == 0)
        return snprintf(described->card.serial, sizeof described->card.serial, "%s", value) > 0;
    uint64_t number;
#define OPTION(its_key, field, least, most, unit)                                                                              \
    if (strcmp(key, #its_key) == 0)                                                                                            \
        return parse_number(key, value, least, most, &number, why) && (described->field = (__typeof__(described->field))(number * unit), true);
#include "options.def"
#undef OPTION
#define OPTION(its_key, ...) ", " #its_key
    say(why, "card: the option is \"%s\", must be one of uuid, bus, serial%s", key,
#include "options.def"
    );
    return false;
}

/* The card with that index, the options not yet read. */
static struct fake_card card_of(const struct fake_card *model, uint32_t index, const char *seed)
{
    struct fake_card card = *model;
    card.minor = index;
    card.pci_bus = 0x17 + 0x12 * index;
    card.numa = (int32_t)(index / 4);
    snprintf(card.serial, sizeof card.serial, "16500%08u", index);
    make_uuid("GPU-", seed, 1, index, card.uuid, card.uuid_bytes);
    for (unsigned i = 0; i < FAKE_LINKS; i++)
        card.link_peer[i] = -1;
    for (size_t i = 0; i < PROFILES; i++)
        if (strcmp(profiles[i].model, card.model) == 0)
            card.profile[card.profiles++] = profiles[i].is;
    card.mig_capable = card.profiles > 0;
    return card;
}

static bool read_options(struct described *described, const char *options, struct text *why)
{
    char copy[1024], *at = copy;
    snprintf(copy, sizeof copy, "%s", options);
    for (char *key = next_word(&at); key != NULL; key = next_word(&at)) {
        char *equals = strchr(key, '=');
        if (equals == NULL)
            return say(why, "card: \"%s\" is not option=value", key), false;
        *equals = '\0';
        if (!set_option(described, key, equals + 1, why))
            return false;
    }
    if (described->memory_bytes > 0) {
        described->card.total_bytes = described->memory_bytes;
        described->card.reserved_bytes = 0; /* a size given is a size to have: tests count on it */
    }
    return true;
}

static void put_card(struct fake_page *page, const struct fake_card *card)
{
    struct fake_unit *unit = &page->unit[page->cards];
    unit->live = 1;
    unit->card = page->cards;
    unit->limit_bytes = card->total_bytes - card->reserved_bytes;
    memcpy(unit->uuid, card->uuid, sizeof unit->uuid);
    memcpy(unit->uuid_bytes, card->uuid_bytes, sizeof unit->uuid_bytes);
    page->card[page->cards++] = *card;
}

bool add_cards(struct daemon *daemon, const struct value *value, struct text *why)
{
    const struct fake_card *model = models;
    while (model < models + MODELS && strcmp(model->model, value[0].word) != 0)
        model++;
    if (model == models + MODELS) {
        say(why, "card: the model is \"%s\", must be one of ", value[0].word);
        for (model = models; model < models + MODELS; model++)
            say(why, "%s%s", model == models ? "" : ", ", model->model);
        return false;
    }
    uint64_t made = 0, count = 1;
    for (; made < count; made++) {
        if (daemon->page->cards == FAKE_CARDS)
            return say(why, "card: more than %u cards", FAKE_CARDS), false;
        struct described described = {.card = card_of(model, daemon->page->cards, daemon->seed), .count = 1};
        if (!read_options(&described, value[1].word, why))
            return false;
        put_card(daemon->page, &described.card);
        count = described.count;
    }
    return true;
}

/* The next links of a card that lead nowhere. */
static bool wire(struct fake_card *card, int32_t peer, uint64_t lanes, const struct daemon *daemon, struct text *why)
{
    uint64_t left = lanes;
    for (unsigned i = 0; i < card->links_wired && left > 0; i++)
        if (card->link_peer[i] == -1) {
            card->link_peer[i] = peer;
            left--;
        }
    if (left > 0)
        say(why, "link: card %u (%s) has %u NVLinks, %llu more are asked for", (unsigned)(card - daemon->page->card), card->model,
            card->links_wired, (unsigned long long)left);
    return left == 0;
}

bool add_link(struct daemon *daemon, const struct value *value, struct text *why)
{
    struct fake_card *cards = daemon->page->card;
    uint64_t a = value[0].number, b;
    if (strcmp(value[1].word, "switch") == 0)
        return wire(&cards[a], -2, value[2].number, daemon, why);
    if (!parse_card(daemon, value[1].word, &b, why))
        return false;
    if (a == b)
        return say(why, "link: card %u cannot be linked to itself", (unsigned)a), false;
    return wire(&cards[a], (int32_t)b, value[2].number, daemon, why) && wire(&cards[b], (int32_t)a, value[2].number, daemon, why);
}

bool add_switch(struct daemon *daemon, const struct value *value, struct text *why)
{
    bool good = strcmp(value[0].word, "all") == 0;
    if (!good)
        say(why, "links: must be \"links all LANES\"");
    for (uint32_t card = 0; good && card < daemon->page->cards; card++)
        good = wire(&daemon->page->card[card], -2, value[1].number, daemon, why);
    return good;
}
