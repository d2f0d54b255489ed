/* lock.h - a lock whose two ends are one atomic operation each and call nothing (measured: a mutex takes 3 ns longer).
 *
 * It is the innermost lock (order.h): a thread that has it calls nothing but the allocator. That takes some tens of nanoseconds, and some
 * microseconds where many pages are searched for a free range (pages.c). So a waiting thread sleeps until it is woken: one that tried again
 * from time to time found it held by threads that did not sleep, for seconds (measured), and one that only yielded would keep a holder of
 * lower priority from running.
 */
#ifndef TANGRAM_LOCK_H
#define TANGRAM_LOCK_H

#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "order.h"

struct lock {
    _Atomic uint32_t state;
};
#define LOCK_FREE ((struct lock){0})

enum { LOCK_IS_FREE, LOCK_IS_HELD, LOCK_IS_AWAITED }; /* awaited: it is held, and some thread may sleep */
enum { SPINS = 100 };

/* By the bare system call: no cancellation point. */
static inline void lock_futex(struct lock *lock, int operation, uint32_t value)
{
    const int saved = errno;
    syscall(SYS_futex, &lock->state, operation, value, NULL, NULL, 0);
    errno = saved;
}

static inline bool lock_try(struct lock *lock)
{
    uint32_t expected = LOCK_IS_FREE;
    return atomic_compare_exchange_strong_explicit(&lock->state, &expected, LOCK_IS_HELD, memory_order_acquire, memory_order_relaxed);
}

static inline void lock_acquire(struct lock *lock)
{
    order_acquire_innermost();
    for (unsigned spins = 0; spins < SPINS; spins++)
        if (lock_try(lock))
            return;
    while (atomic_exchange_explicit(&lock->state, LOCK_IS_AWAITED, memory_order_acquire) != LOCK_IS_FREE)
        lock_futex(lock, FUTEX_WAIT_PRIVATE, LOCK_IS_AWAITED);
}

static inline void lock_release(struct lock *lock)
{
    if (atomic_exchange_explicit(&lock->state, LOCK_IS_FREE, memory_order_release) == LOCK_IS_AWAITED)
        lock_futex(lock, FUTEX_WAKE_PRIVATE, 1);
    order_release_innermost();
}

#endif
