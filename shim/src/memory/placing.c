/* placing.c - memory without an address from which its page follows: arrays, and the variables of modules.
 *
 * From a page on it has pages of its own. Smaller things of one context share pages, and which, is worked out by the driver's own rule
 * (pages.c).
 */
#include "memory/memory.h"

/* A page is opened only after it is charged: another thread may use it at once. */
static bool begin_shared(struct placing *placing, const void *group, uint64_t bytes)
{
    bool paid = lease_take(placing->gpu, PAGE);
    enum page_place place = pages_place(placing->pages, group, bytes, paid, &placing->bytes);
    if (place == PLACE_NONE) {
        paid = reserve(placing->gpu, PAGE);
        place = pages_place(placing->pages, group, bytes, paid, &placing->bytes);
    }
    if (place != PLACE_FRESH && paid)
        lease_give_back(placing->gpu, PAGE);
    placing->bytes |= PLACED;
    return place != PLACE_NONE;
}

bool placing_begin(struct placing *placing, struct pages *pages, struct gpu *gpu, CUcontext context, uint64_t bytes)
{
    *placing = (struct placing){.gpu = gpu, .pages = pages, .context = context, .bytes = pages_rounded(bytes > 0 ? bytes : 1)};
    if (placing->bytes == UINT64_MAX)
        return false;
    return placing->bytes >= PAGE ? reserve(gpu, placing->bytes) : begin_shared(placing, context, placing->bytes);
}

static void cancel(const struct placing *placing)
{
    uint64_t back = placing->bytes;
    if ((back & PLACED) != 0)
        back = pages_end(placing->pages, back & ~PLACED) == PAGE_EMPTY ? PAGE : 0;
    lease_give_back(placing->gpu, back);
}

bool placing_end(const struct placing *placing, CUresult rc, uint64_t key)
{
    if (placing->gpu == NULL)
        return true;
    bool owned = rc == CUDA_SUCCESS && table_own((struct owned){key, placing->bytes, placing->gpu, placing->context});
    if (!owned)
        cancel(placing);
    return owned || rc != CUDA_SUCCESS;
}
