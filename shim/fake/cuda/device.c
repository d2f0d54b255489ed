/* device.c - cuInit, and what a device is.
 *
 * A process sees the cards whose device nodes it has, cut and ordered by CUDA_VISIBLE_DEVICES (indices, or UUIDs by any
 * unambiguous beginning). A card in MIG mode is no device; its instance is, when named by UUID, or when it is the first
 * one and there is no whole card.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct cuda cuda = {.lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP, .primaries = PTHREAD_MUTEX_INITIALIZER, .client = {.socket = -1}, .arena_fd = -1};

static void forked(void)
{
    if (cuda.client.socket >= 0)
        close(cuda.client.socket); /* else the daemon would not see the parent end */
    cuda.client.socket = -1;
    if (atomic_load(&cuda.state) == STATE_READY)
        atomic_store(&cuda.state, STATE_FORKED); /* as the real driver: CUDA does not survive fork */
}

static unsigned whole_cards(uint32_t *units)
{
    unsigned count = 0;
    for (uint32_t card = 0; card < cuda.client.page->cards; card++)
        if (!cuda.client.page->card[card].mig_on && client_sees_card(&cuda.client, card))
            units[count++] = card;
    return count;
}

static int instance_named(const char *name, size_t length)
{
    for (uint32_t unit = FAKE_CARDS; unit < FAKE_UNITS; unit++)
        if (client_sees_instance(&cuda.client, unit) &&
            (length == 0 || strncmp(cuda.client.page->unit[unit].uuid, name, length) == 0))
            return (int)unit;
    return -1;
}

/* The unit that one word of CUDA_VISIBLE_DEVICES names, or -1. */
static int unit_named(const char *name, size_t length, const uint32_t *cards, unsigned count)
{
    char *end = NULL;
    if (length > 4 && strncmp(name, "MIG-", 4) == 0)
        return instance_named(name, length);
    if (length > 4 && strncmp(name, "GPU-", 4) == 0) {
        for (unsigned i = 0; i < count; i++)
            if (strncmp(cuda.client.page->card[cards[i]].uuid, name, length) == 0)
                return (int)cards[i];
        return -1;
    }
    const unsigned long index = strtoul(name, &end, 10);
    return end == name + length && length > 0 && index < count ? (int)cards[index] : -1;
}

static void add_device(uint32_t unit)
{
    if (cuda.devices < (int)MOST_DEVICES)
        cuda.device[cuda.devices++] = (struct device){.unit = unit, .card = cuda.client.page->unit[unit].card};
}

static void find_devices(void)
{
    uint32_t cards[FAKE_CARDS];
    const unsigned count = whole_cards(cards);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible != NULL) {
        for (const char *at = visible; *at != '\0'; at += *at == ',') {
            const size_t length = strcspn(at, ",");
            const int unit = unit_named(at, length, cards, count);
            if (unit < 0)
                break; /* the first that names nothing ends the list */
            add_device((uint32_t)unit);
            at += length;
        }
        return;
    }
    for (unsigned i = 0; i < count; i++)
        add_device(cards[i]);
    const int instance = count == 0 ? instance_named("", 0) : -1;
    if (instance >= 0)
        add_device((uint32_t)instance);
}

void take_a_while(void)
{
    const char *ms = getenv("TANGRAM_FAKE_START_MS");
    const long each = ms == NULL ? 0 : strtol(ms, NULL, 10);
    const struct timespec while_ = {each / 1000, each % 1000 * 1000000};
    if (each > 0)
        nanosleep(&while_, NULL);
}

/* A handler that was registered before cuInit runs after this one. */
static void program_ends(void)
{
    atomic_store(&cuda.state, STATE_ENDED);
}

EXPORT CUresult cuInit(unsigned flags)
{
    static bool watched;
    CHECK(flags == 0, CUDA_ERROR_INVALID_VALUE);
    CHECK(atomic_load(&cuda.state) != STATE_FORKED, CUDA_ERROR_NOT_INITIALIZED);
    SCOPED tables = hold(&cuda.lock);
    if (atomic_load(&cuda.state) != STATE_NEW)
        return CUDA_SUCCESS;
    if (!watched)
        watched = pthread_atfork(NULL, NULL, forked) == 0 && atexit(program_ends) == 0;
    CHECK(client_open(&cuda.client, FAKE_CUDA) == 0, CUDA_ERROR_NO_DEVICE);
    find_devices();
    take_a_while();
    if (cuda.devices == 0) {
        client_close(&cuda.client);
        return CUDA_ERROR_NO_DEVICE;
    }
    atomic_store(&cuda.state, STATE_READY);
    return CUDA_SUCCESS;
}

CUresult device_ok(CUdevice device)
{
    TRY(ready());
    return device >= 0 && device < cuda.devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
