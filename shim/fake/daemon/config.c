/* config.c - reads the description file: one thing a line, words by blanks, # begins a comment.
 *
 *     driver 580.65.06
 *     cuda 13000
 *     kernel_us 10
 *     seed node-a
 *     card h200 [uuid=GPU-...] [bus=0000:17:00.0] [numa=0] [minor=0] [memory_mib=N] [context_mib=N] [serial=S] [count=N]
 *     link 0 1 18 | link 0 switch 18 | links all 18
 *     mig 0 1g.18gb 3g.71gb
 *     process 0 4711 2048 python3 | process 0:7 ...
 *     fault fail cuMemAlloc_v2 nth=3 | fault hang cuStreamQuery seconds=2 | ...
 *
 * docs/reference/fake-driver.md explains each. A line that is not understood refuses the whole file.
 */
#define _GNU_SOURCE
#include "daemon.h"
#include "fault.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORDS 24

bool parse_number(const char *what, const char *word, uint64_t least, uint64_t most, uint64_t *value, struct text *why)
{
    char *end = NULL;
    errno = 0;
    *value = strtoull(word, &end, 10);
    if (word[0] >= '0' && word[0] <= '9' && *end == '\0' && errno == 0 && *value >= least && *value <= most)
        return true;
    say(why, "%s is \"%s\", must be a number from %llu to %llu", what, word, (unsigned long long)least, (unsigned long long)most);
    return false;
}

bool parse_card(const struct daemon *daemon, const char *word, uint32_t *card, struct text *why)
{
    uint64_t value;
    if (daemon->page->cards == 0)
        return say(why, "card is \"%s\", but there are no cards yet", word), false;
    if (!parse_number("card", word, 0, daemon->page->cards - 1, &value, why))
        return false;
    *card = (uint32_t)value;
    return true;
}

static bool set_mib(const char *key, const char *value, uint64_t least, uint64_t most, uint64_t *bytes, struct text *why)
{
    uint64_t mib;
    if (!parse_number(key, value, least, most, &mib, why))
        return false;
    *bytes = mib * FAKE_MIB;
    return true;
}

static bool set_uuid(struct fake_card *card, const char *value, struct text *why)
{
    if (!parse_uuid("GPU-", value, card->uuid_bytes))
        return say(why, "uuid is \"%s\", must look like GPU-01234567-89ab-cdef-0123-456789abcdef", value), false;
    snprintf(card->uuid, sizeof card->uuid, "%s", value);
    return true;
}

static bool set_bus(struct fake_card *card, const char *value, struct text *why)
{
    unsigned domain, bus, device;
    char more;
    if (sscanf(value, "%x:%x:%x.0%c", &domain, &bus, &device, &more) != 3 || bus > 255 || device > 31 || domain > 0xffff)
        return say(why, "bus is \"%s\", must look like 0000:17:00.0", value), false;
    card->pci_domain = domain;
    card->pci_bus = bus;
    card->pci_device = device;
    return true;
}

/* One key=value of a card line; count= is read by the caller. */
static bool set_option(struct fake_card *card, const char *key, const char *value, struct text *why)
{
    uint64_t number;
    if (strcmp(key, "uuid") == 0)
        return set_uuid(card, value, why);
    if (strcmp(key, "bus") == 0)
        return set_bus(card, value, why);
    if (strcmp(key, "serial") == 0)
        return snprintf(card->serial, sizeof card->serial, "%s", value) > 0;
    if (strcmp(key, "memory_mib") == 0) {
        if (!set_mib(key, value, 1, 1u << 24, &card->total_bytes, why))
            return false;
        card->reserved_bytes = 0; /* a size given is a size to have: tests count on it */
        return true;
    }
    if (strcmp(key, "context_mib") == 0)
        return set_mib(key, value, 0, 1u << 16, &card->context_bytes, why);
    if (strcmp(key, "numa") == 0) {
        if (!parse_number(key, value, 0, 255, &number, why))
            return false;
        card->numa = (int32_t)number;
        return true;
    }
    if (strcmp(key, "minor") == 0) {
        if (!parse_number(key, value, 0, 254, &number, why))
            return false;
        card->minor = (uint32_t)number;
        return true;
    }
    say(why, "card: the option is \"%s\", must be one of uuid, bus, serial, memory_mib, context_mib, numa, minor, count", key);
    return false;
}

static bool add_card(struct daemon *daemon, char **word, unsigned words, struct text *why)
{
    struct fake_page *page = daemon->page;
    if (page->cards == FAKE_CARDS)
        return say(why, "card: more than %u cards", FAKE_CARDS), false;
    struct fake_card *card = &page->card[page->cards];
    if (words < 2)
        return say(why, "card: no model given"), false;
    if (!card_init(card, word[1], page->cards, daemon->seed, why))
        return false;
    for (unsigned i = 2; i < words; i++) {
        char pair[128];
        snprintf(pair, sizeof pair, "%s", word[i]);
        char *equals = strchr(pair, '=');
        if (equals == NULL)
            return say(why, "card: \"%s\" is not option=value", pair), false;
        *equals = '\0';
        if (strcmp(pair, "count") != 0 && !set_option(card, pair, equals + 1, why))
            return false;
    }
    card_unit_init(daemon, page->cards);
    page->cards++;
    return true;
}

static bool add_cards(struct daemon *daemon, char **word, unsigned words, struct text *why)
{
    uint64_t count = 1;
    for (unsigned i = 2; i < words; i++)
        if (strncmp(word[i], "count=", 6) == 0 && !parse_number("count", word[i] + 6, 1, FAKE_CARDS, &count, why))
            return false;
    while (count-- > 0)
        if (!add_card(daemon, word, words, why))
            return false;
    return true;
}

static bool wire(struct fake_page *page, uint32_t a, int32_t b, uint64_t lanes, struct text *why)
{
    uint64_t left = lanes;
    for (unsigned i = 0; i < page->card[a].links_wired && left > 0; i++)
        if (page->card[a].link_peer[i] == -1) {
            page->card[a].link_peer[i] = b;
            left--;
        }
    if (left > 0)
        say(why, "link: card %u (%s) has %u NVLinks, %llu more are asked for", a, page->card[a].model, page->card[a].links_wired,
            (unsigned long long)left);
    return left == 0;
}

static bool add_link(struct daemon *daemon, char **word, unsigned words, struct text *why)
{
    uint32_t a, b;
    uint64_t lanes;
    if (words != 4)
        return say(why, "link: must be \"link CARD CARD LANES\" or \"link CARD switch LANES\""), false;
    if (!parse_card(daemon, word[1], &a, why) || !parse_number("lanes", word[3], 1, FAKE_LINKS, &lanes, why))
        return false;
    if (strcmp(word[2], "switch") == 0)
        return wire(daemon->page, a, -2, lanes, why);
    if (!parse_card(daemon, word[2], &b, why))
        return false;
    if (a == b)
        return say(why, "link: card %u cannot be linked to itself", a), false;
    return wire(daemon->page, a, (int32_t)b, lanes, why) && wire(daemon->page, b, (int32_t)a, lanes, why);
}

static bool add_switch(struct daemon *daemon, char **word, unsigned words, struct text *why)
{
    uint64_t lanes;
    if (words != 3 || strcmp(word[1], "all") != 0)
        return say(why, "links: must be \"links all LANES\""), false;
    if (!parse_number("lanes", word[2], 1, FAKE_LINKS, &lanes, why))
        return false;
    for (uint32_t card = 0; card < daemon->page->cards; card++)
        if (!wire(daemon->page, card, -2, lanes, why))
            return false;
    return true;
}

static bool add_mig(struct daemon *daemon, char **word, unsigned words, struct text *why)
{
    uint32_t card;
    if (words < 2)
        return say(why, "mig: must be \"mig CARD [PROFILE...]\""), false;
    if (!parse_card(daemon, word[1], &card, why) || !mig_set_mode(daemon, card, true, why))
        return false;
    for (unsigned i = 2; i < words; i++)
        if (!mig_create(daemon, card, word[i], why))
            return false;
    return true;
}

static bool add_process(struct daemon *daemon, char **word, unsigned words, struct text *why)
{
    uint32_t unit;
    uint64_t pid, mib;
    if (words != 5)
        return say(why, "process: must be \"process CARD[:GI] PID MIB NAME\""), false;
    return parse_unit(daemon, word[1], &unit, why) && parse_number("pid", word[2], 1, 4194304, &pid, why) &&
           parse_number("mib", word[3], 0, 1u << 24, &mib, why) &&
           foreign_add(daemon, unit, (int32_t)pid, mib * FAKE_MIB, word[4], why);
}

bool set_word(struct daemon *daemon, char **word, unsigned words, struct text *why)
{
    uint64_t number;
    if (words != 2)
        return say(why, "%s: must have one value", word[0]), false;
    if (strcmp(word[0], "driver") == 0)
        return branch_set(daemon->page, word[1]), true;
    if (strcmp(word[0], "seed") == 0) {
        if (daemon->page->cards > 0)
            return say(why, "seed: must stand before the first card, whose UUID it makes"), false;
        return snprintf(daemon->seed, sizeof daemon->seed, "%s", word[1]) > 0;
    }
    if (strcmp(word[0], "cuda") == 0) {
        if (!parse_number("cuda", word[1], 11000, 13999, &number, why))
            return false;
        daemon->page->cuda_version = (uint32_t)number;
        return true;
    }
    if (!parse_number("kernel_us", word[1], 0, 60000000, &number, why))
        return false;
    daemon->page->kernel_ns = number * 1000;
    return true;
}

bool add_fault(struct daemon *daemon, char **word, unsigned words, struct text *why)
{
    struct fake_page *page = daemon->page;
    const uint32_t count = atomic_load(&page->faults);
    char line[256] = "";
    for (unsigned i = 1; i < words; i++)
        snprintf(line + strlen(line), sizeof line - strlen(line), "%s ", word[i]);
    if (strcmp(line, "none ") == 0) {
        atomic_store(&page->faults, 0);
        return true;
    }
    if (count == FAKE_FAULTS)
        return say(why, "fault: more than %u faults", FAKE_FAULTS), false;
    char sentence[512];
    if (!fault_parse(line, &page->fault[count], sentence, sizeof sentence))
        return say(why, "%s", sentence), false;
    atomic_store(&page->faults, count + 1);
    return true;
}

static bool read_line(struct daemon *daemon, char *line, struct text *why)
{
    static const struct {
        const char *name;
        bool (*read)(struct daemon *, char **, unsigned, struct text *);
    } keys[] = {{"card", add_cards}, {"link", add_link}, {"links", add_switch}, {"mig", add_mig}, {"process", add_process}, {"fault", add_fault},
                {"driver", set_word}, {"cuda", set_word}, {"kernel_us", set_word}, {"seed", set_word}};
    char *word[WORDS], *rest = NULL;
    unsigned words = 0;
    line[strcspn(line, "#\r\n")] = '\0';
    for (char *w = strtok_r(line, " \t", &rest); w != NULL; w = strtok_r(NULL, " \t", &rest)) {
        if (words == WORDS)
            return say(why, "more than %u words", WORDS), false;
        word[words++] = w;
    }
    if (words == 0)
        return true;
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (strcmp(word[0], keys[i].name) == 0)
            return keys[i].read(daemon, word, words, why);
    say(why, "the first word is \"%s\", must be one of card, link, links, mig, process, fault, driver, cuda, kernel_us, seed", word[0]);
    return false;
}

bool config_read(struct daemon *daemon, const char *path, struct text *why)
{
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return say(why, "%s: %s", path, strerror(errno)), false;
    char line[1024];
    bool good = true;
    for (unsigned number = 1; good && fgets(line, sizeof line, file) != NULL; number++) {
        char sentence[512] = "";
        struct text about = {.at = sentence, .room = sizeof sentence};
        good = read_line(daemon, line, &about);
        if (!good)
            say(why, "%s:%u: %s", path, number, sentence);
    }
    fclose(file);
    if (good && daemon->page->cards == 0)
        return say(why, "%s: describes no card", path), false;
    return good;
}
