/* spin.h - a lock for what takes some tens of nanoseconds: one atomic operation, where a mutex has two and a call for each (measured: 10 ns).
 *
 * It is the innermost lock (order.h): who holds it calls nobody but the allocator.
 */
#ifndef TANGRAM_SPIN_H
#define TANGRAM_SPIN_H

#include <errno.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "order.h"

struct spin {
    atomic_flag busy;
};
#define SPIN_FREE ((struct spin){ATOMIC_FLAG_INIT})

enum { SPINS = 100, SPIN_SLEEP_NS = 20000 };

/* Who holds it may have no processor. Yielding would not give it one where this thread's priority is higher. No cancellation point, as nanosleep(3) is. */
static inline void spin_sleep(void)
{
    const struct timespec a_while = {0, SPIN_SLEEP_NS};
    const int saved = errno;
    syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &a_while, NULL);
    errno = saved;
}

static inline void spin_lock(struct spin *spin)
{
    order_spin();
    for (unsigned spins = 0; atomic_flag_test_and_set_explicit(&spin->busy, memory_order_acquire); spins++)
        if (spins >= SPINS)
            spin_sleep();
}

static inline void spin_unlock(struct spin *spin)
{
    atomic_flag_clear_explicit(&spin->busy, memory_order_release);
    order_unspin();
}

#endif
