/* addresses.c - calls that name addresses of memory and are no work: addresses.def has the list. Without memory that is swapped each costs one load. */
#include "hooks/hook.h"
#include "gputime/launching.h"
#include "memory/memory.h"

#define AWAITS(name, base, since, ptds, params, ...)                                                                           \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        await_memory();                                                                                                        \
        return tangram.driver.name(__VA_ARGS__);                                                                               \
    }
#include "gputime/addresses.def"
