/* card.c - which card of the grant a call means.
 *
 * Device numbers are the process's own (CUDA_VISIBLE_DEVICES may choose and reorder), so a device is known by its UUID and by
 * nothing else. The answer is kept per device number: a process cannot renumber its devices once the driver is initialised.
 */
#include "process.h"

#include <string.h>

struct card *card_of_uuid(const uint8_t uuid[16])
{
    enum grant_state state = grant_ready();
    if (state == GRANT_BAD)
        return &tangram.grant.closed;
    for (unsigned i = 0; state == GRANT_GOOD && i < tangram.grant.cards; i++)
        if (memcmp(tangram.grant.card[i].uuid, uuid, 16) == 0)
            return &tangram.grant.card[i];
    return NULL;
}

struct card *card_of_device(CUdevice device)
{
    bool kept = device >= 0 && device < DEVICES_LIMIT;
    if (kept) {
        struct card *known = atomic_load_explicit(&tangram.device_card[device], memory_order_acquire);
        if (known != NULL)
            return known == &tangram.unshared ? NULL : known;
    }
    enum grant_state state = grant_ready();
    if (state == GRANT_NONE)
        return NULL;
    CUuuid uuid;
    if (tangram.driver.cuDeviceGetUuid == NULL || tangram.driver.cuDeviceGetUuid(&uuid, device) != CUDA_SUCCESS)
        return state == GRANT_BAD ? &tangram.grant.closed : NULL;
    struct card *card = card_of_uuid((const uint8_t *)uuid.bytes);
    if (kept)
        atomic_store_explicit(&tangram.device_card[device], card ? card : &tangram.unshared, memory_order_release);
    return card;
}

struct card *current_card(void)
{
    CUdevice device;
    if (grant_ready() == GRANT_NONE || tangram.driver.cuCtxGetDevice == NULL)
        return NULL;
    if (tangram.driver.cuCtxGetDevice(&device) != CUDA_SUCCESS)
        return NULL; /* no context: the driver's own error is the answer */
    return card_of_device(device);
}
