/* cards.c - cards as models.def has them and the description wants them, and the links between them. */
#define _GNU_SOURCE
#include "daemon.h"

#include <stdio.h>
#include <string.h>

static const struct fake_card models[] = {
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

/* Options of a card line: key=value. */

/* Right is what is printed the same again. */
static void set_uuid(struct fake_card *card, const char *text)
{
    const char *at = text + strcspn(text, "-");
    for (unsigned i = 0; i < 16 && *at != '\0'; i++) {
        at += *at == '-';
        sscanf(at, "%2hhx", &card->uuid_bytes[i]);
        at += strnlen(at, 2);
    }
    print_uuid("GPU-", card->uuid_bytes, card->uuid);
    if (strcmp(card->uuid, text) != 0)
        fail("uuid is \"%s\", must look like GPU-01234567-89ab-cdef-0123-456789abcdef", text);
}

static void set_bus(struct fake_card *card, const char *value)
{
    char more;
    const int got = sscanf(value, "%x:%x:%x.0%c", &card->pci_domain, &card->pci_bus, &card->pci_device, &more);
    if (got != 3 || card->pci_bus > 255 || card->pci_device > 31 || card->pci_domain > 0xffff)
        fail("bus is \"%s\", must look like 0000:17:00.0", value);
}

static void set_memory(struct fake_card *card, uint64_t mib)
{
    card->total_bytes = mib * FAKE_MIB;
    card->reserved_bytes = 0; /* a size given is a size to have: tests count on it */
}

static void set_option(struct fake_card *card, const char *key, const char *value, uint64_t *count)
{
#define OPTION(name, set) if (strcmp(key, #name) == 0) set; else
#include "options.def"
        fail("card: the option is \"%s\", must be one of uuid, bus, serial, count, memory_mib, context_mib, numa, minor", key);
}

/* The next card. Returns how many the line wants. */
static uint64_t add_card(const struct fake_card *model, const char *options)
{
    const uint32_t index = driver.page->cards;
    struct fake_unit *unit = &driver.page->unit[index];
    struct fake_card *card = &driver.page->card[index];
    uint64_t count = 1;
    char text[1024], *rest = NULL;
    if (index == FAKE_CARDS)
        fail("card: more than %u cards", FAKE_CARDS);
    *card = *model;
    card->minor = index;
    card->numa = (int32_t)(index / 4);
    card->pci_bus = 0x17 + 0x12 * index;
    snprintf(card->serial, sizeof card->serial, "16500%08u", index);
    snprintf(text, sizeof text, "%s/%u", driver.page->seed, index);
    make_uuid("GPU-", text, card->uuid, card->uuid_bytes);
    for (unsigned i = 0; i < FAKE_LINKS; i++)
        card->link_peer[i] = -1;
    for (size_t i = 0; i < sizeof profiles / sizeof profiles[0]; i++)
        if (strcmp(profiles[i].model, card->model) == 0)
            card->profile[card->profiles++] = profiles[i].is;
    snprintf(text, sizeof text, "%s", options);
    for (char *key = strtok_r(text, " \t", &rest); key != NULL; key = strtok_r(NULL, " \t", &rest)) {
        char *value = strchr(key, '=');
        if (value == NULL)
            fail("card: \"%s\" is not option=value", key);
        *value++ = '\0';
        set_option(card, key, value, &count);
    }
    unit->live = 1;
    unit->card = index;
    unit->limit_bytes = card->total_bytes - card->reserved_bytes;
    memcpy(unit->uuid, card->uuid, sizeof unit->uuid);
    memcpy(unit->uuid_bytes, card->uuid_bytes, sizeof unit->uuid_bytes);
    driver.page->cards++;
    return count;
}

void add_cards(char **word)
{
    const size_t model = read_name("card: the model", word[0], models, sizeof models[0], sizeof models / sizeof models[0]);
    for (uint64_t made = 0, count = 1; made < count; made++)
        count = add_card(&models[model], word[1]);
}

uint32_t read_card(const char *word)
{
    if (driver.page->cards == 0)
        fail("card is \"%s\", but there are no cards yet", word);
    return (uint32_t)read_number("card", word, 0, driver.page->cards - 1);
}

/* The next links of a card that lead nowhere. */
static void wire(uint32_t card, int32_t peer, uint64_t lanes)
{
    struct fake_card *of = &driver.page->card[card];
    for (unsigned i = 0; i < of->links_wired && lanes > 0; i++)
        if (of->link_peer[i] == -1) {
            of->link_peer[i] = peer;
            lanes--;
        }
    if (lanes > 0)
        fail("link: card %u (%s) has %u NVLinks, %u more are asked for", card, of->model, of->links_wired, (unsigned)lanes);
}

void add_link(char **word)
{
    const uint32_t card = read_card(word[0]), peer = strcmp(word[1], "switch") == 0 ? FAKE_CARDS : read_card(word[1]);
    const uint64_t lanes = read_number("lanes", word[2], 1, FAKE_LINKS);
    if (card == peer)
        fail("link: card %u cannot be linked to itself", card);
    wire(card, peer == FAKE_CARDS ? -2 : (int32_t)peer, lanes);
    if (peer != FAKE_CARDS)
        wire(peer, (int32_t)card, lanes);
}

void add_switch(char **word)
{
    const uint64_t lanes = read_number("lanes", word[1], 1, FAKE_LINKS);
    if (strcmp(word[0], "all") != 0)
        fail("links: must be \"links all LANES\"");
    for (uint32_t card = 0; card < driver.page->cards; card++)
        wire(card, -2, lanes);
}
