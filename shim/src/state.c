/* state.c - what this process cannot enforce, and why. */
#include "process.h"

void state_set(enum wire_reason reason, bool active)
{
    const uint32_t bit = UINT32_C(1) << reason;
    if (active)
        atomic_fetch_or(&tangram.states, bit);
    else
        atomic_fetch_and(&tangram.states, ~bit);
}
