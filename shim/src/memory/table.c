/* table.c - the device memory this process owns, by pointer or handle.
 *
 * Open addressing in 64 shards, each behind its own lock for the few steps of one operation. A removal moves later entries
 * back instead of leaving marks, so a table that lives for days does not slow down.
 */
#include "process.h"

#include <stdlib.h>

#include "memory/memory.h"
#include "memory/pool.h"

enum { FIRST_SLOTS = 64 };

/* What was there is gone without a free of its own. */
static void bury(const struct owned *was)
{
    if (was->at >> 59 == 0 && was->of != NULL) {
        shared_end(was->at);
        pool_freed(was->of);
    }
    else if (was->gpu != NULL) /* a list that is owned here has none */
        memory_gone(was);
}

/* Fibonacci hashing: driver pointers differ in their middle bits only. The top bits choose the shard. */
static uint64_t mix(uint64_t at)
{
    at ^= at >> 32;
    return (at >> 8 | at << 56) * UINT64_C(0x9E3779B97F4A7C15);
}

static struct shard *shard_of(uint64_t hash)
{
    return &tangram.shard[hash >> 58];
}

static size_t home(uint64_t at, size_t slots)
{
    return (size_t)(mix(at) >> 30) & (slots - 1);
}

static void place(struct slot *slot, size_t slots, struct slot entry)
{
    size_t i = home(entry.owned.at, slots);
    while (slot[i].owned.at != 0)
        i = (i + 1) & (slots - 1);
    slot[i] = entry;
}

static bool grow(struct shard *shard)
{
    size_t slots = shard->slots ? shard->slots * 2 : FIRST_SLOTS;
    struct slot *slot = calloc(slots, sizeof *slot);
    if (slot == NULL)
        return false;
    for (size_t i = 0; i < shard->slots; i++)
        if (shard->slot[i].owned.at != 0)
            place(slot, slots, shard->slot[i]);
    free(shard->slot);
    shard->slot = slot;
    shard->slots = slots;
    return true;
}

/* Locked. Where it is, or the empty slot where it belongs. NULL: there are no slots yet. */
static struct slot *spot(struct shard *shard, uint64_t at)
{
    if (shard->slots == 0)
        return NULL;
    size_t i = home(at, shard->slots);
    while (shard->slot[i].owned.at != 0 && shard->slot[i].owned.at != at)
        i = (i + 1) & (shard->slots - 1);
    return &shard->slot[i];
}

/* Locked. NULL when it is not there. */
static struct slot *seek(struct shard *shard, uint64_t at)
{
    struct slot *slot = spot(shard, at);
    return slot != NULL && slot->owned.at == at ? slot : NULL;
}

/* Locked. Where it is, or an empty slot, which leaves a quarter of them empty. NULL: there is no memory for more slots. */
static struct slot *slot_for(struct shard *shard, uint64_t at)
{
    struct slot *slot = spot(shard, at);
    bool known = slot != NULL && slot->owned.at == at;
    if (known || (shard->used + 1) * 4 <= shard->slots * 3)
        return slot;
    return grow(shard) ? spot(shard, at) : NULL;
}

static unsigned kind_of(const struct owned *entry)
{
    return (unsigned)(entry->at >> 59);
}

/* Plain memory, and what another process's is mapped to: the address. 0: it is something else. */
static CUdeviceptr address_of(const struct owned *entry)
{
    return kind_of(entry) == 0 ? entry->at : kind_of(entry) == OWNED_IPC ? OWNED_AS(OWNED_IPC, entry->at) : 0;
}

static CUresult query_buffer(CUdeviceptr at, uint64_t *buffer)
{
    *buffer = 0;
    return tangram.driver.cuPointerGetAttribute(buffer, CU_POINTER_ATTRIBUTE_BUFFER_ID, at);
}

static bool has_number(const struct owned *entry)
{
    return address_of(entry) != 0 && (kind_of(entry) != 0 || entry->of == NULL); /* pools outlive contexts */
}

/* Locked: no other thread writes it, so no atomic addition is needed. */
static uint64_t next_serial(struct shard *shard)
{
    uint64_t serial = atomic_load_explicit(&shard->serial, memory_order_relaxed) + 1;
    atomic_store_explicit(&shard->serial, serial, memory_order_relaxed);
    return serial;
}

/* False when there is no memory to remember it in, or the pointer is NULL. */
bool table_own(struct owned entry)
{
    struct shard *shard = shard_of(mix(entry.at));
    struct owned dead = {.at = 0};
    if (entry.at == 0)
        return false;
    lock_acquire(&shard->lock);
    struct slot *slot = slot_for(shard, entry.at);
    if (slot != NULL) {
        dead = slot->owned;
        shard->used += dead.at == 0;
        shard->unnumbered = shard->unnumbered || has_number(&entry);
        *slot = (struct slot){.owned = entry, .serial = next_serial(shard)};
    }
    lock_release(&shard->lock);
    if (UNLIKELY(dead.at != 0))
        bury(&dead);
    return slot != NULL;
}

static void close_gap(struct shard *shard, size_t gap)
{
    size_t mask = shard->slots - 1;
    for (size_t i = (gap + 1) & mask; shard->slot[i].owned.at != 0; i = (i + 1) & mask) {
        size_t from = home(shard->slot[i].owned.at, shard->slots);
        if (((i - from) & mask) >= ((i - gap) & mask)) { /* its home is at or before the gap */
            shard->slot[gap] = shard->slot[i];
            gap = i;
        }
    }
    shard->slot[gap].owned.at = 0;
    shard->used--;
}

/* Takes the entry out, with what it was. False when it is none of ours. */
bool table_disown(uint64_t at, struct owned *was)
{
    struct shard *shard = shard_of(mix(at));
    if (at == 0)
        return false;
    lock_acquire(&shard->lock);
    struct slot *slot = seek(shard, at);
    if (slot != NULL) {
        *was = slot->owned;
        close_gap(shard, (size_t)(slot - shard->slot));
    }
    lock_release(&shard->lock);
    return slot != NULL;
}

/* Takes out this entry, and none that another thread made under its key since it was read. */
static bool disown_same(struct shard *shard, const struct slot *entry)
{
    lock_acquire(&shard->lock);
    struct slot *slot = seek(shard, entry->owned.at);
    bool same = slot != NULL && slot->serial == entry->serial;
    if (same)
        close_gap(shard, (size_t)(slot - shard->slot));
    lock_release(&shard->lock);
    return same;
}

bool table_find(uint64_t at, struct owned *found)
{
    struct shard *shard = shard_of(mix(at));
    lock_acquire(&shard->lock);
    struct slot *slot = at != 0 ? seek(shard, at) : NULL;
    if (slot != NULL)
        *found = slot->owned;
    lock_release(&shard->lock);
    return slot != NULL;
}

/* For plain memory the driver is queried: the memory is gone if its address is free, or belongs to other memory by now. */
static bool is_gone(const struct slot *entry)
{
    uint64_t buffer;
    CUresult rc = query_buffer(address_of(&entry->owned), &buffer);
    return rc == CUDA_ERROR_INVALID_VALUE || (rc == CUDA_SUCCESS && entry->buffer != 0 && buffer != entry->buffer);
}

/* Did it die with the context? Pools belong to the device and outlive contexts. A destroyed array cannot be queried, so its entry
 * names its context. */
static bool is_dead(const struct slot *entry, CUcontext context, uint64_t before)
{
    const struct owned *owned = &entry->owned;
    switch (kind_of(owned)) {
    case 0:
    case OWNED_IPC:
        return is_gone(entry);
    case OWNED_ARRAY:
    case OWNED_MIPMAP:
    case OWNED_MODULE:
    case OWNED_THERE:
    case OWNED_USED:
        return entry->serial <= before && owned->of == (void *)context;
    case OWNED_STACK:
    case OWNED_HEAP:
        return entry->serial <= before && owned->at == OWNED_AS(kind_of(owned), (uintptr_t)context);
    default:
        return false;
    }
}

static size_t copy_of_shard(struct shard *shard, struct slot **entries)
{
    size_t count = 0;
    lock_acquire(&shard->lock);
    *entries = malloc(shard->used * sizeof **entries + 1);
    for (size_t i = 0; i < shard->slots && *entries != NULL; i++)
        if (shard->slot[i].owned.at != 0)
            (*entries)[count++] = shard->slot[i];
    lock_release(&shard->lock);
    return count;
}

static bool give_number(struct shard *shard, const struct slot *entry)
{
    uint64_t buffer;
    if (query_buffer(address_of(&entry->owned), &buffer) != CUDA_SUCCESS)
        return false;
    lock_acquire(&shard->lock);
    struct slot *slot = seek(shard, entry->owned.at);
    if (slot != NULL && slot->serial == entry->serial) /* it was there all the time, so the driver's answer is about it */
        slot->buffer = buffer;
    lock_release(&shard->lock);
    return true;
}

/* The driver's answer takes 0.25 us (H100): each allocation would take as much longer, and only at a context's end is it needed. */
static void number_all(struct shard *shard)
{
    lock_acquire(&shard->lock);
    bool some = shard->unnumbered;
    shard->unnumbered = false;
    lock_release(&shard->lock);
    if (!some)
        return;
    struct slot *entries;
    size_t count = copy_of_shard(shard, &entries);
    bool whole = entries != NULL;
    for (size_t i = 0; i < count; i++)
        if (has_number(&entries[i].owned) && entries[i].buffer == 0 && !give_number(shard, &entries[i]))
            whole = false;
    free(entries);
    if (whole)
        return;
    lock_acquire(&shard->lock); /* another time, perhaps */
    shard->unnumbered = true;
    lock_release(&shard->lock);
}

void table_now(struct table_moment *moment)
{
    for (unsigned i = 0; i < SHARDS; i++)
        number_all(&tangram.shard[i]);
    for (unsigned i = 0; i < SHARDS; i++)
        moment->serial[i] = atomic_load_explicit(&tangram.shard[i].serial, memory_order_relaxed);
    moment->elastic = atomic_load_explicit(&tangram.elastic.numbers, memory_order_relaxed);
}

void table_forget_context(CUcontext context, struct gpu *gpu, const struct table_moment *before)
{
    atomic_fetch_add(&tangram.contexts_gone, 1);
    for (unsigned i = 0; i < SHARDS; i++) {
        struct slot *entries;
        size_t count = copy_of_shard(&tangram.shard[i], &entries);
        for (size_t j = 0; j < count; j++)
            if ((gpu == NULL || entries[j].owned.gpu == gpu) && is_dead(&entries[j], context, before->serial[i]) &&
                disown_same(&tangram.shard[i], &entries[j]))
                bury(&entries[j].owned);
        free(entries);
    }
    elastic_forget_context(context, gpu, before->elastic);
    peers_forget_context(context);
    ipc_forget_context(context, gpu, before->elastic);
    pools_may_have_shrunk(gpu);
}

/* In a forked child. The tables may be half changed by a thread that is not here, so they are left, not freed. */
void table_forget_all(void)
{
    for (unsigned i = 0; i < SHARDS; i++) {
        tangram.shard[i].slot = NULL;
        tangram.shard[i].slots = tangram.shard[i].used = 0;
    }
}

bool owned_list_add(struct owned_list *list, const struct owned *entry)
{
    if (list->count == list->capacity) {
        size_t capacity = list->capacity > 0 ? list->capacity * 2 : 16;
        struct owned *larger = realloc(list->entry, capacity * sizeof *larger);
        if (larger == NULL)
            return false;
        list->entry = larger;
        list->capacity = capacity;
    }
    list->entry[list->count++] = *entry;
    return true;
}

static bool list_from(bool (*is_its)(const struct owned *entry, const void *what), const void *what, struct owned_list *list, bool take)
{
    bool whole = true;
    for (unsigned i = 0; i < SHARDS; i++) {
        struct slot *entries;
        size_t count = copy_of_shard(&tangram.shard[i], &entries);
        whole = whole && entries != NULL;
        for (size_t j = 0; j < count; j++) {
            if (!is_its(&entries[j].owned, what))
                continue;
            if (!owned_list_add(list, &entries[j].owned))
                whole = false;
            else if (take && !disown_same(&tangram.shard[i], &entries[j]))
                list->count--;
        }
        free(entries);
    }
    return whole;
}

void table_take(bool (*is_its)(const struct owned *entry, const void *what), const void *what, struct owned_list *list)
{
    list_from(is_its, what, list, true);
}

bool table_list(bool (*is_its)(const struct owned *entry, const void *what), const void *what, struct owned_list *list)
{
    return list_from(is_its, what, list, false);
}
