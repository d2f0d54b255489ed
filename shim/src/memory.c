/* memory.c - device memory, counted before it is taken.
 *
 * An allocation is three steps, always in this order:
 *     reserve   take the size from the lease, or refuse
 *     call      the driver's own function
 *     settle    give the reservation back if the driver failed, else own the pointer
 * A free is the same backwards; what the driver does not free stays counted. A pointer that we do not own is the driver's
 * business, and so is the error for it.
 */
#include "memory.h"

#include "hook.h"
#include "pool.h"

bool reserve(struct card *card, uint64_t bytes)
{
    return lease_reserve(card, bytes) ||
           (atomic_load(&card->limit_bytes) >= bytes && pools_reclaim(card) && lease_reserve(card, bytes));
}

CUresult settle(CUresult rc, CUdeviceptr at, uint64_t bytes, struct card *card)
{
    if (rc == CUDA_SUCCESS && !table_own((struct owned){.at = at, .bytes = bytes, .card = card})) {
        tangram.driver.cuMemFree_v2(at); /* what we cannot count, we do not hand out */
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (rc != CUDA_SUCCESS)
        lease_give_back(card, bytes);
    return rc;
}

void settle_free(CUresult rc, const struct owned *was)
{
    if (rc != CUDA_SUCCESS)
        table_own(*was);
    else if (was->of != NULL) {
        hold_end(was->at);
        pool_freed(was->of);
    } else
        hold_or_give_back(was);
}

void settle_handle(CUresult rc, const struct owned *was)
{
    if (rc == CUDA_SUCCESS)
        hold_or_give_back(was);
    else
        table_own(*was);
}

/* What cannot be zeroed is not handed out. */
static CUresult cleared(CUresult rc, CUdeviceptr *at, uint64_t bytes)
{
    if (!UNLIKELY(tangram.grant.clear) || rc != CUDA_SUCCESS)
        return rc;
    rc = clear_now(*at, bytes);
    if (rc != CUDA_SUCCESS)
        cuMemFree_v2(*at);
    return rc;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes)
{
    NEEDS(cuMemAlloc_v2);
    struct card *card = current_card();
    if (card == NULL) /* this card is not shared: stay out of the way */
        return tangram.driver.cuMemAlloc_v2(at, bytes);
    if (!reserve(card, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuMemAlloc_v2(at, bytes);
    return cleared(settle(rc, rc == CUDA_SUCCESS ? *at : 0, bytes, card), at, bytes);
}

/* Charged in full where it is made, wherever its pages are: a card that is oversubscribed through managed memory would slow its
 * neighbours down. Its pages come from the driver zeroed. */
EXPORT CUresult cuMemAllocManaged(CUdeviceptr *at, size_t bytes, unsigned int flags)
{
    NEEDS(cuMemAllocManaged);
    struct card *card = current_card();
    if (card == NULL)
        return tangram.driver.cuMemAllocManaged(at, bytes, flags);
    if (!reserve(card, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuMemAllocManaged(at, bytes, flags);
    return settle(rc, rc == CUDA_SUCCESS ? *at : 0, bytes, card);
}

/* The driver chooses the pitch, so the rows' own bytes are reserved first and the padding once it is known. */
EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *at, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    NEEDS(cuMemAllocPitch_v2);
    struct card *card = current_card();
    if (card == NULL)
        return tangram.driver.cuMemAllocPitch_v2(at, pitch, width, height, element);
    uint64_t bytes, padded;
    if (__builtin_mul_overflow(width, height, &bytes) || !reserve(card, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuMemAllocPitch_v2(at, pitch, width, height, element);
    if (rc == CUDA_SUCCESS) {
        if (__builtin_mul_overflow(*pitch, height, &padded) || padded < bytes || !reserve(card, padded - bytes)) {
            tangram.driver.cuMemFree_v2(*at);
            rc = CUDA_ERROR_OUT_OF_MEMORY;
        } else {
            bytes = padded;
        }
    }
    return cleared(settle(rc, rc == CUDA_SUCCESS ? *at : 0, bytes, card), at, bytes);
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr at)
{
    NEEDS(cuMemFree_v2);
    struct owned was;
    if (!table_disown(at, &was))
        return tangram.driver.cuMemFree_v2(at);
    CUresult rc = tangram.driver.cuMemFree_v2(at);
    settle_free(rc, &was);
    return rc;
}
