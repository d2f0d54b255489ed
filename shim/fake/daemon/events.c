/* events.c - XIDs to whoever waits for them, and how busy each unit was. */
#define _GNU_SOURCE
#include "daemon.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define XID_FALLEN_OFF 79u   /* "GPU has fallen off the bus" */
#define SAMPLE_NS 200000000u /* guessed: NVML's own period is 1/6 to 1 s by product */

bool raise_xid(struct daemon *daemon, const struct value *value, struct text *why)
{
    (void)why;
    struct fake_page *page = daemon->page;
    const uint32_t card = (uint32_t)value[0].number, xid = (uint32_t)value[1].number;
    const uint64_t number = atomic_load(&page->events_raised) + 1;
    struct fake_event *event = &page->event[number % FAKE_EVENTS];
    atomic_store(&event->number, 0); /* a reader that looks now sees that it is being written */
    event->card = card;
    event->xid = xid;
    atomic_store(&event->number, number);
    atomic_store(&page->events_raised, number);
    atomic_store(&page->card[card].xid, xid);
    if (xid == XID_FALLEN_OFF)
        atomic_store(&page->card[card].lost, 1);
    atomic_fetch_add(&page->event_bell, 1);
    syscall(SYS_futex, &page->event_bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    return true;
}

bool recover_card(struct daemon *daemon, const struct value *value, struct text *why)
{
    (void)why;
    atomic_store(&daemon->page->card[value[0].number].xid, 0);
    atomic_store(&daemon->page->card[value[0].number].lost, 0);
    return true;
}

void sample_start(struct daemon *daemon)
{
    if (daemon->last_sample_ns == 0)
        daemon->last_sample_ns = page_now_ns();
}

static uint32_t percent(uint64_t part, uint64_t whole)
{
    if (part >= whole)
        return whole == 0 ? 0 : 100;
    return (uint32_t)((part * 100 + whole / 2) / whole);
}

/* What each slot had of a card's busy time. */
static void sample_slots(struct daemon *daemon, uint32_t card, uint64_t ran_by_all)
{
    struct fake_page *page = daemon->page;
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++) {
        if (page->slot[slot].kind != FAKE_CUDA)
            continue;
        const uint64_t ran = atomic_load(&page->slot[slot].ran_ns[card]), its = ran - daemon->last_slot_ran_ns[slot][card];
        daemon->last_slot_ran_ns[slot][card] = ran;
        const uint32_t of_card = atomic_load(&page->unit[card].percent) * percent(its, ran_by_all) / 100;
        atomic_store(&page->slot[slot].sampled[card][atomic_load(&page->samples) % FAKE_SAMPLES], (uint8_t)of_card);
    }
}

static void take_sample(struct daemon *daemon, uint64_t period)
{
    struct fake_page *page = daemon->page;
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++) {
        if (!page->unit[unit].live)
            continue;
        gpu_time_settle(page, unit);
        const uint64_t ran = atomic_load(&page->unit[unit].ran_ns), in_period = ran - daemon->last_ran_ns[unit];
        daemon->last_ran_ns[unit] = ran;
        atomic_store(&page->unit[unit].percent, percent(in_period, period));
        if (unit < FAKE_CARDS)
            sample_slots(daemon, unit, in_period);
    }
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    atomic_store(&page->sampled_us[atomic_load(&page->samples) % FAKE_SAMPLES], (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u);
    atomic_fetch_add(&page->samples, 1);
}

int sample(struct daemon *daemon)
{
    struct fake_page *page = daemon->page;
    const uint64_t now = page_now_ns(), period = now - daemon->last_sample_ns;
    if (daemon->last_sample_ns == 0)
        return -1;
    if (period < SAMPLE_NS)
        return (int)((SAMPLE_NS - period) / 1000000 + 1);
    take_sample(daemon, period);
    daemon->last_sample_ns = now;
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        if (page->slot[slot].kind == FAKE_CUDA)
            return SAMPLE_NS / 1000000;
    daemon->last_sample_ns = 0; /* nobody computes: sleep until somebody does */
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++)
        atomic_store(&page->unit[unit].percent, 0);
    return -1;
}
