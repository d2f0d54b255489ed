/* info.c - how much memory there is, as the container may have it.
 *
 * Total is the container's limit. Free is what this process holds unused and what no process of the container holds, and
 * never more than the card itself has free. What a sibling holds unused is left out: it comes when it is asked for.
 */
#include "hook.h"
#include "memory.h"

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    NEEDS(cuMemGetInfo_v2);
    CUresult rc = tangram.driver.cuMemGetInfo_v2(free_bytes, total_bytes);
    struct card *card = rc == CUDA_SUCCESS ? current_card() : NULL;
    if (card == NULL)
        return rc;
    uint64_t ours = lease_free_bytes(card);
    if (*free_bytes > ours)
        *free_bytes = ours;
    *total_bytes = atomic_load_explicit(&card->limit_bytes, memory_order_relaxed);
    return rc;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    NEEDS(cuDeviceTotalMem_v2);
    CUresult rc = tangram.driver.cuDeviceTotalMem_v2(bytes, device);
    struct card *card = rc == CUDA_SUCCESS ? card_of_device(device) : NULL;
    if (card != NULL)
        *bytes = atomic_load_explicit(&card->limit_bytes, memory_order_relaxed);
    return rc;
}
