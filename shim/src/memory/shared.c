/* shared.c - memory that this process shares with others of its container.
 *
 * Who makes memory pays for it in its lease. When it gives out a name, the arbiter is told the name, so that who opens the memory
 * by that name pays nothing while the maker has it, and all of them together pay once when the maker is gone. A name that the
 * arbiter was not told of, of another container say, is paid for by the first that opens it.
 *
 * Without an arbiter it fails closed. Who opens pays from its own lease, or is refused. What is freed while others may have it does
 * not come back into the lease before the arbiter was told: it stays used.
 */
#include <stdlib.h>
#include <string.h>

#include "memory/memory.h"
#include "memory/pool.h"

static struct holds *const holds = &tangram.holds;
static struct link *const link_ = &tangram.link;

static bool is_connected(void) /* locked */
{
    return link_->stage == LINK_CONNECTED;
}

/* Locked. The oldest of that address: one that is newer was made after the program had freed the older one. */
static struct hold **find(uint64_t at)
{
    struct hold **place = &holds->first;
    while (*place != NULL && ((*place)->at != at || (*place)->ended))
        place = &(*place)->next;
    return place;
}

/* Locked. */
static void add(struct hold *hold)
{
    struct hold **place = &holds->first;
    while (*place != NULL)
        place = &(*place)->next;
    *place = hold;
    atomic_fetch_add(&holds->count, 1);
}

/* Locked. */
static void take_out(struct hold **place)
{
    struct hold *hold = *place;
    *place = hold->next;
    atomic_fetch_sub(&holds->count, 1);
    free(hold);
}

static struct hold *new_hold(struct gpu *gpu, enum wire_held held, enum wire_space space, uint64_t at, uint64_t bytes,
                             const void *key)
{
    struct hold *hold = malloc(sizeof *hold);
    if (hold == NULL)
        return NULL;
    *hold = (struct hold){.at = at, .gpu = gpu, .said = {.held = (uint32_t)held, .space = (uint32_t)space, .bytes = bytes}};
    memcpy(hold->said.key, key, sizeof hold->said.key);
    return hold;
}

/* Locked. */
static bool say(struct hold *hold, enum wire_type type, enum wire_held held, uint64_t bytes)
{
    hold->said.gpu = (uint32_t)atomic_load(&hold->gpu->wire);
    struct wire_shared said = hold->said;
    said.held = (uint32_t)held;
    said.bytes = bytes;
    if (!is_connected() || atomic_load(&hold->gpu->wire) < 0)
        return false;
    return type == WIRE_DROP ? link_drop(&said) : link_say(type, &said, sizeof said);
}

/* Locked. Was this name given out for this memory before? */
static bool is_known(const struct hold *hold)
{
    for (const struct hold *other = holds->first; other != NULL; other = other->next)
        if (other->at == hold->at && !other->ended && memcmp(other->said.key, hold->said.key, sizeof hold->said.key) == 0)
            return true;
    return false;
}

void hold_made(struct gpu *gpu, enum wire_space space, uint64_t at, uint64_t bytes, const void *key)
{
    struct quiet quiet = quiet_begin();
    struct hold *hold = new_hold(gpu, WIRE_MADE, space, at, bytes, key);
    if (hold != NULL) { /* else who opens it pays */
        pthread_mutex_lock(&link_->lock);
        if (is_known(hold)) {
            free(hold);
        } else {
            add(hold);
            say(hold, WIRE_HOLD, WIRE_MADE, bytes);
        }
        pthread_mutex_unlock(&link_->lock);
    }
    quiet_end(quiet);
}

/* One at a time: the arbiter answers one HOLD of a process before the next. */
static enum link_answer request_memory(struct hold *hold)
{
    pthread_mutex_lock(&link_->holding);
    enum link_answer answer = link_hold(hold->gpu, &hold->said);
    if (answer == LINK_GRANTED) { /* still locked, so that a connection that ends now finds it */
        add(hold);
        pthread_mutex_unlock(&link_->lock);
    }
    pthread_mutex_unlock(&link_->holding);
    return answer;
}

bool hold_opened(struct gpu *gpu, enum wire_space space, uint64_t at, uint64_t bytes, const void *key)
{
    if (gpu->closed)
        return false;
    struct quiet quiet = quiet_begin();
    struct hold *hold = new_hold(gpu, WIRE_OPENED, space, at, bytes, key);
    enum link_answer answer = hold != NULL ? request_memory(hold) : LINK_ABSENT;
    if (answer == LINK_REFUSED) { /* what this process has and does not use may be what is missing */
        pools_reclaim(gpu);
        link_return(gpu, UINT64_MAX);
        answer = request_memory(hold);
    }
    if (answer != LINK_GRANTED)
        free(hold);
    if (answer == LINK_ABSENT)
        warn(WARN_SHARED_AWAY, "the arbiter does not answer at %s: memory of another process is paid for here", tangram.grant.socket);
    quiet_end(quiet);
    return answer == LINK_GRANTED || (answer == LINK_ABSENT && lease_take(gpu, bytes));
}

/* Locked. Opened twice, at two addresses: the arbiter knows one. */
static bool is_opened_elsewhere(const struct hold *hold)
{
    for (const struct hold *other = holds->first; other != NULL; other = other->next)
        if (other != hold && other->said.held == WIRE_OPENED && other->said.space == hold->said.space && other->gpu == hold->gpu &&
            memcmp(other->said.key, hold->said.key, sizeof hold->said.key) == 0)
            return true;
    return false;
}

/* Locked. While the arbiter is away: it will not be said again. */
static void end_opened(struct hold **place)
{
    if (!is_opened_elsewhere(*place))
        say(*place, WIRE_DROP, WIRE_OPENED, 0);
    take_out(place);
}

/* Locked. Of what is told later, the bytes stay in the lease, used. */
static void end_made(struct hold **place, uint64_t back_bytes)
{
    struct hold *hold = *place;
    hold->said.bytes = back_bytes;
    if (!say(hold, WIRE_DROP, WIRE_MADE, back_bytes)) {
        hold->ended = true;
        return;
    }
    atomic_fetch_sub(&hold->gpu->leased_bytes, back_bytes);
    take_out(place);
}

void hold_or_give_back(const struct owned *was)
{
    if (atomic_load_explicit(&holds->count, memory_order_relaxed) == 0) {
        lease_give_back(was->gpu, was->bytes);
        return;
    }
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&link_->lock);
    struct hold **place = find(was->at);
    bool known = *place != NULL;
    if (known && (*place)->said.held == WIRE_MADE) {
        end_made(place, was->bytes);
    } else if (known) {
        end_opened(place);
    }
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
    if (!known)
        lease_give_back(was->gpu, was->bytes);
}

void hold_end(uint64_t at)
{
    if (atomic_load_explicit(&holds->count, memory_order_relaxed) == 0)
        return;
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&link_->lock);
    struct hold **place = find(at);
    if (*place != NULL) { /* only what was made has anything beside that pays */
        say(*place, WIRE_DROP, WIRE_MADE, 0);
        take_out(place);
    }
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
}

/* What was freed meanwhile is said and taken back in the same breath: others that have it open are charged from then on. */
bool holds_restate(struct gpu *gpu)
{
    for (struct hold **place = &holds->first; *place != NULL;) {
        struct hold *hold = *place;
        if (hold->gpu != gpu) {
            place = &hold->next;
            continue;
        }
        bool made = hold->said.held == WIRE_MADE;
        hold->said.gpu = (uint32_t)atomic_load(&gpu->wire);
        struct wire_shared said = hold->said;
        said.held = made ? WIRE_MADE : WIRE_STILL_OPEN;
        if (!link_say(WIRE_HOLD, &said, sizeof said) || (hold->ended && !link_drop(&said)))
            return false;
        if (hold->ended) {
            atomic_fetch_sub(&gpu->leased_bytes, said.bytes);
            take_out(place);
        } else {
            place = &hold->next;
        }
    }
    return true;
}

/* In a forked child: left, not freed, as the tables are. */
void holds_forget_all(void)
{
    holds->first = NULL;
    atomic_store(&holds->count, 0);
}
