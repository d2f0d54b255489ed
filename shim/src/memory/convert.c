/* convert.c - an elastic lease becomes resident, for memory that is not swapped any more. */
#include "memory/memory.h"
#include "memory/pool.h"

/* The lease of resident memory may have room for it only when others have returned what they do not use. */
static enum link_answer convert(struct gpu *gpu, uint64_t bytes)
{
    const enum link_answer answer = passing_convert(gpu, bytes);
    if (answer != LINK_REFUSED)
        return answer;
    pools_reclaim(gpu);
    bound_settle(gpu);
    link_return_all(gpu);
    return passing_convert(gpu, bytes);
}

static enum link_answer convert_or_lease(struct gpu *gpu, uint64_t bytes)
{
    const enum link_answer answer = passing_is_understood() ? convert(gpu, bytes) : LINK_REFUSED;
    if (answer != LINK_REFUSED || !lease_reserve_as(gpu, WIRE_RESIDENT, bytes))
        return answer;
    lease_give_back_as(gpu, WIRE_ELASTIC, bytes);
    return LINK_GRANTED;
}

/* An arbiter that was restarted counts what is being discarded as resident: SWAPPABLE does not state it. One without CONVERT has both leases for a moment. */
bool lease_convert(struct gpu *gpu, uint64_t bytes)
{
    enum link_answer answer = convert_or_lease(gpu, bytes);
    if (answer == LINK_REFUSED && discard_wait(gpu))
        answer = convert_or_lease(gpu, bytes);
    return answer == LINK_GRANTED;
}
