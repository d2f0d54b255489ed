/* events.c - waiting for XIDs: the daemon rings a futex in the page. */
#define _GNU_SOURCE
#include "internal.h"

#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct nvmlEventSet_st {
    unsigned long long types[FAKE_CARDS];
    uint64_t seen; /* number of the last event looked at */
};

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    TRY(ready());
    CHECK(set != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *set = calloc(1, sizeof **set);
    CHECK(*set != NULL, NVML_ERROR_MEMORY);
    (*set)->seen = atomic_load(&nvml.client.page->events_raised);
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
    const uint64_t raised = atomic_load(&page->events_raised);
    if (raised > set->seen + FAKE_EVENTS)
        set->seen = raised - FAKE_EVENTS; /* too slow: the oldest are lost */
    while (set->seen < raised) {
        const uint64_t number = ++set->seen;
        const struct fake_event event = page->event[number % FAKE_EVENTS];
        if (event.number != number || event.card >= FAKE_CARDS || (set->types[event.card] & nvmlEventTypeXidCriticalError) == 0)
            continue;
        *data = (nvmlEventData_t){.device = handle_of(event.card), .eventType = nvmlEventTypeXidCriticalError, .eventData = event.xid,
                                  .gpuInstanceId = 0xffffffffu, .computeInstanceId = 0xffffffffu};
        return true;
    }
    return false;
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms)
{
    TRY(ready());
    CHECK(set != NULL && data != NULL, NVML_ERROR_INVALID_ARGUMENT);
    const uint64_t until = page_now_ns() + (uint64_t)timeout_ms * 1000000u;
    for (;;) {
        const uint32_t bell = atomic_load(&nvml.client.page->event_bell);
        if (next_event(set, data))
            return NVML_SUCCESS;
        const uint64_t now = page_now_ns();
        if (now >= until)
            return NVML_ERROR_TIMEOUT;
        const struct timespec left = {.tv_sec = (time_t)((until - now) / 1000000000u), .tv_nsec = (long)((until - now) % 1000000000u)};
        syscall(SYS_futex, &nvml.client.page->event_bell, FUTEX_WAIT, bell, &left, NULL, 0);
    }
}

ALIAS(nvmlEventSetWait, nvmlEventSetWait_v2)
