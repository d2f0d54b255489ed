/* host.c - pinned memory of the host that is freed. It is no memory of the GPU, so nothing is charged or returned.
 *
 * The driver waits for the work of the context, and for suspended channels with it (cuMemFreeHost: measured, H200, bench/memory_swap/mechanism; the other:
 * guessed). Whether it waits where there is no work, too, was not measured. So a call that is still inside while the channels are suspended counts as work
 * (activity_is_inside): else nothing would resume them. One that returns at once brings nothing back.
 */
#include "hooks/hook.h"
#include "gputime/launching.h"
#include "memory/memory.h"

#define FREES(name)                                                                                                            \
    EXPORT CUresult name(void *at)                                                                                             \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        const struct activity_call call = activity_call_begins();                                                              \
        const CUresult rc = tangram.driver.name(at);                                                                           \
        activity_call_ends(call);                                                                                              \
        return rc;                                                                                                             \
    }

FREES(cuMemFreeHost)
FREES(cuMemHostUnregister)
