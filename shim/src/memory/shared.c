/* shared.c - memory that this process shares with others of its container.
 *
 * The process that makes memory is charged for it in its lease. When it exports a name, it reports the name to the arbiter: a process that
 * opens the memory by that name is charged nothing while the maker has it, and all of them together are charged once when the maker is gone.
 * Memory under a name that was not reported, such as another container's, is charged to the first process that opens it.
 *
 * Without an arbiter it fails closed. A process that opens memory is charged in its own lease, or refused. What is freed while others may
 * have it does not return to the lease before that was reported: it stays used.
 */
#include <stdlib.h>
#include <string.h>

#include "memory/memory.h"
#include "memory/pool.h"

static struct shared_blocks *const shared = &tangram.shared;
static struct link *const link_ = &tangram.link;

static bool is_connected(void) /* locked */
{
    return link_->stage == LINK_CONNECTED;
}

/* Locked. The oldest of that address: one that is newer was made after the program had freed the older one. */
static struct shared_block **find(uint64_t at)
{
    struct shared_block **place = &shared->first;
    while (*place != NULL && ((*place)->at != at || (*place)->ended))
        place = &(*place)->next;
    return place;
}

/* Locked. */
static void add(struct shared_block *block)
{
    struct shared_block **place = &shared->first;
    while (*place != NULL)
        place = &(*place)->next;
    *place = block;
    atomic_fetch_add(&shared->count, 1);
}

/* Locked. */
static void take_out(struct shared_block **place)
{
    struct shared_block *block = *place;
    *place = block->next;
    atomic_fetch_sub(&shared->count, 1);
    free(block);
}

static struct shared_block *new_block(struct gpu *gpu, enum wire_held held, enum wire_space space, uint64_t at, uint64_t bytes,
                             const void *key)
{
    struct shared_block *block = malloc(sizeof *block);
    if (block == NULL)
        return NULL;
    *block = (struct shared_block){.at = at, .gpu = gpu, .message = {.held = (uint32_t)held, .space = (uint32_t)space, .bytes = bytes}};
    memcpy(block->message.key, key, sizeof block->message.key);
    return block;
}

/* Locked. */
static bool send_shared(struct shared_block *block, enum wire_type type, enum wire_held held, uint64_t bytes)
{
    block->message.gpu = (uint32_t)atomic_load(&block->gpu->wire);
    struct wire_shared message = block->message;
    message.held = (uint32_t)held;
    message.bytes = bytes;
    if (!is_connected() || atomic_load(&block->gpu->wire) < 0)
        return false;
    return type == WIRE_DROP ? link_drop(&message) : link_send(type, &message, sizeof message);
}

/* Locked. Was this name exported for this memory before? */
static bool is_known(const struct shared_block *block)
{
    for (const struct shared_block *other = shared->first; other != NULL; other = other->next)
        if (other->at == block->at && !other->ended && memcmp(other->message.key, block->message.key, sizeof block->message.key) == 0)
            return true;
    return false;
}

void shared_made(struct gpu *gpu, enum wire_space space, uint64_t at, uint64_t bytes, const void *key)
{
    struct quiet quiet = quiet_begin();
    struct shared_block *block = new_block(gpu, WIRE_MADE, space, at, bytes, key);
    if (block != NULL) { /* else the process that opens it is charged */
        pthread_mutex_lock(&link_->lock);
        if (is_known(block)) {
            free(block);
        } else {
            add(block);
            send_shared(block, WIRE_HOLD, WIRE_MADE, bytes);
        }
        pthread_mutex_unlock(&link_->lock);
    }
    quiet_end(quiet);
}

/* One at a time: the arbiter answers one HOLD of a process before the next. */
static enum link_answer request_charge(struct shared_block *block)
{
    pthread_mutex_lock(&link_->sharing);
    enum link_answer answer = link_shared(block->gpu, &block->message);
    if (answer == LINK_GRANTED) { /* still locked, so that a connection that ends now finds it */
        add(block);
        pthread_mutex_unlock(&link_->lock);
    }
    pthread_mutex_unlock(&link_->sharing);
    return answer;
}

bool shared_opened(struct gpu *gpu, enum wire_space space, uint64_t at, uint64_t bytes, const void *key)
{
    if (gpu->closed)
        return false;
    struct quiet quiet = quiet_begin();
    struct shared_block *block = new_block(gpu, WIRE_OPENED, space, at, bytes, key);
    enum link_answer answer = block != NULL ? request_charge(block) : LINK_ABSENT;
    if (answer == LINK_REFUSED) { /* what this process has and does not use may be what is missing */
        elastic_trim(gpu, bytes);
        pools_reclaim(gpu);
        bound_settle(gpu);
        link_return_all(gpu);
        answer = request_charge(block);
    }
    if (answer == LINK_REFUSED && discard_wait(gpu))
        answer = request_charge(block);
    if (answer != LINK_GRANTED)
        free(block);
    if (answer == LINK_ABSENT)
        warn(WARN_SHARED_AWAY, "the arbiter does not answer at %s: memory of another process is charged here", tangram.grant.socket);
    quiet_end(quiet);
    return answer == LINK_GRANTED || (answer == LINK_ABSENT && lease_take(gpu, bytes));
}

/* Locked. Opened twice, at two addresses: the arbiter knows one. */
static bool is_opened_elsewhere(const struct shared_block *block)
{
    for (const struct shared_block *other = shared->first; other != NULL; other = other->next)
        if (other != block && other->message.held == WIRE_OPENED && other->message.space == block->message.space && other->gpu == block->gpu &&
            memcmp(other->message.key, block->message.key, sizeof block->message.key) == 0)
            return true;
    return false;
}

/* Locked. While the arbiter is away: it will not be sent again. */
static void end_opened(struct shared_block **place)
{
    if (!is_opened_elsewhere(*place))
        send_shared(*place, WIRE_DROP, WIRE_OPENED, 0);
    take_out(place);
}

/* Locked. Of what is reported later, the bytes stay in the lease, used. */
static void end_made(struct shared_block **place, uint64_t back_bytes)
{
    struct shared_block *block = *place;
    block->message.bytes = back_bytes;
    if (!send_shared(block, WIRE_DROP, WIRE_MADE, back_bytes)) {
        block->ended = true;
        return;
    }
    atomic_fetch_sub(&block->gpu->leased_bytes, back_bytes);
    take_out(place);
}

void shared_end_or_give_back(const struct owned *was)
{
    if (atomic_load_explicit(&shared->count, memory_order_relaxed) == 0) {
        lease_give_back(was->gpu, was->bytes);
        return;
    }
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&link_->lock);
    struct shared_block **place = find(was->at);
    bool known = *place != NULL;
    if (known && (*place)->message.held == WIRE_MADE) {
        end_made(place, was->bytes);
    } else if (known) {
        end_opened(place);
    }
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
    if (!known)
        lease_give_back(was->gpu, was->bytes);
}

void shared_end(uint64_t at)
{
    if (atomic_load_explicit(&shared->count, memory_order_relaxed) == 0)
        return;
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&link_->lock);
    struct shared_block **place = find(at);
    if (*place != NULL) { /* only memory made here has a charge beside it */
        send_shared(*place, WIRE_DROP, WIRE_MADE, 0);
        take_out(place);
    }
    pthread_mutex_unlock(&link_->lock);
    quiet_end(quiet);
}

/* What was freed meanwhile is reported and returned to the lease in one step: others that have it open are charged from then on. */
bool shared_restate(struct gpu *gpu)
{
    for (struct shared_block **place = &shared->first; *place != NULL;) {
        struct shared_block *block = *place;
        if (block->gpu != gpu) {
            place = &block->next;
            continue;
        }
        bool made = block->message.held == WIRE_MADE;
        block->message.gpu = (uint32_t)atomic_load(&gpu->wire);
        struct wire_shared message = block->message;
        message.held = made ? WIRE_MADE : WIRE_STILL_OPEN;
        if (!link_send(WIRE_HOLD, &message, sizeof message) || (block->ended && !link_drop(&message)))
            return false;
        if (block->ended) {
            atomic_fetch_sub(&gpu->leased_bytes, message.bytes);
            take_out(place);
        } else {
            place = &block->next;
        }
    }
    return true;
}

/* In a forked child: left, not freed, as the tables are. */
void shared_forget_all(void)
{
    shared->first = NULL;
    atomic_store(&shared->count, 0);
}
