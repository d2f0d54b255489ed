/* lease.c - this process's part of the container's limit.
 *
 * The limit belongs to all processes of the container and is kept by the arbiter. A process leases some of it in advance, so
 * that most allocations are one compare-and-swap; only when the lease is used up does it request more. Before that it returns
 * the unused rest: the arbiter then decides on the whole limit, and two processes near it cannot each keep half of what
 * one of them needs.
 */
#include "process.h"

/* Guessed, within the range of the design: a 40 GB share takes about 160 requests until it is full. */
static const uint64_t CHUNK_LEAST = 64 * MIB, CHUNK_MOST = 256 * MIB;
enum { CHUNKS_IN_LIMIT = 32, CHUNKS_KEPT = 2 };

/* What is leased at once, beyond what is needed. */
uint64_t lease_chunk_bytes(struct gpu *gpu)
{
    uint64_t chunk = atomic_load_explicit(&gpu->limit_bytes, memory_order_relaxed) / CHUNKS_IN_LIMIT;
    return chunk < CHUNK_LEAST ? CHUNK_LEAST : chunk > CHUNK_MOST ? CHUNK_MOST : chunk;
}

uint32_t lease_managed_mib(struct gpu *gpu)
{
    uint64_t mib = (atomic_load_explicit(&gpu->managed_bytes, memory_order_relaxed) + MIB - 1) / MIB;
    return mib < UINT32_MAX ? (uint32_t)mib : UINT32_MAX;
}

uint64_t lease_unused_bytes(struct gpu *gpu)
{
    return atomic_load(&gpu->unused_bytes) + atomic_load(&gpu->elastic_unused_bytes);
}

uint64_t lease_leased_bytes(struct gpu *gpu)
{
    return atomic_load(&gpu->leased_bytes) + atomic_load(&gpu->elastic_leased_bytes);
}

uint64_t lease_limit_bytes(struct gpu *gpu, enum wire_lease_kind kind)
{
    const uint64_t all = atomic_load(&gpu->limit_bytes), resident = atomic_load(&gpu->resident_limit_bytes);
    return kind == WIRE_ELASTIC || all < resident ? all : resident;
}

static bool take(struct gpu *gpu, enum wire_lease_kind kind, uint64_t bytes)
{
    _Atomic uint64_t *its = unused_of(gpu, kind);
    uint64_t unused = atomic_load_explicit(its, memory_order_relaxed);
    do {
        if (unused < bytes)
            return false;
    } while (!atomic_compare_exchange_weak(its, &unused, unused - bytes));
    return true;
}

/* Up to so much of the unused lease, taken out of it. */
uint64_t lease_take_unused(struct gpu *gpu, enum wire_lease_kind kind, uint64_t most_bytes)
{
    _Atomic uint64_t *its = unused_of(gpu, kind);
    uint64_t unused = atomic_load(its), taken;
    do
        taken = unused < most_bytes ? unused : most_bytes;
    while (!atomic_compare_exchange_weak(its, &unused, unused - taken));
    return taken;
}

/* Of this thread's present allocation: how long it has waited for memory of others until now. It may request several times, and waits once in all. */
static _Thread_local struct {
    uint32_t depth;
    uint64_t waited_ms;
} allocation __attribute__((tls_model("initial-exec")));

void lease_allocation_begin(void)
{
    if (allocation.depth++ == 0)
        allocation.waited_ms = 0;
}

void lease_allocation_end(void)
{
    allocation.depth--;
}

static bool request_memory(struct gpu *gpu, enum wire_lease_kind kind, uint64_t bytes, uint64_t *since_ms)
{
    if (bytes > lease_limit_bytes(gpu, kind)) /* no answer could be yes */
        return false;
    switch (link_request(gpu, kind, bytes, link_has_helper() ? bytes + lease_chunk_bytes(gpu) : bytes, since_ms)) {
    case LINK_GRANTED:
        return true;
    case LINK_ABSENT:
        warn(WARN_AWAY, "the arbiter does not answer at %s: new GPU memory is refused until it does", tangram.grant.socket);
        return take(gpu, kind, bytes); /* what could not be returned is still leased */
    case LINK_REFUSED:
        break;
    }
    return false;
}

bool lease_take(struct gpu *gpu, uint64_t bytes)
{
    return !gpu->closed && take(gpu, WIRE_RESIDENT, bytes);
}

/* False = refuse the allocation. Nothing is taken then. */
bool lease_reserve_as(struct gpu *gpu, enum wire_lease_kind kind, uint64_t bytes)
{
    if (gpu->closed)
        return false;
    if (take(gpu, kind, bytes))
        return true;
    struct quiet quiet = quiet_begin();
    process_check();
    lease_allocation_begin();
    uint64_t since_ms = now_ms() - allocation.waited_ms; /* another thread may wait, and this one with it */
    pthread_mutex_lock(&tangram.requesting);
    bool taken = take(gpu, kind, bytes) || request_memory(gpu, kind, bytes, &since_ms);
    pthread_mutex_unlock(&tangram.requesting);
    allocation.waited_ms = now_ms() - since_ms;
    lease_allocation_end();
    quiet_end(quiet);
    return taken;
}

bool lease_reserve(struct gpu *gpu, uint64_t bytes)
{
    return lease_reserve_as(gpu, WIRE_RESIDENT, bytes);
}

/* What is not needed any more stays leased, so that the next allocation of that size requests nothing. The arbiter recalls it
 * when a sibling needs it, and lease_surplus returns what stays unused for a while. Without a helper no thread would answer a recall: all
 * that is not needed is returned at once. */
void lease_give_back_as(struct gpu *gpu, enum wire_lease_kind kind, uint64_t bytes)
{
    atomic_fetch_add(unused_of(gpu, kind), bytes);
    if (UNLIKELY(!link_has_helper())) {
        link_return_all(gpu);
        link_settle(gpu); /* a request of a sibling after this free returned is to find it free */
    }
}

void lease_give_back(struct gpu *gpu, uint64_t bytes)
{
    lease_give_back_as(gpu, WIRE_RESIDENT, bytes);
}

uint64_t lease_surplus_of(struct gpu *gpu, uint64_t idle_bytes)
{
    uint64_t chunk = lease_chunk_bytes(gpu);
    return idle_bytes > CHUNKS_KEPT * chunk ? idle_bytes - chunk : 0;
}

/* What of the unused lease will not be needed soon: all of it in a process that uses nothing of that kind. */
uint64_t lease_surplus_bytes(struct gpu *gpu, enum wire_lease_kind kind)
{
    uint64_t unused = atomic_load(unused_of(gpu, kind));
    return unused == atomic_load(leased_of(gpu, kind)) ? unused : lease_surplus_of(gpu, unused);
}

/* A lease is subtracted on the page and not received yet, or returned and not added on the page yet. */
static bool is_on_the_way(struct gpu *gpu)
{
    return atomic_load_explicit(&tangram.contexts.of[gpu->at].chunk_seq, memory_order_relaxed) != 0 ||
           atomic_load_explicit(&tangram.link.given_seq, memory_order_relaxed) != 0;
}

/* What could be allocated now of such a limit, as far as this process knows without a request. It does not wait for an arbiter that is away. */
uint64_t lease_free_of(struct gpu *gpu, uint64_t limit_bytes)
{
    uint64_t unleased = 0, unused;
    uint32_t gives;
    if (gpu->closed)
        return 0;
    do {
        gives = atomic_load_explicit(&tangram.link.gives, memory_order_acquire);
        if (UNLIKELY(is_on_the_way(gpu)))
            link_settle(gpu);
        unused = lease_unused_bytes(gpu);
        link_unleased(gpu, &unleased);
    } while (UNLIKELY(gives != atomic_load_explicit(&tangram.link.gives, memory_order_acquire)));
    uint64_t leased = lease_leased_bytes(gpu);
    uint64_t kept = atomic_load_explicit(&gpu->kept_bytes, memory_order_relaxed) + /* of elastic memory: leased, and released when it is needed */
                    atomic_load_explicit(&gpu->discarding_bytes, memory_order_relaxed);
    unused += kept;
    uint64_t used = leased > unused ? leased - unused : 0;
    uint64_t free_bytes = unused + unleased;
    if (used >= limit_bytes)
        return 0;
    return free_bytes < limit_bytes - used ? free_bytes : limit_bytes - used;
}

uint64_t lease_free_bytes(struct gpu *gpu)
{
    return lease_free_of(gpu, atomic_load_explicit(&gpu->limit_bytes, memory_order_relaxed));
}
