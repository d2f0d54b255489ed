/* pool.c - what a pool reserves of the GPU, charged as the driver reports it.
 *
 * A pool grows by more than is requested, and keeps what is freed until it is trimmed or the program synchronises. So the
 * lease is charged what the driver reports that the pool has reserved. A call that may make it grow first reserves from the lease: the
 * size rounded to the step in which this pool was seen to grow. If the lease has less, the call may still use the pool's idle memory,
 * which is charged already; two calls are never assigned the same idle bytes. After the call the records follow the driver,
 * and nothing returns to the lease while idle bytes are assigned.
 */
#include "memory/pool.h"

#include <stdlib.h>

#include "memory/memory.h"

enum { SETTLE_TRIES = 16 };
static const uint64_t STEP_LEAST = 2 * MIB, /* the driver's physical page */
    STEP_GENEROUS = 32 * MIB;               /* by which real drivers let the default pool grow; guessed for drivers after 580 */

static uint64_t rounded(uint64_t bytes, uint64_t to)
{
    return (bytes + to - 1) / to * to;
}

static struct pool *find(CUmemoryPool handle, CUdevice device)
{
    for (struct pool *pool = atomic_load(&tangram.pools); pool != NULL; pool = pool->next)
        if (pool->handle == handle && pool->device == device && !atomic_load_explicit(&pool->gone, memory_order_relaxed))
            return pool;
    return NULL;
}

struct pool *pool_known(CUmemoryPool handle)
{
    for (struct pool *pool = atomic_load(&tangram.pools); pool != NULL; pool = pool->next)
        if (pool->handle == handle && !atomic_load_explicit(&pool->gone, memory_order_relaxed))
            return pool;
    return NULL;
}

/* Locked. The place of a pool that was destroyed and has no memory any more, or a new one at the head of the list; NULL: no memory. */
static struct pool *vacant(void)
{
    for (struct pool *pool = atomic_load(&tangram.pools); pool != NULL; pool = pool->next)
        if (atomic_load(&pool->gone) && atomic_load(&pool->live) == 0 && pool->charged + pool->in_flight + pool->promised == 0)
            return pool;
    struct pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return NULL;
    atomic_store(&pool->gone, true);
    pool->next = atomic_load(&tangram.pools);
    atomic_store(&tangram.pools, pool);
    return pool;
}

/* Nothing is taken out of the list, so a walk needs no lock; places are used again, so it is no longer than there were pools at once. */
struct pool *pool_record(CUmemoryPool handle, CUdevice device, struct gpu *gpu, bool managed)
{
    pthread_mutex_lock(&tangram.pools_lock);
    struct pool *pool = find(handle, device);
    if (pool == NULL && (pool = vacant()) != NULL) {
        pool->handle = handle;
        pool->device = device;
        pool->gpu = gpu;
        pool->managed = managed;
        atomic_store(&pool->step, 0);
        atomic_store(&pool->swaps, false);
        atomic_store(&pool->pooled, NULL);
        atomic_store(&pool->freed, false);
        atomic_store(&pool->gone, false);
    }
    pthread_mutex_unlock(&tangram.pools_lock);
    return pool;
}

bool pool_of_stream(CUstream stream, struct pool **pool)
{
    CUdevice device;
    CUmemoryPool handle;
    CUresult rc = device_of_stream(stream, &device);
    *pool = NULL;
    if (rc == CUDA_SUCCESS)
        rc = tangram.driver.cuDeviceGetMemPool(&handle, device);
    if (rc != CUDA_SUCCESS)
        return is_drivers_answer(rc);
    *pool = pool_known(handle);
    if (*pool == NULL && (*pool = pool_record(handle, device, gpu_of_device(device), false)) != NULL)
        pooled_note_default(*pool);
    return *pool != NULL;
}

struct pool *pool_of_graphs(CUdevice device)
{
    struct pool *pool = find(NULL, device);
    return pool != NULL ? pool : pool_record(NULL, device, gpu_of_device(device), false);
}

static bool query_memory(struct pool *pool, bool used, uint64_t *bytes)
{
    cuuint64_t value = 0;
    CUresult rc = CUDA_ERROR_NOT_SUPPORTED;
    if (pool->handle != NULL && HAS(cuMemPoolGetAttribute))
        rc = tangram.driver.cuMemPoolGetAttribute(
            pool->handle, used ? CU_MEMPOOL_ATTR_USED_MEM_CURRENT : CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &value);
    else if (pool->handle == NULL && HAS(cuDeviceGetGraphMemAttribute))
        rc = tangram.driver.cuDeviceGetGraphMemAttribute(
            pool->device, used ? CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT : CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &value);
    *bytes = value;
    return rc == CUDA_SUCCESS;
}

/* Locked, so no other thread counts it up. */
static void settled(struct pool *pool)
{
    atomic_store_explicit(&pool->version, atomic_load(&pool->version) + 1, memory_order_release);
}

/* Locked. So much is taken from the lease for it; of a managed pool that is counted apart, too. */
static void charge(struct pool *pool, uint64_t bytes)
{
    if (pool->managed)
        atomic_fetch_add(&pool->gpu->managed_bytes, bytes - pool->charged);
    pool->charged = bytes;
}

/* Locked. The pool grew by this much for one call: by what steps does it grow? */
static void learn_step(struct pool *pool, uint64_t requested, uint64_t grown)
{
    uint64_t least = rounded(requested, STEP_LEAST);
    uint64_t step = grown <= least ? STEP_LEAST : grown <= rounded(requested, STEP_GENEROUS) ? STEP_GENEROUS : rounded(grown, STEP_LEAST);
    if (step > atomic_load(&pool->step))
        atomic_store(&pool->step, step);
}

/* Locked. Moves what the call took into what is charged, as far as `reserved` needs it. Returns what is left over. */
static uint64_t charge_growth(struct pool *pool, struct growth *growth, uint64_t reserved, uint64_t *missing)
{
    uint64_t before = pool->charged, left = 0;
    pool->in_flight -= growth->taken;
    pool->promised -= growth->promised;
    charge(pool, pool->charged + growth->taken);
    *missing = reserved > pool->charged + pool->in_flight ? reserved - pool->charged - pool->in_flight : 0;
    if (growth->bytes > 0 && pool->in_flight == 0 && reserved > before)
        learn_step(pool, growth->bytes, reserved - before);
    if (pool->charged > reserved && pool->promised == 0) {
        left = pool->charged - reserved;
        charge(pool, reserved);
    }
    settled(pool);
    return left;
}

bool growth_end(struct growth *growth)
{
    struct pool *pool = growth->pool;
    uint64_t reserved = 0, missing = 0, left = 0;
    for (unsigned tries = 0;; tries++) {
        uint64_t version = atomic_load(&pool->version);
        bool known = query_memory(pool, false, &reserved);
        pthread_mutex_lock(&tangram.pools_lock);
        if (!known) /* then what was taken stays charged */
            reserved = pool->charged + growth->taken;
        if (atomic_load(&pool->version) == version || tries >= SETTLE_TRIES) {
            left = charge_growth(pool, growth, reserved, &missing);
            pthread_mutex_unlock(&tangram.pools_lock);
            break;
        }
        pthread_mutex_unlock(&tangram.pools_lock); /* another thread settled since the query: the driver's answer is old */
    }
    if (left > 0)
        lease_give_back(pool->gpu, left);
    if (missing == 0)
        return true;
    if (!lease_reserve(pool->gpu, missing))
        return false;
    pthread_mutex_lock(&tangram.pools_lock);
    charge(pool, pool->charged + missing);
    settled(pool);
    pthread_mutex_unlock(&tangram.pools_lock);
    return true;
}

/* Assigns idle bytes of the pool. They count as idle when they are charged, not used, and not assigned to another call. */
static bool promise(struct pool *pool, uint64_t bytes)
{
    uint64_t used;
    for (unsigned tries = 0; tries < SETTLE_TRIES; tries++) {
        uint64_t version = atomic_load(&pool->version);
        if (!query_memory(pool, true, &used))
            return false;
        pthread_mutex_lock(&tangram.pools_lock);
        bool fresh = atomic_load(&pool->version) == version;
        uint64_t wanted = used + pool->promised + pool->in_flight;
        bool idle = fresh && pool->charged >= wanted && pool->charged - wanted >= bytes;
        if (idle)
            pool->promised += bytes;
        pthread_mutex_unlock(&tangram.pools_lock);
        if (fresh)
            return idle;
    }
    return false;
}

bool growth_begin(struct growth *growth, struct pool *pool, uint64_t bytes)
{
    *growth = (struct growth){.pool = pool, .bytes = bytes};
    if (bytes == 0)
        return true;
    if (bytes > UINT64_MAX / 2)
        return false;
    uint64_t step = atomic_load(&pool->step);
    uint64_t generous = rounded(bytes, step > 0 ? step : STEP_GENEROUS), least = rounded(bytes, STEP_LEAST);
    if (lease_take(pool->gpu, generous)) {
        growth->taken = generous;
    } else if (promise(pool, bytes)) {
        growth->promised = bytes;
    } else if (reserve(pool->gpu, generous)) {
        growth->taken = generous;
    } else if (step <= STEP_LEAST && reserve(pool->gpu, least)) { /* a pool that is known to grow by more would go over */
        growth->taken = least;
    } else {
        return false;
    }
    pthread_mutex_lock(&tangram.pools_lock);
    pool->in_flight += growth->taken;
    pthread_mutex_unlock(&tangram.pools_lock);
    return true;
}

bool growth_again(struct growth *growth, struct pool *pool, uint64_t bytes)
{
    *growth = (struct growth){.pool = pool, .bytes = bytes};
    if (promise(pool, bytes))
        growth->promised = bytes;
    else if (lease_take(pool->gpu, bytes))
        growth->taken = bytes;
    pthread_mutex_lock(&tangram.pools_lock);
    pool->in_flight += growth->taken;
    pthread_mutex_unlock(&tangram.pools_lock);
    return true;
}

void pool_settle(struct pool *pool)
{
    struct growth none = {.pool = pool};
    atomic_store(&pool->freed, false);
    growth_end(&none);
}

void pool_trim(struct pool *pool)
{
    CUstreamCaptureMode mode = relax();
    atomic_fetch_add(&pool->trims, 1);
    if (pool->handle != NULL && HAS(cuMemPoolTrimTo))
        tangram.driver.cuMemPoolTrimTo(pool->handle, 0);
    else if (pool->handle == NULL && HAS(cuDeviceGraphMemTrim))
        tangram.driver.cuDeviceGraphMemTrim(pool->device);
    relax_end(mode);
    pool_settle(pool);
}

void pool_freed(struct pool *pool)
{
    atomic_fetch_sub(&pool->live, 1);
    atomic_store(&pool->freed, true);
    atomic_store(&tangram.unsettled, true);
}

void pools_may_have_shrunk(struct gpu *gpu)
{
    for (struct pool *pool = atomic_load(&tangram.pools); pool != NULL; pool = pool->next)
        if (pool->gpu != NULL && (gpu == NULL || pool->gpu == gpu)) {
            atomic_store(&pool->freed, true);
            atomic_store(&tangram.unsettled, true);
        }
}

static uint64_t charged_of(struct pool *pool)
{
    pthread_mutex_lock(&tangram.pools_lock);
    uint64_t charged = pool->charged;
    pthread_mutex_unlock(&tangram.pools_lock);
    return charged;
}

/* A destroyed pool cannot be queried: the driver frees it with its last pointer. */
static bool settle_gone(struct pool *pool)
{
    if (atomic_load(&pool->live) > 0)
        return true;
    pthread_mutex_lock(&tangram.pools_lock);
    uint64_t back = pool->charged;
    charge(pool, 0);
    pthread_mutex_unlock(&tangram.pools_lock);
    lease_give_back(pool->gpu, back);
    return false;
}

/* Another synchronisation may bring more when the pool still has more than its pointers and its threshold account for. */
static bool more_may_come(struct pool *pool)
{
    uint64_t used;
    cuuint64_t keep = 0;
    if (pool->handle == NULL || !query_memory(pool, true, &used))
        return false;
    tangram.driver.cuMemPoolGetAttribute(pool->handle, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep);
    uint64_t floor = rounded(used > keep ? used : keep, STEP_LEAST);
    return floor >= used && charged_of(pool) > floor;
}

void pools_synchronized(void)
{
    bool more = false;
    atomic_store(&tangram.unsettled, false);
    late_settle(&more);
    more |= pooled_synchronized();
    for (struct pool *pool = atomic_load(&tangram.pools); pool != NULL; pool = pool->next) {
        if (pool->gpu == NULL)
            continue;
        if (atomic_load(&pool->gone)) {
            if (charged_of(pool) > 0)
                more |= settle_gone(pool);
        } else if (atomic_load(&pool->freed)) {
            pool_settle(pool);
            if (more_may_come(pool)) {
                atomic_store(&pool->freed, true);
                more = true;
            }
        }
    }
    if (more)
        atomic_store(&tangram.unsettled, true);
}

bool pools_reclaim(struct gpu *gpu)
{
    bool left, came = late_settle(&left);
    for (struct pool *pool = atomic_load(&tangram.pools); pool != NULL; pool = pool->next) {
        uint64_t before = pool->gpu == gpu && !atomic_load(&pool->gone) ? charged_of(pool) : 0;
        if (before == 0)
            continue;
        pool_trim(pool);
        came |= charged_of(pool) < before;
    }
    return came;
}

/* In a forked child: left, not freed, as the tables are. */
void pools_forget_all(void)
{
    atomic_store(&tangram.pools, NULL);
}
