/* bound.c - what a context may grow by in a call is held before the call, and settled after it.
 *
 * How much of the GPU code takes when it is loaded, or a stream, only the driver knows. A bound can be given: that is what the arbiter
 * is asked to hold (CONTEXT GROW), and what it cannot hold is refused. It is asked for many calls at once, so most of them are one
 * compare-and-swap. A second later, when no such call is under way, it is told that they are made (GROWN), and charges what NVML counts.
 *
 * Nothing waits for NVML. An arbiter that is away is waited for as for an allocation; then the lease pays while it has room.
 */
#include "bound.h"

#include <string.h>

#include "memory.h"
#include "pool.h"

static const uint64_t AT_ONCE = 16 * MIB; /* asked for together; guessed */

static struct bound *bound_of(const struct card *card)
{
    return &tangram.bounds[card->at];
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
static enum link_answer ask(struct card *card, uint64_t bytes)
{
    struct bound *bound = bound_of(card);
    bool held = false;
    uint64_t need = bytes + (atomic_load(&bound->open) ? 0 : PAGE), asked = need < AT_ONCE ? AT_ONCE : need;
    enum link_answer answer = link_grow(card, asked, &held);
    if (answer == LINK_REFUSED) {
        link_return(card, UINT64_MAX);
        asked = need;
        answer = link_grow(card, asked, &held);
    }
    if (answer == LINK_GRANTED && held) {
        atomic_store(&bound->open, true);
        atomic_fetch_add(&bound->left, asked - need);
    }
    if (answer == LINK_ABSENT && lease_take(card, bytes)) {
        atomic_fetch_add(&bound->borrowed, bytes);
        answer = LINK_GRANTED;
    }
    return answer;
}

static enum link_answer take_or_ask(struct card *card, uint64_t bytes)
{
    struct quiet quiet = quiet_begin();
    process_check();
    pthread_mutex_lock(&tangram.bounding);
    enum link_answer answer = take(bound_of(card), bytes) ? LINK_GRANTED : ask(card, bytes);
    pthread_mutex_unlock(&tangram.bounding);
    quiet_end(quiet);
    return answer;
}

bool bound_begin(struct card *card, uint64_t bytes)
{
    if (card == NULL || card->closed)
        return true;
    struct bound *bound = bound_of(card);
    atomic_fetch_add(&bound->inside, 1); /* first: see bound_settle */
    if (take(bound, bytes))
        return true;
    enum link_answer answer = LINK_REFUSED;
    if (bytes <= atomic_load(&card->limit_bytes))
        answer = take_or_ask(card, bytes);
    if (answer == LINK_REFUSED && pools_reclaim(card)) /* what idle pools keep */
        answer = take_or_ask(card, bytes);
    if (answer == LINK_ABSENT)
        warn(WARN_AWAY, "the arbiter does not answer at %s: new GPU memory is refused until it does", tangram.grant.socket);
    if (answer != LINK_GRANTED)
        atomic_fetch_sub(&bound->inside, 1);
    return answer == LINK_GRANTED;
}

void bound_end(struct card *card)
{
    if (card == NULL || card->closed)
        return;
    atomic_fetch_sub(&bound_of(card)->inside, 1);
    if (UNLIKELY(!link_has_helper()))
        bound_settle(card);
}

bool bound_unseen(struct card *card)
{
    return !atomic_exchange(&bound_of(card)->unseen, true);
}

unsigned bound_period(const struct card *card)
{
    return atomic_load(&bound_of(card)->periods);
}

/* Locked. Who begins says so before it takes: it is seen here, or finds nothing left. */
static void settle(struct card *card)
{
    struct bound *bound = bound_of(card);
    uint64_t left = atomic_exchange(&bound->left, 0);
    if (atomic_load(&bound->inside) > 0) {
        atomic_fetch_add(&bound->left, left);
        return;
    }
    if (atomic_exchange(&bound->open, false))
        link_grown(card);
    uint64_t borrowed = atomic_exchange(&bound->borrowed, 0);
    if (borrowed > 0)
        lease_give_back(card, borrowed);
    atomic_store(&bound->unseen, false);
    atomic_fetch_add(&bound->periods, 1);
}

/* Whoever asks holds the lock until it is answered, by the helper's reading: the helper does not wait for it. */
void bound_settle(struct card *card)
{
    struct bound *bound = bound_of(card);
    if (!atomic_load(&bound->open) && atomic_load(&bound->borrowed) == 0)
        return;
    struct quiet quiet = quiet_begin();
    if (pthread_mutex_trylock(&tangram.bounding) == 0) {
        settle(card);
        pthread_mutex_unlock(&tangram.bounding);
    }
    quiet_end(quiet);
}

/* The next arbiter measures what there is. */
void bound_lost(struct card *card)
{
    atomic_store(&bound_of(card)->left, 0);
    atomic_store(&bound_of(card)->open, false);
}

void bounds_forget_all(void)
{
    memset(tangram.bounds, 0, sizeof tangram.bounds);
    tangram.bounding = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
