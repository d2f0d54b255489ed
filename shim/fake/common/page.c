/* page.c - memory on the shared page, and how processes lock it and wait for each other.
 *
 * What each slot has of a unit is one number; nothing else is kept, so that a process killed at any moment leaves no wrong sum.
 */
#define _GNU_SOURCE
#include "page.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LOOKS = 100, PAGE_LEASE_NS = 100000000 }; /* longer than that of a unit's time, which is taken within (gpu_time.c). Guessed: a turn takes microseconds */

void shared_mutex_init(pthread_mutex_t *mutex)
{
    pthread_mutexattr_t how;
    pthread_mutexattr_init(&how);
    pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(mutex, &how);
    pthread_mutexattr_destroy(&how);
}

void shared_mutex_lock(pthread_mutex_t *mutex)
{
    if (pthread_mutex_lock(mutex) == EOWNERDEAD)
        pthread_mutex_consistent(mutex);
}

static void futex_wait(const _Atomic uint32_t *word, uint32_t seen, uint64_t most_ns)
{
    const struct timespec most = {.tv_sec = (time_t)(most_ns / 1000000000u), .tv_nsec = (long)(most_ns % 1000000000u)};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &most, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int most)
{
    syscall(SYS_futex, word, FUTEX_WAKE, most, NULL, NULL, 0);
}

/* Until it is another turn. False: it has lasted for all of the lease. */
static bool await_turn(struct fake_lock *lock, uint32_t turn, uint64_t lease_ns)
{
    for (unsigned look = 0; look < LOOKS; look++)
        if (atomic_load(&lock->turn) != turn)
            return true;
    const uint64_t end = page_now_ns() + lease_ns;
    atomic_fetch_add(&lock->waiters, 1);
    for (uint64_t now; atomic_load(&lock->turn) == turn && (now = page_now_ns()) < end;)
        futex_wait(&lock->turn, turn, end - now);
    atomic_fetch_sub(&lock->waiters, 1);
    return atomic_load(&lock->turn) != turn;
}

uint32_t lock_take(struct fake_lock *lock, uint64_t lease_ns)
{
    for (;;) {
        uint32_t turn = atomic_load(&lock->turn);
        const bool taken = turn % 2 == 1;
        if (taken && await_turn(lock, turn, lease_ns))
            continue;
        const uint32_t mine = taken ? turn + 2 : turn + 1;
        if (atomic_compare_exchange_strong(&lock->turn, &turn, mine))
            return mine;
    }
}

bool lock_is_mine(const struct fake_lock *lock, uint32_t turn)
{
    return atomic_load(&lock->turn) == turn;
}

bool lock_leave(struct fake_lock *lock, uint32_t turn)
{
    if (!atomic_compare_exchange_strong(&lock->turn, &turn, turn + 1))
        return false;
    if (atomic_load(&lock->waiters) > 0)
        futex_wake(&lock->turn, 1);
    return true;
}

static _Thread_local uint32_t page_turn;

void page_lock(struct fake_page *page)
{
    page_turn = lock_take(&page->lock, PAGE_LEASE_NS);
}

bool page_is_mine(const struct fake_page *page)
{
    return lock_is_mine(&page->lock, page_turn);
}

bool page_unlock(struct fake_page *page)
{
    return lock_leave(&page->lock, page_turn);
}

uint64_t page_sum(const struct fake_page *page, uint32_t unit)
{
    uint64_t sum = 0;
    for (uint32_t slot = 0; slot < page->slots && slot < FAKE_SLOTS; slot++)
        sum += atomic_load_explicit(&page->unit[unit].used_bytes[slot], memory_order_relaxed);
    return sum;
}

bool page_take(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t bytes, bool managed)
{
    struct fake_unit *of = &page->unit[unit];
    page_lock(page);
    const uint64_t used = page_sum(page, unit);
    const bool fits = of->live && used <= of->limit_bytes && bytes <= of->limit_bytes - used;
    if (fits)
        atomic_fetch_add(&of->used_bytes[slot], bytes);
    if (fits && managed)
        atomic_fetch_add(&of->unlisted_bytes[slot], bytes);
    const bool lost = !page_unlock(page);
    if (!fits || !lost || page_unit_used(page, unit) <= of->limit_bytes)
        return fits;
    page_give(page, slot, unit, bytes, managed); /* others took it while this process was stopped */
    return false;
}

uint64_t take_away(_Atomic uint64_t *from, uint64_t most)
{
    uint64_t had = atomic_load(from), less;
    do
        less = most < had ? most : had;
    while (!atomic_compare_exchange_weak(from, &had, had - less));
    return less;
}

void page_give(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t bytes, bool managed)
{
    struct fake_unit *of = &page->unit[unit];
    page_lock(page);
    const uint64_t given = take_away(&of->used_bytes[slot], bytes);
    if (managed)
        take_away(&of->unlisted_bytes[slot], given);
    page_unlock(page);
}

uint64_t page_unit_used(struct fake_page *page, uint32_t unit)
{
    page_lock(page);
    const uint64_t used = page_sum(page, unit);
    page_unlock(page);
    return used;
}

uint64_t page_gpu_used(struct fake_page *page, uint32_t gpu)
{
    uint64_t used = page_unit_used(page, gpu);
    for (uint32_t i = 0; i < FAKE_INSTANCES; i++)
        used += page_unit_used(page, fake_unit_of_instance(gpu, i));
    return used;
}

uint64_t page_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void bell_ring(_Atomic uint32_t *bell)
{
    atomic_fetch_add(bell, 1);
    futex_wake(bell, INT_MAX);
}

void bell_wait(const _Atomic uint32_t *bell, uint32_t seen, uint64_t most_ns)
{
    futex_wait(bell, seen, most_ns);
}

struct fake_page *page_map(int fd)
{
    struct fake_page *page = mmap(NULL, FAKE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return NULL;
    if (page->magic == FAKE_PAGE_MAGIC && page->version == FAKE_PAGE_VERSION)
        return page;
    munmap(page, FAKE_PAGE_BYTES);
    return NULL;
}

void file_wipe(int page_fd, uint64_t offset, uint64_t bytes)
{
    fallocate(page_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes);
}

int new_memfd(const char *name)
{
    return (int)syscall(SYS_memfd_create, name, 1u); /* MFD_CLOEXEC */
}
