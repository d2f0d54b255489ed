/* hang.c - calls that take longer because a script of the daemon says so. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <time.h>

void hang(const char *function)
{
    const struct fake_page *page = nvml.client.page;
    const uint32_t faults = page == NULL ? 0 : atomic_load(&page->faults);
    for (uint32_t i = 0; i < faults && i < FAKE_FAULTS; i++) {
        if (page->fault[i].kind != FAULT_HANG || strcmp(page->fault[i].function, function) != 0)
            continue;
        struct timespec left = {.tv_sec = (time_t)page->fault[i].seconds};
        while (nanosleep(&left, &left) != 0 && errno == EINTR)
            continue;
    }
}
