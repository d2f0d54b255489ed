/* order.c - see order.h. A lock that is taken out of order ends the process with a line that names both: such a library is a test's. */
#include "process.h"

#ifdef TANGRAM_LOCK_ORDER
#undef pthread_mutex_lock
#undef pthread_mutex_trylock
#undef pthread_mutex_unlock

#include <stdio.h>
#include <stdlib.h>

/* First to last. What has the same rank is never held together. */
static int lock_rank(const pthread_mutex_t *lock)
{
    const pthread_mutex_t *const ranked[] = {
        &tangram.elastic.created.lock, &tangram.passing.exporting, &tangram.passing.opening, &tangram.requesting, &tangram.bounding, &tangram.contexts.beginning, &tangram.link.sharing, &tangram.link.listing, &tangram.time_link.meeting,
        &tangram.capture.reporting, &tangram.activity.reporting, &tangram.contexts.lock, &tangram.link.lock, &tangram.time_link.lock,
        &tangram.capture.lock, &tangram.warm.lock, &tangram.stack_lock, &tangram.vmm.lock, &tangram.pools_lock, &tangram.late_lock, &tangram.activity.placing, &tangram.setup,
        &tangram.elastic.peers.lock,
    };
    enum { RANKED = sizeof ranked / sizeof *ranked };
    for (int i = 0; i < RANKED; i++)
        if (ranked[i] == lock)
            return i + 1;
    return RANKED + 1;
}

enum { INNERMOST_RANK = 31 }; /* after all that there are */

static _Thread_local uint32_t held; /* a bit a rank */

static void note(int rank)
{
    if (held >> rank != 0) {
        fprintf(stderr, "tangram: lock of rank %d is taken while ranks %#x are held\n", rank, held);
        abort();
    }
    held |= UINT32_C(1) << rank;
}

int order_lock(pthread_mutex_t *lock)
{
    note(lock_rank(lock));
    return pthread_mutex_lock(lock);
}

int order_trylock(pthread_mutex_t *lock)
{
    int rc = pthread_mutex_trylock(lock);
    if (rc == 0) /* one that is only tried cannot wait for the others */
        held |= UINT32_C(1) << lock_rank(lock);
    return rc;
}

int order_unlock(pthread_mutex_t *lock)
{
    held &= ~(UINT32_C(1) << lock_rank(lock));
    return pthread_mutex_unlock(lock);
}

void order_acquire_innermost(void)
{
    note(INNERMOST_RANK);
}

void order_release_innermost(void)
{
    held &= ~(UINT32_C(1) << INNERMOST_RANK);
}

void order_forget(void)
{
    held = 0;
}
#endif
