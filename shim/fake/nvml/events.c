/* events.c - waiting for XIDs: the daemon rings a futex in the page. */
#include "internal.h"
#include "calls.h"

#include <stdlib.h>

struct nvmlEventSet_st {
    unsigned long long types[FAKE_GPUS];
    uint32_t seen; /* how many events were raised before the next to look at */
};

static nvmlReturn_t new_set(nvmlEventSet_t *set)
{
    *set = calloc(1, sizeof **set);
    CHECK(*set != NULL, NVML_ERROR_MEMORY);
    (*set)->seen = atomic_load(&nvml.client.page->events);
    return NVML_SUCCESS;
}

/* The oldest event not looked at that the set was registered for. */
static bool next_event(nvmlEventSet_t set, nvmlEventData_t *data)
{
    struct fake_page *page = nvml.client.page;
    bool found = false;
    page_lock(page);
    const uint32_t raised = atomic_load(&page->events);
    if (raised - set->seen > FAKE_EVENTS)
        set->seen = raised - FAKE_EVENTS; /* too slow: the oldest are lost */
    while (!found && set->seen != raised) {
        const struct fake_event event = page->event[set->seen++ % FAKE_EVENTS];
        found = event.gpu < FAKE_GPUS && (set->types[event.gpu] & nvmlEventTypeXidCriticalError) != 0;
        if (found)
            *data = (nvmlEventData_t){.device = handle_of(event.gpu), .eventType = nvmlEventTypeXidCriticalError, .eventData = event.xid,
                                      .gpuInstanceId = 0xffffffffu, .computeInstanceId = 0xffffffffu};
    }
    page_unlock(page);
    return found;
}

static nvmlReturn_t wait_for(nvmlEventSet_t set, nvmlEventData_t *data, uint64_t until_ns)
{
    for (uint64_t now; !next_event(set, data);) {
        now = page_now_ns();
        CHECK(now < until_ns, NVML_ERROR_TIMEOUT);
        bell_wait(&nvml.client.page->events, set->seen, until_ns - now);
    }
    return NVML_SUCCESS;
}

#include "events.def"
