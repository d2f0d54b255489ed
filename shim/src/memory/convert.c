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

bool lease_convert(struct gpu *gpu, uint64_t bytes)
{
    const enum link_answer answer = passing_is_understood() ? convert(gpu, bytes) : LINK_REFUSED;
    if (answer == LINK_GRANTED)
        return true;
    if (answer == LINK_ABSENT || !lease_reserve_as(gpu, WIRE_RESIDENT, bytes))
        return false;
    lease_give_back_as(gpu, WIRE_ELASTIC, bytes);
    return true;
}
