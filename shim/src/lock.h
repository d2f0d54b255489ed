/* lock.h - a lock whose two ends are one atomic operation each and call nothing (measured: a mutex takes 3 ns longer).
 *
 * It is the innermost lock (order.h): who holds it calls nobody but the allocator. That takes some tens of nanoseconds, and hundreds of
 * microseconds where all pages are looked through (pages.c). So who waits sleeps until it is woken: who tried again from time to time found
 * it held by threads that did not sleep, for seconds (measured), and who only yielded would keep a holder of lower priority from going on.
 */
#ifndef TANGRAM_SPIN_H
#define TANGRAM_SPIN_H

#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "order.h"

struct spin {
    _Atomic uint32_t state;
};
#define SPIN_FREE ((struct spin){0})

enum { SPIN_IS_FREE, SPIN_IS_HELD, SPIN_IS_AWAITED }; /* awaited: it is held, and some thread may sleep */
enum { SPINS = 100 };

/* By the bare system call: no cancellation point. */
static inline void spin_futex(struct spin *spin, int operation, uint32_t value)
{
    const int saved = errno;
    syscall(SYS_futex, &spin->state, operation, value, NULL, NULL, 0);
    errno = saved;
}

static inline bool spin_try(struct spin *spin)
{
    uint32_t expected = SPIN_IS_FREE;
    return atomic_compare_exchange_strong_explicit(&spin->state, &expected, SPIN_IS_HELD, memory_order_acquire, memory_order_relaxed);
}

static inline void spin_lock(struct spin *spin)
{
    order_spin();
    for (unsigned spins = 0; spins < SPINS; spins++)
        if (spin_try(spin))
            return;
    while (atomic_exchange_explicit(&spin->state, SPIN_IS_AWAITED, memory_order_acquire) != SPIN_IS_FREE)
        spin_futex(spin, FUTEX_WAIT_PRIVATE, SPIN_IS_AWAITED);
}

static inline void spin_unlock(struct spin *spin)
{
    if (atomic_exchange_explicit(&spin->state, SPIN_IS_FREE, memory_order_release) == SPIN_IS_AWAITED)
        spin_futex(spin, FUTEX_WAKE_PRIVATE, 1);
    order_unspin();
}

#endif
