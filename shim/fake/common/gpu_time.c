/* gpu_time.c - the time of a unit, shared by those who have work on it.
 *
 * A slot's work on a unit is one queue; its streams do not overlap. Slots with work that are not held have equal parts of the
 * unit at every moment, as the driver's time slicing gives them on average. Nobody runs this: whoever wants to know brings
 * the books up to now, under the unit's lock. Who waits sleeps until the next moment at which something ends, or until the
 * bell rings because somebody was held, let go, or ended.
 */
#define _GNU_SOURCE
#include "gpu_time.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define HELD_LOOK_NS 200000000u /* a waiter looks again this often though no bell rang: its ringer may have died */

void gpu_time_init_lock(struct fake_page *page, uint32_t unit)
{
    pthread_mutexattr_t how;
    pthread_mutexattr_init(&how);
    pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&page->unit[unit].time_lock, &how);
    pthread_mutexattr_destroy(&how);
}

uint64_t page_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void lock_time(struct fake_unit *on)
{
    if (pthread_mutex_lock(&on->time_lock) == EOWNERDEAD)
        pthread_mutex_consistent(&on->time_lock); /* every number is right after every step */
}

static void ring(struct fake_unit *on)
{
    atomic_fetch_add(&on->time_bell, 1);
    syscall(SYS_futex, &on->time_bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static uint64_t left(const struct fake_page *page, uint32_t slot, uint32_t unit)
{
    const struct fake_slot *of = &page->slot[slot];
    const uint64_t queued = atomic_load(&of->queued_ns[unit]), ran = atomic_load(&of->ran_ns[unit]);
    return queued > ran ? queued - ran : 0;
}

struct crowd {
    unsigned running;
    uint64_t least_left; /* UINT64_MAX: nobody runs */
};

#define EACH_WITH_WORK(on, slot)                                                                                               \
    for (uint32_t word_ = 0; word_ < FAKE_SLOTS / 64; word_++)                                                                 \
        for (uint64_t bits_ = (on)->with_work[word_], slot = 0; bits_ != 0 && ((slot = word_ * 64 + (uint64_t)__builtin_ctzll(bits_)), true); \
             bits_ &= bits_ - 1)

/* Locked. Who is done leaves the set. */
static struct crowd crowd_of(struct fake_page *page, uint32_t unit)
{
    struct fake_unit *on = &page->unit[unit];
    struct crowd crowd = {0, UINT64_MAX};
    EACH_WITH_WORK(on, slot)
    {
        const uint64_t rest = left(page, (uint32_t)slot, unit);
        if (rest == 0) {
            on->with_work[slot / 64] &= ~((uint64_t)1 << slot % 64);
        } else if (atomic_load(&page->slot[slot].held[unit]) == 0) {
            crowd.running++;
            crowd.least_left = rest < crowd.least_left ? rest : crowd.least_left;
        }
    }
    return crowd;
}

/* Locked. From one moment at which somebody's work ends to the next. */
static struct crowd settle(struct fake_page *page, uint32_t unit, uint64_t now)
{
    struct fake_unit *on = &page->unit[unit];
    uint64_t passed = now > on->settled_ns ? now - on->settled_ns : 0;
    struct crowd crowd = crowd_of(page, unit);
    while (passed > 0 && crowd.running > 0) {
        const uint64_t each = passed / crowd.running < crowd.least_left ? passed / crowd.running : crowd.least_left;
        if (each == 0)
            break; /* nanoseconds that do not divide count next time */
        EACH_WITH_WORK(on, slot)
        {
            if (atomic_load(&page->slot[slot].held[unit]) == 0)
                atomic_fetch_add(&page->slot[slot].ran_ns[unit], each);
        }
        atomic_fetch_add(&on->ran_ns, each * crowd.running);
        passed -= each * crowd.running;
        crowd = crowd_of(page, unit);
    }
    on->settled_ns = now - (crowd.running > 0 && passed < now ? passed : 0);
    return crowd;
}

void gpu_time_settle(struct fake_page *page, uint32_t unit)
{
    lock_time(&page->unit[unit]);
    settle(page, unit, page_now_ns());
    pthread_mutex_unlock(&page->unit[unit].time_lock);
}

uint64_t gpu_time_queue(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t ns)
{
    struct fake_unit *on = &page->unit[unit];
    lock_time(on);
    settle(page, unit, page_now_ns());
    const uint64_t queued = atomic_fetch_add(&page->slot[slot].queued_ns[unit], ns) + ns;
    on->with_work[slot / 64] |= (uint64_t)1 << slot % 64;
    pthread_mutex_unlock(&on->time_lock);
    return queued;
}

uint64_t gpu_time_queued(const struct fake_page *page, uint32_t slot, uint32_t unit)
{
    return atomic_load(&page->slot[slot].queued_ns[unit]);
}

bool gpu_time_reached(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t ran_ns)
{
    if (atomic_load(&page->slot[slot].ran_ns[unit]) >= ran_ns)
        return true;
    gpu_time_settle(page, unit);
    return atomic_load(&page->slot[slot].ran_ns[unit]) >= ran_ns;
}

void gpu_time_wait(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t ran_ns)
{
    struct fake_unit *on = &page->unit[unit];
    while (atomic_load(&page->slot[slot].ran_ns[unit]) < ran_ns) {
        const uint32_t bell = atomic_load(&on->time_bell);
        lock_time(on);
        const struct crowd crowd = settle(page, unit, page_now_ns());
        const uint64_t ran = atomic_load(&page->slot[slot].ran_ns[unit]);
        const bool held = atomic_load(&page->slot[slot].held[unit]) > 0;
        pthread_mutex_unlock(&on->time_lock);
        if (ran >= ran_ns)
            return;
        const uint64_t mine = ran_ns - ran;
        const uint64_t next = mine < crowd.least_left ? mine : crowd.least_left;
        const uint64_t sleep = held || crowd.running == 0 ? HELD_LOOK_NS : next * crowd.running;
        const struct timespec most = {.tv_sec = (time_t)(sleep / 1000000000u), .tv_nsec = (long)(sleep % 1000000000u)};
        syscall(SYS_futex, &on->time_bell, FUTEX_WAIT, bell, &most, NULL, 0);
    }
}

bool gpu_time_count(struct fake_page *page, uint32_t slot, uint32_t unit, struct gpu_time_counter *counter, _Atomic uint32_t *number)
{
    lock_time(&page->unit[unit]);
    settle(page, unit, page_now_ns());
    const bool held = atomic_load(&page->slot[slot].held[unit]) > 0;
    const uint64_t ran = atomic_load(&page->slot[slot].ran_ns[unit]), end = ran < counter->end_ns ? ran : counter->end_ns;
    const uint64_t steps = end > counter->start_ns ? (end - counter->start_ns) / counter->step_ns : 0;
    if (!held) {
        atomic_fetch_add(number, (uint32_t)(steps - counter->told));
        counter->told = steps;
    }
    pthread_mutex_unlock(&page->unit[unit].time_lock);
    return held || ran < counter->end_ns;
}

void gpu_time_hold(struct fake_page *page, uint32_t slot, uint32_t unit, bool held)
{
    struct fake_unit *on = &page->unit[unit];
    lock_time(on);
    settle(page, unit, page_now_ns());
    atomic_store(&page->slot[slot].held[unit], held ? 1 : 0);
    pthread_mutex_unlock(&on->time_lock);
    ring(on);
}

void gpu_time_drop(struct fake_page *page, uint32_t slot)
{
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++) {
        struct fake_unit *on = &page->unit[unit];
        if (atomic_load(&page->slot[slot].queued_ns[unit]) == 0)
            continue;
        lock_time(on);
        settle(page, unit, page_now_ns());
        on->with_work[slot / 64] &= ~((uint64_t)1 << slot % 64);
        atomic_store(&page->slot[slot].queued_ns[unit], 0);
        atomic_store(&page->slot[slot].ran_ns[unit], 0);
        pthread_mutex_unlock(&on->time_lock);
        ring(on);
    }
}
