/* hang.c - calls that take longer because a script of the daemon says so. */
#include "internal.h"

#include "fault.h"

void hang(const char *function)
{
    const struct fake_page *page = nvml.client.page;
    const uint32_t faults = page == NULL ? 0 : atomic_load(&page->faults);
    for (uint32_t i = 0; i < faults && i < FAKE_FAULTS; i++)
        fault_hang(&page->fault[i], function);
}
