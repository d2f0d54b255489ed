/* device.c - cuInit, and what a device is.
 *
 * A process sees the GPUs whose device nodes it has, cut and ordered by CUDA_VISIBLE_DEVICES (indices, or UUIDs by any
 * unambiguous beginning). A GPU in MIG mode is no device; its instance is, when named by UUID, or when it is the first
 * one and there is no whole GPU.
 */
#define _GNU_SOURCE
#include "internal.h"
#include "calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct cuda cuda = {.lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP, .primaries = PTHREAD_MUTEX_INITIALIZER,
                    .step = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP, .client = {.socket = -1}};

static void forked(void)
{
    if (cuda.client.socket >= 0)
        close(cuda.client.socket); /* else the daemon would not see the parent end */
    cuda.client.socket = -1;
    static const pthread_mutex_t free_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    cuda.lock = cuda.step = free_lock; /* the thread that had one of them is not here */
    if (atomic_load(&cuda.state) == STATE_READY)
        atomic_store(&cuda.state, STATE_FORKED); /* as the real driver: CUDA does not survive fork */
}

/* A whole GPU, or an instance, that this process sees. */
static bool is_visible(uint32_t unit)
{
    const struct client *client = &cuda.client;
    if (unit >= FAKE_GPUS)
        return client_sees_instance(client, unit);
    return unit < client->page->gpus && !client->page->gpu[unit].mig_on && client_sees_gpu(client, unit);
}

static void add_device(uint32_t unit)
{
    if (cuda.devices < (int)MOST_DEVICES)
        cuda.device[cuda.devices++] = (struct device){.unit = unit, .gpu = cuda.client.page->unit[unit].gpu};
}

/* Adds what one word of CUDA_VISIBLE_DEVICES names. */
static bool add_named(const char *name, size_t length)
{
    char *end = NULL;
    unsigned long index = strtoul(name, &end, 10);
    const bool number = length > 0 && end == name + length, uuid = length > 4;
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++)
        if (is_visible(unit) && (number ? unit < FAKE_GPUS && index-- == 0 : uuid && strncmp(cuda.client.page->unit[unit].uuid, name, length) == 0)) {
            add_device(unit);
            return true;
        }
    return false;
}

static void find_devices(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    for (uint32_t unit = 0; visible == NULL && unit < FAKE_UNITS; unit++)
        if (is_visible(unit) && (unit < FAKE_GPUS || cuda.devices == 0))
            add_device(unit);
    for (size_t length; visible != NULL && *visible != '\0'; visible += visible[length] == ',' ? length + 1 : length) {
        length = strcspn(visible, ",");
        if (!add_named(visible, length))
            break; /* the first that names nothing ends the list */
    }
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
    SCOPED tables = locked(&cuda.lock);
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

static CUresult text_of(CUresult error, bool name, const char **answer)
{
    switch ((int)error) {
#define ERROR(value, sentence) case value: *answer = name ? #value : sentence; return CUDA_SUCCESS;
#include "errors.def"
    default: *answer = NULL; return CUDA_ERROR_INVALID_VALUE;
    }
}

static int device_attribute(CUdevice_attribute attribute, CUdevice device)
{
    const struct fake_gpu *gpu = gpu_of(device);
    switch ((int)attribute) {
#define ATTRIBUTE(name, value) case CU_DEVICE_ATTRIBUTE_##name: return (int)(value);
#include "device_attributes.def"
    default: return 0;
    }
}

static CUuuid uuid_of(const void *bytes)
{
    CUuuid uuid;
    memcpy(uuid.bytes, bytes, sizeof uuid.bytes);
    return uuid;
}

#include "device.def"
