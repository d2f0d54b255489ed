/* events.c - waiting for XIDs: the daemon rings a futex in the page. */
#include "internal.h"

#include <stdlib.h>

struct nvmlEventSet_st {
    unsigned long long types[FAKE_CARDS];
    uint32_t seen; /* how many events were raised before the next to look at */
};

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    TRY(ready());
    CHECK(set != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *set = calloc(1, sizeof **set);
    CHECK(*set != NULL, NVML_ERROR_MEMORY);
    (*set)->seen = atomic_load(&nvml.client.page->events);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    TRY(ready());
    CHECK(set != NULL, NVML_ERROR_INVALID_ARGUMENT);
    free(set);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    struct target to;
    TRY(target_of(device, LIVE, &to));
    CHECK(set != NULL, NVML_ERROR_INVALID_ARGUMENT);
    CHECK((types & ~SUPPORTED_EVENTS) == 0, NVML_ERROR_NOT_SUPPORTED);
    set->types[to.card] |= types;
    return NVML_SUCCESS;
}

/* The oldest event not looked at that the set asks for. */
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
        found = event.card < FAKE_CARDS && (set->types[event.card] & nvmlEventTypeXidCriticalError) != 0;
        if (found)
            *data = (nvmlEventData_t){.device = handle_of(event.card), .eventType = nvmlEventTypeXidCriticalError, .eventData = event.xid,
                                      .gpuInstanceId = 0xffffffffu, .computeInstanceId = 0xffffffffu};
    }
    page_unlock(page);
    return found;
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms)
{
    TRY(ready());
    CHECK(set != NULL && data != NULL, NVML_ERROR_INVALID_ARGUMENT);
    const uint64_t until = page_now_ns() + (uint64_t)timeout_ms * 1000000u;
    while (!next_event(set, data)) {
        const uint64_t now = page_now_ns();
        CHECK(now < until, NVML_ERROR_TIMEOUT);
        bell_wait(&nvml.client.page->events, set->seen, until - now);
    }
    return NVML_SUCCESS;
}

ALIAS(nvmlEventSetWait, nvmlEventSetWait_v2)
