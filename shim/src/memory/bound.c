/* bound.c - what a context may grow by in a call is reserved before the call, and settled after it.
 *
 * How much of the GPU code takes when it is loaded, or a stream, only the driver knows. But a bound is known: the library
 * requests it (CONTEXT GROW), and the arbiter reserves it or refuses. It is requested for many calls at once, so most of them are one
 * compare-and-swap. A second later, or when memory is needed, and no such call is under way, GROWN reports that they are made, and what was reserved
 * and not needed. The arbiter frees that at once, and charges what NVML counts for the rest.
 *
 * Nothing waits for NVML. A call waits for an arbiter that is away as an allocation does; after that it is charged to the free part of the lease.
 */
#include "memory/bound.h"

#include <pthread.h>
#include <string.h>

#include "memory/memory.h"
#include "memory/pool.h"

static const uint64_t AT_ONCE = 16 * MIB; /* requested together; guessed */

/* Of a thread inside such a call. It is not cancelled there: the call would count as under way for ever, and what was reserved for it would stay reserved. */
static _Thread_local struct {
    unsigned depth;
    int cancelling; /* the thread's state before */
} calls __attribute__((tls_model("initial-exec"))); /* as gpu.c */

static void enter(struct bound *bound)
{
    if (calls.depth++ == 0)
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &calls.cancelling);
    atomic_fetch_add(&bound->inside, 1);
}

static void leave(struct bound *bound)
{
    atomic_fetch_sub(&bound->inside, 1);
    if (--calls.depth == 0)
        pthread_setcancelstate(calls.cancelling, NULL);
}

static struct bound *bound_of(const struct gpu *gpu)
{
    return &tangram.bounds[gpu->at];
}

static bool take(struct bound *bound, uint64_t bytes)
{
    uint64_t left = atomic_load(&bound->left);
    do {
        if (left < bytes)
            return false;
    } while (!atomic_compare_exchange_weak(&bound->left, &left, left - bytes));
    return true;
}

/* Locked. What is small shares pages, of which the first in a period is taken to be new. */
static enum link_answer request_memory(struct gpu *gpu, uint64_t bytes)
{
    struct bound *bound = bound_of(gpu);
    uint64_t need = bytes + (atomic_load(&bound->open) ? 0 : PAGE), requested = need < AT_ONCE ? AT_ONCE : need;
    enum link_answer answer = link_grow(gpu, requested, requested - need);
    if (answer == LINK_REFUSED) {
        link_return_all(gpu);
        answer = link_grow(gpu, need, 0);
    }
    if (answer == LINK_ABSENT && lease_take(gpu, bytes)) {
        atomic_fetch_add(&bound->borrowed, bytes);
        answer = LINK_GRANTED;
    }
    return answer;
}

static enum link_answer take_or_request(struct gpu *gpu, uint64_t bytes)
{
    struct quiet quiet = quiet_begin();
    process_check();
    pthread_mutex_lock(&tangram.bounding);
    enum link_answer answer = take(bound_of(gpu), bytes) ? LINK_GRANTED : request_memory(gpu, bytes);
    pthread_mutex_unlock(&tangram.bounding);
    quiet_end(quiet);
    return answer;
}

bool bound_begin(struct gpu *gpu, uint64_t bytes)
{
    if (gpu == NULL || gpu->closed)
        return true;
    struct bound *bound = bound_of(gpu);
    enter(bound); /* first: see bound_settle */
    if (take(bound, bytes))
        return true;
    const bool possible = bytes <= lease_limit_bytes(gpu, WIRE_RESIDENT);
    enum link_answer answer = possible ? take_or_request(gpu, bytes) : LINK_REFUSED;
    if (answer == LINK_REFUSED && elastic_trim(gpu, bytes + PAGE) > 0) /* what is kept for the next request */
        answer = take_or_request(gpu, bytes);
    if (answer == LINK_REFUSED && pools_reclaim(gpu)) /* what idle pools keep */
        answer = take_or_request(gpu, bytes);
    if (answer == LINK_REFUSED && possible && discard_wait(gpu)) /* what was freed while it is away */
        answer = take_or_request(gpu, bytes);
    if (answer == LINK_ABSENT)
        warn(WARN_AWAY, "the arbiter does not answer at %s: new GPU memory is refused until it does", tangram.grant.socket);
    if (answer != LINK_GRANTED)
        leave(bound);
    return answer == LINK_GRANTED;
}

void bound_end(struct gpu *gpu)
{
    if (gpu == NULL || gpu->closed)
        return;
    leave(bound_of(gpu));
    if (UNLIKELY(!link_has_helper()))
        bound_settle(gpu);
}

bool bounds_inside(void)
{
    bool some = false;
    for (unsigned i = 0; i < tangram.grant.gpus && !some; i++)
        some = atomic_load(&tangram.bounds[i].inside) > 0;
    return some;
}

bool bound_unseen(struct gpu *gpu)
{
    return !atomic_exchange(&bound_of(gpu)->unseen, true);
}

unsigned bound_period(const struct gpu *gpu)
{
    return atomic_load(&bound_of(gpu)->periods);
}

/* Locked. What is left is taken out and reported, or put back, in one step: a WELCOME in between would end it, and what is put back then would be
 * reserved by nothing. A thread that begins sets its mark before it reserves: either the mark is seen here, or the thread finds nothing left. */
static bool settle(struct gpu *gpu)
{
    struct bound *bound = bound_of(gpu);
    pthread_mutex_lock(&tangram.link.lock);
    uint64_t left = atomic_exchange(&bound->left, 0);
    const bool inside = atomic_load(&bound->inside) > 0;
    if (inside)
        atomic_fetch_add(&bound->left, left);
    else if (atomic_exchange(&bound->open, false))
        link_grown(gpu, left);
    else
        left = 0; /* of an arbiter that is gone */
    pthread_mutex_unlock(&tangram.link.lock);
    if (inside)
        return false;
    uint64_t borrowed = atomic_exchange(&bound->borrowed, 0);
    if (borrowed > 0)
        lease_give_back(gpu, borrowed);
    atomic_store(&bound->unseen, false);
    atomic_fetch_add(&bound->periods, 1);
    return left > 0 || borrowed > 0;
}

/* A thread that requests keeps the lock until it is answered, by the helper's reading: the helper does not wait for it. */
bool bound_settle(struct gpu *gpu)
{
    struct bound *bound = bound_of(gpu);
    bool released = false;
    if (!atomic_load(&bound->open) && atomic_load(&bound->borrowed) == 0)
        return false;
    struct quiet quiet = quiet_begin();
    if (pthread_mutex_trylock(&tangram.bounding) == 0) {
        released = settle(gpu);
        pthread_mutex_unlock(&tangram.bounding);
    }
    quiet_end(quiet);
    return released;
}

void bound_granted(struct gpu *gpu, uint64_t spare_bytes)
{
    atomic_store(&bound_of(gpu)->open, true);
    atomic_fetch_add(&bound_of(gpu)->left, spare_bytes);
}

/* The next arbiter measures what there is. */
void bound_lost(struct gpu *gpu)
{
    atomic_store(&bound_of(gpu)->left, 0);
    atomic_store(&bound_of(gpu)->open, false);
}

void bounds_forget_all(void)
{
    memset(tangram.bounds, 0, sizeof tangram.bounds);
    tangram.bounding = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
