/* gpu_time.c - the time of a unit, shared by the slots with work on it.
 *
 * A slot's work on a unit is one queue; its streams do not overlap. Slots with work that are not suspended have equal parts of the
 * unit at every moment, as the driver's time slicing gives them on average. No thread simulates this: each reader brings
 * the records up to now, under the unit's lock. A waiter sleeps until the next moment at which something ends, or until the
 * bell rings because a process was suspended, resumed, or ended.
 */
#include "page.h"

#include <time.h>

enum { STEP_LOOK_NS = 20000, STEP_MOST_NS = 20000000, TIME_LEASE_NS = 20000000 };
#define HELD_LOOK_NS 200000000u /* a waiter checks again this often although no bell rang: the process that should ring it may have died */

static bool runs(const struct fake_slot *of, uint32_t unit)
{
    return atomic_load(&of->queued_ns[unit]) > atomic_load(&of->ran_ns[unit]) && atomic_load(&of->held[unit]) == 0;
}

struct crowd {
    unsigned running;
    uint64_t least_left; /* UINT64_MAX: no slot runs */
};

static struct crowd crowd_of(const struct fake_page *page, uint32_t unit)
{
    struct crowd crowd = {0, UINT64_MAX};
    for (const struct fake_slot *of = page->slot; of < page->slot + page->slots % (FAKE_SLOTS + 1); of++) {
        const uint64_t left = atomic_load(&of->queued_ns[unit]) - atomic_load(&of->ran_ns[unit]);
        if (!runs(of, unit))
            continue;
        crowd.running++;
        crowd.least_left = left < crowd.least_left ? left : crowd.least_left;
    }
    return crowd;
}

/* A thread that was stopped here adds nothing to what others have recorded since. */
static void run_on(_Atomic uint64_t *ran_ns, uint64_t more)
{
    uint64_t before = atomic_load(ran_ns);
    atomic_compare_exchange_strong(ran_ns, &before, before + more);
}

static _Thread_local uint32_t turn;

/* Locks the unit's time and brings it up to now, from one moment at which a process's work ends to the next. The time that passed is this
 * thread's to record from the moment that settled_ns has changed: if it is stopped then, kernels of that time end later, never sooner. */
static struct crowd begin(struct fake_page *page, uint32_t unit)
{
    struct fake_unit *on = &page->unit[unit];
    turn = lock_take(&on->time_lock, TIME_LEASE_NS);
    uint64_t settled = atomic_load(&on->settled_ns), now = page_now_ns();
    while (now > settled && !atomic_compare_exchange_strong(&on->settled_ns, &settled, now))
        now = page_now_ns();
    uint64_t passed = now > settled ? now - settled : 0;
    struct crowd crowd = crowd_of(page, unit);
    while (passed > 0 && crowd.running > 0 && lock_is_mine(&on->time_lock, turn)) {
        const uint64_t each = passed / crowd.running < crowd.least_left ? passed / crowd.running : crowd.least_left;
        if (each == 0)
            break; /* nanoseconds that do not divide count next time */
        for (struct fake_slot *of = page->slot; of < page->slot + page->slots % (FAKE_SLOTS + 1); of++)
            if (runs(of, unit))
                run_on(&of->ran_ns[unit], each);
        atomic_fetch_add(&on->ran_ns, each * crowd.running);
        passed -= each * crowd.running;
        crowd = crowd_of(page, unit);
    }
    if (crowd.running > 0 && passed > 0 && lock_is_mine(&on->time_lock, turn))
        atomic_fetch_sub(&on->settled_ns, passed);
    return crowd;
}

static void end(struct fake_page *page, uint32_t unit)
{
    lock_leave(&page->unit[unit].time_lock, turn);
}

void gpu_time_settle(struct fake_page *page, uint32_t unit)
{
    begin(page, unit);
    end(page, unit);
}

uint64_t gpu_time_queue(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t ns)
{
    begin(page, unit);
    const uint64_t queued = atomic_fetch_add(&page->slot[slot].queued_ns[unit], ns) + ns;
    end(page, unit);
    return queued;
}

bool gpu_time_reached(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t ran_ns)
{
    if (atomic_load(&page->slot[slot].ran_ns[unit]) < ran_ns)
        gpu_time_settle(page, unit);
    return atomic_load(&page->slot[slot].ran_ns[unit]) >= ran_ns;
}

void gpu_time_wait(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t ran_ns)
{
    struct fake_unit *on = &page->unit[unit];
    while (atomic_load(&page->slot[slot].ran_ns[unit]) < ran_ns) {
        const uint32_t bell = atomic_load(&on->time_bell);
        const struct crowd crowd = begin(page, unit);
        const uint64_t ran = atomic_load(&page->slot[slot].ran_ns[unit]);
        const bool held = atomic_load(&page->slot[slot].held[unit]) > 0;
        end(page, unit);
        if (ran >= ran_ns)
            return;
        const uint64_t next = ran_ns - ran < crowd.least_left ? ran_ns - ran : crowd.least_left;
        bell_wait(&on->time_bell, bell, held || crowd.running == 0 ? HELD_LOOK_NS : next * crowd.running);
    }
}

bool gpu_time_count(struct fake_page *page, uint32_t slot, uint32_t unit, struct gpu_time_counter *counter, _Atomic uint32_t *number)
{
    begin(page, unit);
    const bool held = atomic_load(&page->slot[slot].held[unit]) > 0;
    const uint64_t ran = atomic_load(&page->slot[slot].ran_ns[unit]), last = ran < counter->end_ns ? ran : counter->end_ns;
    const uint64_t steps = last > counter->start_ns ? (last - counter->start_ns) / counter->step_ns : 0;
    if (!held) {
        atomic_fetch_add(number, (uint32_t)(steps - counter->reported));
        counter->reported = steps;
    }
    end(page, unit);
    return held || ran < counter->end_ns;
}

void gpu_time_suspend(struct fake_page *page, uint32_t slot, uint32_t unit, bool held, bool copies_held)
{
    struct fake_slot *of = &page->slot[slot];
    begin(page, unit);
    if (held > atomic_load(&of->held[unit]) || copies_held > atomic_load(&of->copies_held[unit]))
        atomic_fetch_add(&of->suspends[unit], 1);
    atomic_store(&of->held[unit], held ? 1 : 0);
    atomic_store(&of->copies_held[unit], copies_held ? 1 : 0);
    end(page, unit);
    bell_ring(&page->unit[unit].time_bell);
}

bool gpu_step_begin(struct fake_page *page, uint32_t slot, uint32_t unit, bool copy, uint32_t *suspends)
{
    struct fake_slot *of = &page->slot[slot];
    atomic_fetch_add(&of->steps[unit], 1);
    *suspends = atomic_load(&of->suspends[unit]);
    if (atomic_load(copy ? &of->copies_held[unit] : &of->held[unit]) == 0)
        return true;
    atomic_fetch_sub(&of->steps[unit], 1);
    return false;
}

bool gpu_step_undisturbed(const struct fake_page *page, uint32_t slot, uint32_t unit, uint32_t suspends)
{
    return atomic_load(&page->slot[slot].suspends[unit]) == suspends;
}

bool gpu_step_end(struct fake_page *page, uint32_t slot, uint32_t unit, uint32_t suspends)
{
    atomic_fetch_sub(&page->slot[slot].steps[unit], 1);
    return gpu_step_undisturbed(page, slot, unit, suspends);
}

void gpu_steps_wait(const struct fake_page *page, uint32_t slot)
{
    const struct timespec pause = {.tv_nsec = STEP_LOOK_NS};
    const uint64_t last = page_now_ns() + STEP_MOST_NS;
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++)
        while (atomic_load(&page->slot[slot].steps[unit]) > 0 && page_now_ns() < last)
            nanosleep(&pause, NULL);
}

void gpu_time_drop(struct fake_page *page, uint32_t slot)
{
    struct fake_slot *of = &page->slot[slot];
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++) {
        if (atomic_load(&of->queued_ns[unit]) == 0)
            continue;
        begin(page, unit);
        atomic_store(&of->queued_ns[unit], 0);
        atomic_store(&of->ran_ns[unit], 0);
        end(page, unit);
        bell_ring(&page->unit[unit].time_bell);
    }
}

uint32_t gpu_time_percent(const struct fake_page *page, const _Atomic uint64_t sampled_ns[FAKE_SAMPLES], uint64_t from, uint64_t to)
{
    const uint64_t ran = atomic_load(&sampled_ns[to % FAKE_SAMPLES]) - atomic_load(&sampled_ns[from % FAKE_SAMPLES]);
    const uint64_t us = atomic_load(&page->sampled_us[to % FAKE_SAMPLES]) - atomic_load(&page->sampled_us[from % FAKE_SAMPLES]);
    return us == 0 ? 0 : ran >= us * 1000 ? 100 : (uint32_t)((ran / 10 + us / 2) / us);
}

uint32_t gpu_time_busy(const struct fake_page *page, uint32_t unit)
{
    const uint64_t taken = atomic_load(&page->samples);
    return taken < 2 ? 0 : gpu_time_percent(page, page->unit[unit].sampled_ns, taken - 2, taken - 1);
}
