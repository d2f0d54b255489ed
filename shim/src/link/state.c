/* state.c - what this process cannot enforce, reported to the arbiter when it begins and when it ends.
 *
 * The thread that finds such a state sets a bit, at any place and without a lock. The helper reports it within a second; without a helper
 * the thread that sends the next request does. Each state is a row of docs/reference/enforcement.md.
 */
#include "process.h"

static struct link *const link_ = &tangram.link;

void state_set(enum wire_reason reason, bool active)
{
    uint32_t bit = UINT32_C(1) << reason, was;
    if (active)
        was = atomic_fetch_or(&tangram.states, bit);
    else
        was = atomic_fetch_and(&tangram.states, ~bit);
    if (active != ((was & bit) != 0))
        debug("state %u %s", (unsigned)reason, active ? "begins" : "ends");
}

/* The helper connects to the arbiter by itself. */
void state_announce(void)
{
    struct quiet quiet = quiet_begin();
    if (grant_ready() == GRANT_GOOD) {
        process_check();
        pthread_mutex_lock(&link_->lock);
        link_have_helper();
        pthread_mutex_unlock(&link_->lock);
    }
    quiet_end(quiet);
}

bool state_report(void)
{
    uint32_t now = atomic_load(&tangram.states);
    if ((link_page_word(WIRE_GPU_TIME_AT + offsetof(struct wire_gpu_time, features)) & WIRE_UNDERSTANDS_REPORT) == 0)
        return true; /* an older arbiter would take the packet for garbage */
    for (uint32_t reason = 1; reason < WIRE_REASONS; reason++) {
        uint32_t bit = UINT32_C(1) << reason;
        struct wire_report report = {.reason = reason, .active = (now & bit) != 0};
        if (((now ^ link_->states_reported) & bit) == 0)
            continue;
        if (!link_send(WIRE_REPORT, &report, sizeof report))
            return false;
        link_->states_reported ^= bit;
    }
    return true;
}
