/* created_stay.c - memory of created.c that becomes resident, because something that is not followed is to use it: an export, an array, a multicast
 * object, another place's access.
 *
 * Its lease becomes resident first, within the guarantee. That waits for the arbiter, which may have to swap this process's memory meanwhile. So
 * the lock is released: the block does not end then (`needed`), and is not swapped (`staying`). If the guarantee has no room for it, the
 * program's call fails, and the block is as before.
 */
#include "hooks/hook.h"
#include "memory/memory.h"

static struct elastic *const elastic = &tangram.elastic;
static struct created_all *const all = &tangram.elastic.created;

/* Live regions are chosen from; one that was chosen before is found `staying`. */
static void set(struct created *created, bool staying, bool resident)
{
    lock_acquire(&elastic->lock);
    created->staying = staying;
    created->resident = resident;
    created->region->live = !staying && !resident;
    if (resident)
        atomic_fetch_sub(&created->region->gpu->elastic_bytes, created->region->bytes);
    lock_release(&elastic->lock);
}

/* Locked, but for the conversion. */
static bool convert(struct created *created)
{
    set(created, true, false);
    pthread_mutex_unlock(&all->lock);
    const bool fits = lease_convert(created->region->gpu, created->region->bytes);
    pthread_mutex_lock(&all->lock);
    if (fits)
        vmm_converted(created->charge);
    set(created, false, fits);
    pthread_cond_broadcast(&all->back);
    if (!fits)
        warn(WARN_CREATED_STAYS,
             "memory of cuMemCreate that is exported, or used in an array or a multicast object, stays on the GPU: "
             "%llu MiB of it do not fit into the container's guarantee, and the call is refused",
             (unsigned long long)(created->region->bytes / MIB));
    return fits;
}

/* Locked. Its content is in the host's memory, also where it is made again: so it may still be unmade. */
static bool is_out(const struct created *created)
{
    lock_acquire(&elastic->lock);
    const enum block_state state = created_block(created)->state;
    lock_release(&elastic->lock);
    return state == BLOCK_AWAY || state == BLOCK_MADE;
}

/* Locked, but while it waits. The block is needed, and stays so. False: it does not fit. */
static bool stay(struct created *created)
{
    while (!created->resident && (created->staying || is_out(created)))
        if (created->staying)
            pthread_cond_wait(&all->back, &all->lock);
        else if (!created_wait())
            return false;
    return created->resident || convert(created);
}

static void unneeded(struct created *created, struct created **ended)
{
    created->needed--;
    created_end_if_left(created, ended);
}

CUresult created_export(void *os_handle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags)
{
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    struct created *ended = NULL;
    struct quiet quiet = created_enter();
    struct created *created = created_of(handle);
    if (created == NULL)
        rc = created_unknown();
    else if (((unsigned)created->prop.requestedHandleTypes & (unsigned)type) != 0) {
        created->needed++;
        rc = CUDA_ERROR_OUT_OF_MEMORY;
        if (stay(created)) {
            vmm_exported(created->charge); /* before: it may be imported as soon as the driver has named it */
            rc = tangram.driver.cuMemExportToShareableHandle(os_handle, created_block(created)->handle, type, flags);
        }
        unneeded(created, &ended);
    }
    created_leave(quiet, ended);
    return rc;
}

CUresult created_fix(CUmemGenericAllocationHandle handle, CUmemGenericAllocationHandle *made, struct block **charge)
{
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    struct created *ended = NULL;
    struct quiet quiet = created_enter();
    struct created *created = created_of(handle);
    if (created == NULL) {
        rc = created_unknown();
    } else {
        created->needed++;
        rc = stay(created) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        if (rc == CUDA_SUCCESS) {
            vmm_hold(created->charge);
            *charge = created->charge;
            *made = created_block(created)->handle;
        }
        unneeded(created, &ended);
    }
    created_leave(quiet, ended);
    return rc;
}

static struct created *one_to_stay(CUdeviceptr at, uint64_t bytes)
{
    const struct created_map *map;
    size_t i = created_map_from(at);
    while ((map = created_map_at(i, at, bytes)) != NULL && map->of->resident)
        i++;
    return map != NULL ? map->of : NULL;
}

/* From the start again after each, as other threads may have mapped and unmapped meanwhile. */
bool created_stay_in(CUdeviceptr at, uint64_t bytes, struct created **ended)
{
    bool fits = true;
    for (struct created *created; fits && (created = one_to_stay(at, bytes)) != NULL;) {
        created->needed++;
        fits = stay(created);
        unneeded(created, ended);
    }
    return fits;
}

bool created_fix_range(CUdeviceptr at, uint64_t bytes)
{
    struct created *ended = NULL;
    struct quiet quiet = created_enter();
    const bool fits = created_stay_in(at, bytes, &ended);
    created_leave(quiet, ended);
    return fits;
}
