/* peers.c - memory that can be swapped, and the other GPUs of this process.
 *
 * What cuCtxEnablePeerAccess opens is what cuMemAlloc returns, now or later; mapped memory has access by device, and only what cuMemSetAccess named. So
 * the library follows which context may use which, and a block of a GPU is open to each device with a context that may use some context of that GPU. That is
 * more than the driver gives: another context of the device, and what other contexts of the GPU allocated.
 *
 * A block is opened when access is enabled, when it is made, and when it is made again after a swap. The lock is held from the look at who may use it until
 * it is in the records, so that no block is missed; and where blocks are unmapped, so that none is opened whose addresses are another's by then.
 *
 * A pool's memory has the access of the pool (cuMemPoolSetAccess). Of memory of cuMemCreate the access is the program's own: created.c.
 */
#include "hooks/hook.h"
#include "memory/memory.h"
#include "memory/pool.h"

#include <stdlib.h>

static struct elastic *const elastic = &tangram.elastic;
static struct peers *const all = &tangram.elastic.peers;

struct peers_held peers_enter(void)
{
    struct peers_held held = {.locked = atomic_load(&tangram.hot.several_gpus)};
    if (held.locked) {
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &held.cancelling);
        pthread_mutex_lock(&all->lock);
    }
    return held;
}

void peers_leave(struct peers_held held)
{
    if (held.locked) {
        pthread_mutex_unlock(&all->lock);
        pthread_setcancelstate(held.cancelling, NULL);
    }
}

bool access_can_note(const CUmemAccessDesc *access, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const unsigned flags = (unsigned)access[i].flags;
        if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || access[i].location.id < 0 || access[i].location.id >= PEER_DEVICES ||
            (flags != 0 && flags != 1 && flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE))
            return false;
    }
    return true;
}

void access_note(struct access *others, CUdevice own, const CUmemAccessDesc *access, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const uint64_t bit = (uint64_t)1 << access[i].location.id;
        if (access[i].location.id == own)
            continue;
        others->some = (unsigned)access[i].flags != 0 ? others->some | bit : others->some & ~bit;
        others->write = access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? others->write | bit : others->write & ~bit;
    }
}

static CUmemAccessDesc described(CUdevice device, CUmemAccess_flags flags)
{
    return (CUmemAccessDesc){.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}, .flags = flags};
}

unsigned access_list(CUdevice own, CUmemAccess_flags flags, const struct access *others, CUmemAccessDesc list[PEER_DEVICES + 1])
{
    unsigned count = 0;
    if ((unsigned)flags != 0)
        list[count++] = described(own, flags);
    for (uint64_t left = others->some; left != 0; left &= left - 1) {
        const CUdevice device = __builtin_ctzll(left);
        list[count++] = described(device, access_of(others, device));
    }
    return count;
}

struct access peers_access(const struct elastic_region *region)
{
    const uint64_t opened = region->device < PEER_DEVICES ? all->opened[region->device] : 0;
    return region->pool != NULL ? region->pool->others : (struct access){opened, opened};
}

/* Where the next block at or above *next is that is mapped: of the pool, or without one, of the device. */
static bool next_block(uint64_t *next, CUdevice device, const struct pooled *pool, uint64_t *at, uint64_t *bytes)
{
    struct elastic_block *block;
    lock_acquire(&elastic->lock);
    while ((block = block_from(*next)) != NULL) {
        *next = block->at + block->bytes;
        *at = block->at;
        *bytes = block->bytes;
        if (block->region->pool == pool && (pool != NULL || block->region->device == device) && block->state != BLOCK_AWAY)
            break;
    }
    lock_release(&elastic->lock);
    return block != NULL;
}

/* With the lock: a region that leaves the records meanwhile is unmapped after it. */
static CUresult open_all(CUdevice device, const struct pooled *pool, const CUmemAccessDesc *access, size_t count)
{
    CUresult rc = CUDA_SUCCESS;
    uint64_t next = 0, at, bytes;
    CUstreamCaptureMode mode = relax();
    while (rc == CUDA_SUCCESS && next_block(&next, device, pool, &at, &bytes))
        rc = tangram.driver.cuMemSetAccess(at, bytes, access, count);
    relax_end(mode);
    return rc;
}

CUresult peers_open_pool(struct pooled *pool, const CUmemAccessDesc *access, size_t count)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&all->lock);
    access_note(&pool->others, pool->device, access, count);
    const CUresult rc = open_all(pool->device, pool, access, count);
    pthread_mutex_unlock(&all->lock);
    quiet_end(quiet);
    return rc;
}

/* With the lock. */
static uint64_t devices_of(CUdevice device)
{
    uint64_t found = 0;
    for (size_t i = 0; i < all->peers; i++)
        if (all->peer[i].of_device == device && all->peer[i].device != device)
            found |= (uint64_t)1 << all->peer[i].device;
    return found;
}

/* With the lock: the blocks of a device follow the list. */
static CUresult follow(CUdevice device)
{
    const uint64_t before = all->opened[device], now = devices_of(device);
    CUmemAccessDesc list[PEER_DEVICES + 1];
    unsigned count = 0;
    for (uint64_t left = before ^ now; left != 0; left &= left - 1) {
        const CUdevice other = __builtin_ctzll(left);
        list[count++] = described(other, (now >> other & 1) != 0 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : (CUmemAccess_flags)0);
    }
    all->opened[device] = now;
    return count > 0 ? open_all(device, NULL, list, count) : CUDA_SUCCESS;
}

/* With the lock. */
static void forget_if(bool (*is_its)(const struct peer *peer, const struct peer *what), const struct peer *what)
{
    uint64_t changed = 0;
    size_t kept = 0;
    for (size_t i = 0; i < all->peers; i++)
        if (is_its(&all->peer[i], what))
            changed |= (uint64_t)1 << all->peer[i].of_device;
        else
            all->peer[kept++] = all->peer[i];
    all->peers = kept;
    for (; changed != 0; changed &= changed - 1)
        follow(__builtin_ctzll(changed)); /* where the driver refuses, they keep the access */
}

static bool is_same(const struct peer *peer, const struct peer *what)
{
    return peer->from == what->from && peer->of == what->of;
}

static bool is_of_context(const struct peer *peer, const struct peer *what)
{
    return peer->from == what->from || peer->of == what->from;
}

/* A list of structs, so not grow_for's. */
static bool has_room(void)
{
    if (all->peers < all->capacity)
        return true;
    const size_t more = all->capacity * 2 > 16 ? all->capacity * 2 : 16;
    struct peer *moved = realloc(all->peer, more * sizeof *moved);
    if (moved == NULL)
        return false;
    all->peer = moved;
    all->capacity = more;
    return true;
}

/* With the lock. A context that ended without a call that is hooked may have had these handles: they stand once. */
static CUresult add(const struct peer *peer)
{
    for (size_t i = 0; i < all->peers; i++)
        if (is_same(&all->peer[i], peer))
            return CUDA_SUCCESS;
    if (!has_room())
        return CUDA_ERROR_OUT_OF_MEMORY;
    all->peer[all->peers++] = *peer;
    const CUresult rc = follow(peer->of_device);
    if (rc != CUDA_SUCCESS)
        forget_if(is_same, peer);
    return rc;
}

static CUresult device_of_context(CUcontext context, CUdevice *device)
{
    CUcontext popped;
    CUresult rc = tangram.driver.cuCtxPushCurrent_v2(context);
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = tangram.driver.cuCtxGetDevice(device);
    tangram.driver.cuCtxPopCurrent_v2(&popped);
    return rc == CUDA_SUCCESS && *device >= PEER_DEVICES ? CUDA_ERROR_NOT_SUPPORTED : rc;
}

static CUresult peer_of(CUcontext of, struct peer *peer)
{
    *peer = (struct peer){.of = of};
    CUresult rc = tangram.driver.cuCtxGetCurrent(&peer->from);
    if (rc == CUDA_SUCCESS)
        rc = device_of_context(peer->from, &peer->device);
    return rc == CUDA_SUCCESS ? device_of_context(of, &peer->of_device) : rc;
}

/* Noted also where nothing bursts yet. */
EXPORT CUresult cuCtxEnablePeerAccess(CUcontext of, unsigned int flags)
{
    NEEDS(cuCtxEnablePeerAccess);
    struct peer peer;
    CUresult rc = tangram.driver.cuCtxEnablePeerAccess(of, flags);
    if (rc != CUDA_SUCCESS || grant_ready() != GRANT_GOOD)
        return rc;
    rc = peer_of(of, &peer);
    if (rc == CUDA_SUCCESS) {
        struct quiet quiet = quiet_begin();
        pthread_mutex_lock(&all->lock);
        rc = add(&peer);
        pthread_mutex_unlock(&all->lock);
        quiet_end(quiet);
    }
    if (rc != CUDA_SUCCESS && HAS(cuCtxDisablePeerAccess))
        tangram.driver.cuCtxDisablePeerAccess(of);
    return rc;
}

static void forget(bool (*is_its)(const struct peer *peer, const struct peer *what), const struct peer *what)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&all->lock);
    forget_if(is_its, what);
    pthread_mutex_unlock(&all->lock);
    quiet_end(quiet);
}

EXPORT CUresult cuCtxDisablePeerAccess(CUcontext of)
{
    NEEDS(cuCtxDisablePeerAccess);
    struct peer peer = {.of = of};
    const CUresult rc = tangram.driver.cuCtxDisablePeerAccess(of);
    if (rc == CUDA_SUCCESS && tangram.driver.cuCtxGetCurrent(&peer.from) == CUDA_SUCCESS)
        forget(is_same, &peer);
    return rc;
}

void peers_forget_context(CUcontext context)
{
    forget(is_of_context, &(struct peer){.from = context});
}
