/* copies.c - copies, fills, prefetches, memory operations, and functions of the CPU in a stream's order: copies.def has the list.
 * activity.c reports them.
 *
 * A call without a stream goes into the default one. Some return before the GPU is done (fills, copies inside the GPU or from memory that is
 * not pinned), so the driver is queried afterwards, and the return does not count as the end; that costs a query only while
 * work is reported to the arbiter.
 */
#include "hooks/hook.h"
#include "gputime/launching.h"
#include "memory/memory.h"

#define INTO(name, base, since, ptds, stream, params, ...)                                                                     \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        activity_other(stream, ptds);                                                                                          \
        return tangram.driver.name(__VA_ARGS__);                                                                               \
    }
#define AT_ONCE(name, base, since, ptds, params, ...)                                                                          \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        activity_other(NULL, ptds);                                                                                            \
        CUresult rc = tangram.driver.name(__VA_ARGS__);                                                                        \
        activity_something_synced();                                                                                           \
        return rc;                                                                                                             \
    }
#include "gputime/copies.def"
