/* events.c - XIDs to whoever waits for them, and how much had run on each unit, sampled. */
#define _GNU_SOURCE
#include "daemon.h"

#include <time.h>

#define XID_FALLEN_OFF 79u /* "GPU has fallen off the bus" */

bool raise_xid(const struct value *value)
{
    struct fake_page *page = driver.page;
    const uint32_t card = (uint32_t)value[0].number, xid = (uint32_t)value[1].number;
    page_lock(page);
    page->event[atomic_load(&page->events) % FAKE_EVENTS] = (struct fake_event){card, xid};
    atomic_store(&page->card[card].xid, xid);
    if (xid == XID_FALLEN_OFF)
        atomic_store(&page->card[card].lost, 1);
    bell_ring(&page->events);
    page_unlock(page);
    return true;
}

bool recover_card(const struct value *value)
{
    atomic_store(&driver.page->card[value[0].number].xid, 0);
    atomic_store(&driver.page->card[value[0].number].lost, 0);
    return true;
}

void sample(void)
{
    struct fake_page *page = driver.page;
    const uint64_t number = atomic_load(&page->samples), at = number % FAKE_SAMPLES, ns = page_now_ns();
    struct timespec now;
    if (ns - driver.last_sample_ns < SAMPLE_MS * 1000000u)
        return;
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++) {
        if (page->unit[unit].live)
            gpu_time_settle(page, unit);
        atomic_store(&page->unit[unit].sampled_ns[at], atomic_load(&page->unit[unit].ran_ns));
    }
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        for (uint32_t card = 0; card < page->cards && page->slot[slot].kind == FAKE_CUDA; card++)
            atomic_store(&page->slot[slot].sampled_ns[card][at], atomic_load(&page->slot[slot].ran_ns[card]));
    clock_gettime(CLOCK_REALTIME, &now);
    atomic_store(&page->sampled_us[at], (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u);
    atomic_store(&page->samples, number + 1);
    driver.last_sample_ns = ns;
}
