/* events.c - XIDs to whoever waits for them, and how busy each unit was. */
#define _GNU_SOURCE
#include "daemon.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define EVENT_XID 8u                      /* nvmlEventTypeXidCriticalError */
#define XID_FALLEN_OFF 79u                /* "GPU has fallen off the bus" */
#define SAMPLE_NS 200000000u              /* guessed: NVML's own period is 1/6 to 1 s by product */

void event_xid(struct daemon *daemon, uint32_t card, uint32_t xid)
{
    struct fake_page *page = daemon->page;
    const uint64_t number = atomic_load(&page->events_raised) + 1;
    struct fake_event *event = &page->event[number % FAKE_EVENTS];
    atomic_store(&event->number, 0); /* a reader that looks now sees that it is being written */
    event->card = card;
    event->gi = event->ci = UINT32_MAX;
    event->type = EVENT_XID;
    event->data = xid;
    atomic_store(&event->number, number);
    atomic_store(&page->events_raised, number);
    atomic_store(&page->card[card].xid, xid);
    if (xid == XID_FALLEN_OFF)
        atomic_store(&page->card[card].lost, 1);
    atomic_fetch_add(&page->event_bell, 1);
    syscall(SYS_futex, &page->event_bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void event_recover(struct daemon *daemon, uint32_t card)
{
    atomic_store(&daemon->page->card[card].xid, 0);
    atomic_store(&daemon->page->card[card].lost, 0);
}

static void set_timer(struct daemon *daemon, long ns)
{
    const struct itimerspec every = {.it_interval = {.tv_nsec = ns}, .it_value = {.tv_nsec = ns}};
    timerfd_settime(daemon->timer, 0, &every, NULL);
}

void sample_start(struct daemon *daemon)
{
    if (daemon->last_sample_ns != 0)
        return;
    daemon->last_sample_ns = page_now_ns();
    set_timer(daemon, SAMPLE_NS);
}

static uint64_t real_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

static uint32_t percent(uint64_t part, uint64_t whole)
{
    if (part >= whole)
        return whole == 0 ? 0 : 100;
    return (uint32_t)((part * 100 + whole / 2) / whole);
}

static void sample_slots(struct daemon *daemon, uint32_t unit, uint64_t unit_delta)
{
    struct fake_page *page = daemon->page;
    const uint32_t of_unit = atomic_load(&page->unit[unit].percent);
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++) {
        if (page->slot[slot].kind != FAKE_CUDA)
            continue;
        const uint64_t ran = atomic_load(&page->slot[slot].ran_ns[unit]);
        const uint64_t delta = ran - daemon->last_slot_ran_ns[slot][unit];
        daemon->last_slot_ran_ns[slot][unit] = ran;
        const uint32_t of_slot = unit_delta == 0 ? 0 : of_unit * percent(delta, unit_delta) / 100;
        atomic_store(&page->slot[slot].percent[unit], of_slot);
        if (unit < FAKE_CARDS)
            atomic_store(&page->slot[slot].sampled[unit][atomic_load(&page->samples) % FAKE_SAMPLES], (uint8_t)of_slot);
    }
}

void sample(struct daemon *daemon)
{
    struct fake_page *page = daemon->page;
    uint64_t expirations;
    if (read(daemon->timer, &expirations, sizeof expirations) < 0)
        return;
    const uint64_t now = page_now_ns(), period = now - daemon->last_sample_ns;
    daemon->last_sample_ns = now;
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++) {
        if (!page->unit[unit].live)
            continue;
        gpu_time_settle(page, unit);
        const uint64_t ran = atomic_load(&page->unit[unit].ran_ns);
        const uint64_t delta = ran - daemon->last_ran_ns[unit];
        daemon->last_ran_ns[unit] = ran;
        atomic_store(&page->unit[unit].percent, percent(delta, period));
        sample_slots(daemon, unit, delta);
    }
    atomic_store(&page->sampled_us[atomic_load(&page->samples) % FAKE_SAMPLES], real_us());
    atomic_fetch_add(&page->samples, 1);
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        if (page->slot[slot].kind == FAKE_CUDA)
            return;
    daemon->last_sample_ns = 0; /* nobody computes: sleep until somebody does */
    set_timer(daemon, 0);
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++)
        atomic_store(&page->unit[unit].percent, 0);
}
