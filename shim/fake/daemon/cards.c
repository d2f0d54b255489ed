/* cards.c - the card models.
 *
 * Names, memory, PCI IDs and SM counts are those that nvidia-smi prints on the card; MIG profiles are NVIDIA's documented
 * ones (MIG user guide, "Supported MIG profiles"). reserved_mib and context_mib are guessed, but for h200, where both were
 * measured: NVML's total less cuDeviceTotalMem, and what one primary context takes. So were h200's MIG profiles.
 */
#define _GNU_SOURCE
#include "daemon.h"

#include <stdio.h>
#include <string.h>

struct model {
    const char *name, *full_name;
    uint32_t pci_id, subsystem, cc_major, cc_minor, architecture, brand;
    uint32_t sms, clock_mhz, memory_clock_mhz, bus_bits, power_watts, l2_mib, links;
    uint32_t total_mib, reserved_mib, context_mib;
    const struct fake_profile *profiles;
};

/* id and nvml are the same on all cards: NVML's NVML_GPU_INSTANCE_PROFILE_{1,2,3,4,7}_SLICE, 1_SLICE_REV1 (+me), _REV2. */
#define PROFILE(n, i, v, c, m, most_, s, ce, dec, jpg, ofa, mib) \
    {.name = n, .id = i, .nvml = v, .compute = c, .memory = m, .most = most_, .last_start = c == 7 || c == 4 ? 0 : c == 1 ? 6 : 4, .sms = s, .copy_engines = ce, .decoders = dec, .jpegs = jpg, \
     .ofas = ofa, .bytes = mib * FAKE_MIB}

static const struct fake_profile a100_40[FAKE_PROFILES] = {
    PROFILE("1g.5gb", 19, 0, 1, 1, 7, 14, 1, 0, 0, 0, 4864),
    PROFILE("1g.5gb.me", 20, 7, 1, 1, 1, 14, 1, 1, 1, 1, 4864),
    PROFILE("1g.10gb", 15, 9, 1, 2, 4, 14, 1, 0, 0, 0, 9984),
    PROFILE("2g.10gb", 14, 1, 2, 2, 3, 28, 2, 1, 0, 0, 9984),
    PROFILE("3g.20gb", 9, 2, 3, 4, 2, 42, 3, 2, 0, 0, 20096),
    PROFILE("4g.20gb", 5, 3, 4, 4, 1, 56, 4, 2, 0, 0, 20096),
    PROFILE("7g.40gb", 0, 4, 7, 8, 1, 98, 7, 5, 1, 1, 40192),
};
static const struct fake_profile a100_80[FAKE_PROFILES] = {
    PROFILE("1g.10gb", 19, 0, 1, 1, 7, 14, 1, 0, 0, 0, 9728),
    PROFILE("1g.10gb.me", 20, 7, 1, 1, 1, 14, 1, 1, 1, 1, 9728),
    PROFILE("1g.20gb", 15, 9, 1, 2, 4, 14, 1, 0, 0, 0, 19968),
    PROFILE("2g.20gb", 14, 1, 2, 2, 3, 28, 2, 1, 0, 0, 19968),
    PROFILE("3g.40gb", 9, 2, 3, 4, 2, 42, 3, 2, 0, 0, 40192),
    PROFILE("4g.40gb", 5, 3, 4, 4, 1, 56, 4, 2, 0, 0, 40192),
    PROFILE("7g.80gb", 0, 4, 7, 8, 1, 98, 7, 5, 1, 1, 80640),
};
static const struct fake_profile h100[FAKE_PROFILES] = {
    PROFILE("1g.10gb", 19, 0, 1, 1, 7, 16, 1, 1, 1, 0, 9984),
    PROFILE("1g.10gb.me", 20, 7, 1, 1, 1, 16, 1, 1, 1, 1, 9984),
    PROFILE("1g.20gb", 15, 9, 1, 2, 4, 26, 1, 1, 1, 0, 20096),
    PROFILE("2g.20gb", 14, 1, 2, 2, 3, 32, 2, 2, 2, 0, 20096),
    PROFILE("3g.40gb", 9, 2, 3, 4, 2, 60, 3, 3, 3, 0, 40448),
    PROFILE("4g.40gb", 5, 3, 4, 4, 1, 64, 4, 4, 4, 0, 40448),
    PROFILE("7g.80gb", 0, 4, 7, 8, 1, 132, 8, 7, 7, 1, 81152),
};
static const struct fake_profile h200[FAKE_PROFILES] = {
    PROFILE("1g.18gb", 19, 0, 1, 1, 7, 16, 1, 1, 1, 0, 16384),
    PROFILE("1g.18gb.me", 20, 7, 1, 1, 1, 16, 1, 1, 1, 1, 16384),
    PROFILE("1g.35gb", 15, 9, 1, 2, 4, 26, 1, 1, 1, 0, 33280),
    PROFILE("2g.35gb", 14, 1, 2, 2, 3, 32, 2, 2, 2, 0, 33280),
    PROFILE("3g.71gb", 9, 2, 3, 4, 2, 60, 3, 3, 3, 0, 71424),
    PROFILE("4g.71gb", 5, 3, 4, 4, 1, 64, 4, 4, 4, 0, 71424),
    PROFILE("7g.141gb", 0, 4, 7, 8, 1, 132, 8, 7, 7, 1, 143360),
};

static const struct model models[] = {
    /* name      full name                 pci id      subsystem   cc   arch br  sms  MHz   mem   bits  W    L2 links total reserved context */
    {"t4", "Tesla T4", 0x1eb810de, 0x12a210de, 7, 5, 6, 2, 40, 1590, 5001, 256, 70, 4, 0, 15360, 449, 160, NULL},
    {"a10", "NVIDIA A10", 0x223610de, 0x148210de, 8, 6, 7, 14, 72, 1695, 6251, 384, 150, 6, 0, 23028, 511, 260, NULL},
    {"a100-40", "NVIDIA A100-SXM4-40GB", 0x20b010de, 0x134f10de, 8, 0, 7, 14, 108, 1410, 1215, 5120, 400, 40, 12, 40960, 554, 420, a100_40},
    {"a100-80", "NVIDIA A100-SXM4-80GB", 0x20b210de, 0x146310de, 8, 0, 7, 14, 108, 1410, 1593, 5120, 400, 40, 12, 81920, 681, 420, a100_80},
    {"h100", "NVIDIA H100 80GB HBM3", 0x233010de, 0x16c110de, 9, 0, 9, 14, 132, 1980, 2619, 5120, 700, 50, 18, 81559, 445, 512, h100},
    {"h200", "NVIDIA H200", 0x233510de, 0x18bf10de, 9, 0, 9, 14, 132, 1980, 3201, 6144, 700, 60, 18, 143771, 615, 528, h200},
    {"l40s", "NVIDIA L40S", 0x26b910de, 0x185110de, 8, 9, 8, 14, 142, 2520, 9001, 384, 350, 96, 0, 46068, 585, 380, NULL},
};
#define MODELS (sizeof models / sizeof models[0])

void card_models(struct text *to)
{
    for (size_t i = 0; i < MODELS; i++)
        say(to, "%s%s", i == 0 ? "" : ", ", models[i].name);
}

static uint64_t mix(uint64_t x) /* splitmix64 */
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
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
    const uint8_t *u = bytes;
    snprintf(text, 48, "%s%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", prefix, u[0], u[1], u[2], u[3], u[4],
             u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

bool parse_uuid(const char *prefix, const char *text, uint8_t bytes[16])
{
    static const char shape[] = "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
    const size_t skip = strlen(prefix);
    if (strncmp(text, prefix, skip) != 0 || strlen(text + skip) != sizeof shape - 1)
        return false;
    unsigned at = 0;
    for (const char *c = text + skip, *s = shape; *c != '\0'; c++, s++) {
        if (*s == '-' ? *c != '-' : strchr("0123456789abcdef", *c) == NULL)
            return false;
        if (*s == '-')
            continue;
        const uint8_t digit = (uint8_t)(*c <= '9' ? *c - '0' : *c - 'a' + 10);
        bytes[at / 2] = (uint8_t)(at % 2 == 0 ? digit << 4 : bytes[at / 2] | digit);
        at++;
    }
    return true;
}

bool card_init(struct fake_card *card, const char *model, uint32_t index, const char *seed, struct text *why)
{
    const struct model *is = NULL;
    for (size_t i = 0; i < MODELS && is == NULL; i++)
        is = strcmp(models[i].name, model) == 0 ? &models[i] : NULL;
    if (is == NULL) {
        say(why, "card: the model is \"%s\", must be one of ", model);
        card_models(why);
        return false;
    }
    *card = (struct fake_card){
        .minor = index, .pci_bus = 0x17 + 0x12 * index, .pci_id = is->pci_id, .pci_subsystem = is->subsystem,
        .cc_major = is->cc_major, .cc_minor = is->cc_minor, .architecture = is->architecture, .brand = is->brand, .sms = is->sms,
        .clock_mhz = is->clock_mhz, .memory_clock_mhz = is->memory_clock_mhz, .bus_bits = is->bus_bits,
        .power_watts = is->power_watts, .l2_mib = is->l2_mib, .links_wired = is->links, .numa = (int32_t)(index / 4),
        .total_bytes = is->total_mib * FAKE_MIB, .reserved_bytes = is->reserved_mib * FAKE_MIB,
        .context_bytes = is->context_mib * FAKE_MIB, .mig_capable = is->profiles != NULL};
    snprintf(card->model, sizeof card->model, "%s", is->name);
    snprintf(card->name, sizeof card->name, "%s", is->full_name);
    snprintf(card->serial, sizeof card->serial, "16500%08u", index);
    make_uuid("GPU-", seed, 1, index, card->uuid, card->uuid_bytes);
    for (unsigned i = 0; i < FAKE_LINKS; i++)
        card->link_peer[i] = -1;
    for (uint32_t i = 0; is->profiles != NULL && i < FAKE_PROFILES && is->profiles[i].name[0] != '\0'; i++)
        card->profile[card->profiles++] = is->profiles[i];
    return true;
}

void card_unit_init(struct daemon *daemon, uint32_t card)
{
    const struct fake_card *of = &daemon->page->card[card];
    struct fake_unit *unit = &daemon->page->unit[card];
    unit->live = !of->mig_on;
    unit->card = card;
    unit->limit_bytes = of->total_bytes - of->reserved_bytes;
    memcpy(unit->uuid, of->uuid, sizeof unit->uuid);
    memcpy(unit->uuid_bytes, of->uuid_bytes, sizeof unit->uuid_bytes);
}
