/* nvml.c - the management library's answer to "how much memory", as the container may have it.
 *
 * Works in a process that never starts CUDA (nvidia-smi, a metrics agent). Used is what the container's processes hold on
 * lease; what the card has free bounds what is shown as free.
 */
#include "hook.h"
#include "process.h"

#include <string.h>

static struct card *card_of_handle(nvmlDevice_t device)
{
    char text[96]; /* specified: NVML_DEVICE_UUID_V2_BUFFER_SIZE */
    uint8_t uuid[16];
    if (grant_ready() == GRANT_NONE || tangram.management.nvmlDeviceGetUUID == NULL)
        return NULL;
    if (tangram.management.nvmlDeviceGetUUID(device, text, sizeof text) != NVML_SUCCESS)
        return NULL;
    return uuid_parse(text, strnlen(text, sizeof text), uuid) ? card_of_uuid(uuid) : NULL;
}

static void view(struct card *card, unsigned long long *total, unsigned long long *free_now, unsigned long long *used)
{
    uint64_t limit = atomic_load(&card->limit_bytes);
    uint64_t ours = lease_free_bytes(card);
    if (*free_now > ours)
        *free_now = ours;
    if (*free_now > limit)
        *free_now = limit;
    *total = limit;
    *used = limit - *free_now;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    if (!management_ready())
        return NVML_ERROR_LIBRARY_NOT_FOUND;
    if (tangram.management.nvmlDeviceGetMemoryInfo == NULL)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    nvmlReturn_t rc = tangram.management.nvmlDeviceGetMemoryInfo(device, memory);
    struct card *card = rc == NVML_SUCCESS ? card_of_handle(device) : NULL;
    if (card != NULL)
        view(card, &memory->total, &memory->free, &memory->used);
    return rc;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    if (!management_ready())
        return NVML_ERROR_LIBRARY_NOT_FOUND;
    if (tangram.management.nvmlDeviceGetMemoryInfo_v2 == NULL)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    nvmlReturn_t rc = tangram.management.nvmlDeviceGetMemoryInfo_v2(device, memory);
    struct card *card = rc == NVML_SUCCESS ? card_of_handle(device) : NULL;
    if (card != NULL) {
        view(card, &memory->total, &memory->free, &memory->used);
        memory->reserved = 0; /* the card's own reserve is outside the container's limit */
    }
    return rc;
}
