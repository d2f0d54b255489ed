/* created.c - memory that the program makes with cuMemCreate and maps itself, as expandable segments do.
 *
 * A block of it is the program's: its size and its addresses are. To swap it, the library unmaps it wherever it is mapped, releases it, makes it
 * again with the same properties, maps it at the same addresses, and restores the access. So the driver's handle changes. The program has a
 * handle of the library's own instead, which each call that takes one translates. The driver's block can be exported, which the copier
 * needs. The program sees the properties that it requested.
 *
 * Not such memory, but the driver's: what is compressed, for tiles, on the host, exportable in another way than by a descriptor, and what any
 * container without burst has. And it is resident from the moment that the program exports it, or uses it in an array or a multicast object
 * (created_stay.c).
 *
 * The program's threads run while its channels are suspended. While a block is away, unmapping, releasing and setting access are noted and
 * carried out when it is made again. Mapping waits until it is back: only the driver can judge it. A block that the program let go while it was
 * being swapped ends when it is resident again, for the arbiter counts on it.
 */
#include "memory/memory.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WAIT_NS = 10000000 }; /* after that the end of the program is noticed; guessed */

static struct elastic *const elastic = &tangram.elastic;
static struct created_all *const all = &tangram.elastic.created;

bool created_wanted(struct gpu *gpu, uint64_t bytes, const CUmemAllocationProp *prop, unsigned long long flags, CUmemAllocationProp *real)
{
    static const unsigned char none[sizeof prop->allocFlags.reserved];
    if (!atomic_load_explicit(&gpu->bursts, memory_order_relaxed))
        return false;
    gpu_note_only(); /* memory may be created before any context is current */
    if (!elastic_wanted(gpu) || flags != 0 || bytes == 0 || bytes % PAGE != 0 || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || ((unsigned)prop->requestedHandleTypes & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0 ||
        prop->win32HandleMetaData != NULL || prop->allocFlags.compressionType != 0 || prop->allocFlags.usage != 0 ||
        memcmp(prop->allocFlags.reserved, none, sizeof none) != 0)
        return false;
    *real = *prop;
    real->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return true;
}

/* Locked, or of a block that is listed: ids may have more than 48 bits. */
CUmemGenericAllocationHandle created_handle(uint64_t id)
{
    return CREATED_HANDLE | (id - elastic->ids_from);
}

uint64_t created_id(CUmemGenericAllocationHandle handle)
{
    return (handle ^ CREATED_HANDLE) + elastic->ids_from;
}

struct elastic_block *created_block(const struct created *created)
{
    return &created->region->block[0];
}

bool created_is_away(const struct created *created)
{
    lock_acquire(&elastic->lock);
    const bool away = created_block(created)->state == BLOCK_AWAY;
    lock_release(&elastic->lock);
    return away;
}

bool created_own(struct gpu *gpu, uint64_t bytes, const CUmemAllocationProp *prop, struct block *charge, CUmemGenericAllocationHandle made,
                 CUmemGenericAllocationHandle *handle)
{
    struct created *created = calloc(1, sizeof *created);
    struct elastic_region *region = calloc(1, sizeof *region + sizeof *region->block);
    bool listed = false;
    if (created != NULL && region != NULL) {
        *created = (struct created){.region = region, .charge = charge, .prop = *prop, .handles = 1};
        *region = (struct elastic_region){.gpu = gpu, .device = prop->location.id, .bytes = bytes, .kind = REGION_LARGE, .live = 1, .blocks = 1, .created = created};
        region->block[0] = (struct elastic_block){.bytes = bytes, .handle = made, .region = region};
        lock_acquire(&elastic->lock);
        listed = blocks_list(region);
        *handle = created_handle(region->block[0].id);
        lock_release(&elastic->lock);
    }
    if (!listed) {
        free(created);
        free(region);
        return false;
    }
    atomic_store(&all->any, true);
    return true;
}

struct quiet created_enter(void)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&all->lock);
    return quiet;
}

void created_leave(struct quiet quiet, struct created *ended)
{
    pthread_mutex_unlock(&all->lock);
    for (struct created *next; ended != NULL; ended = next) {
        next = ended->next_ended;
        vmm_let_go(ended->charge);
        free(ended->region);
        free(ended);
    }
    quiet_end(quiet);
}

struct created *created_of(CUmemGenericAllocationHandle handle)
{
    lock_acquire(&elastic->lock);
    const struct elastic_block *block = block_of(created_id(handle));
    struct created *created = block != NULL ? block->region->created : NULL;
    lock_release(&elastic->lock);
    return created != NULL && created->handles > 0 ? created : NULL;
}

CUresult created_unknown(void)
{
    CUcontext current;
    const CUresult rc = tangram.driver.cuCtxGetCurrent(&current);
    return rc == CUDA_ERROR_NOT_INITIALIZED || rc == CUDA_ERROR_DEINITIALIZED ? rc : CUDA_ERROR_INVALID_VALUE;
}

/* False: nothing came back within a moment. */
static bool came_back(void)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += WAIT_NS;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return pthread_cond_timedwait(&all->back, &all->lock, &until) == 0;
}

/* The arbiter brings it back as for a launch. */
bool created_wait(void)
{
    activity_waits_for_memory();
    while (!helper_ended() && !came_back())
        continue;
    activity_has_memory();
    return !helper_ended();
}

struct created *created_here(CUmemGenericAllocationHandle handle)
{
    struct created *created = created_of(handle);
    while (created != NULL && created_is_away(created)) {
        created = created_wait() ? created_of(handle) : NULL;
    }
    return created;
}

bool created_is_left(const struct created *created)
{
    return created->handles == 0 && created->map == NULL;
}

/* What the driver does not take back stays charged. */
void created_end_if_left(struct created *created, struct created **ended)
{
    if (!created_is_left(created) || created->needed > 0)
        return;
    lock_acquire(&elastic->lock);
    const bool moving = created->region->moving > 0;
    created->region->live = 0;
    if (!moving)
        blocks_unlist(created->region, !created->resident);
    lock_release(&elastic->lock);
    if (moving) {
        all->left++;
    } else if (tangram.driver.cuMemRelease(created_block(created)->handle) == CUDA_SUCCESS) {
        created->next_ended = *ended;
        *ended = created;
    } else {
        free(created->region);
        free(created);
    }
}

/* One that the program let go while it was being swapped, and that is not any more. */
static struct created *one_left(void)
{
    struct created *left = NULL;
    lock_acquire(&elastic->lock);
    for (size_t i = 0; i < elastic->blocks && left == NULL; i++) {
        struct created *created = elastic->block[i]->region->created;
        if (created != NULL && created_is_left(created) && created->needed == 0 && created->region->moving == 0)
            left = created;
    }
    lock_release(&elastic->lock);
    return left;
}

struct created *created_left_away(void)
{
    for (size_t i = 0; all->left > 0 && i < elastic->blocks; i++) {
        struct created *created = elastic->block[i]->region->created;
        if (created != NULL && created_is_left(created) && created->needed == 0 && !created->kept && !created->resident && !elastic->block[i]->leaked &&
            elastic->block[i]->state == BLOCK_AWAY)
            return created;
    }
    return NULL;
}

void created_end_all_left(struct created **ended)
{
    struct created *left;
    while (all->left > 0 && !helper_ended() && (left = one_left()) != NULL) {
        all->left--;
        created_end_if_left(left, ended);
    }
}

size_t created_map_from(CUdeviceptr at)
{
    size_t low = 0, high = all->maps;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (all->map[middle]->at + all->map[middle]->bytes <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct created_map *created_map_at(size_t i, CUdeviceptr at, uint64_t bytes)
{
    struct created_map *map = i < all->maps ? all->map[i] : NULL;
    return map != NULL && (map->at < at || map->at - at < bytes) ? map : NULL;
}

bool created_in(CUdeviceptr at, uint64_t bytes)
{
    if (bytes == 0 || !atomic_load_explicit(&all->any, memory_order_acquire))
        return false;
    struct quiet quiet = created_enter();
    const bool some = created_map_at(created_map_from(at), at, bytes) != NULL;
    created_leave(quiet, NULL);
    return some;
}

struct created_map *created_map_new(CUdeviceptr at, uint64_t bytes, uint64_t offset, struct created *created)
{
    if (!grow_for((void **)&all->map, all->maps + 1, &all->maps_capacity))
        return NULL;
    struct created_map *map = malloc(sizeof *map);
    if (map != NULL)
        *map = (struct created_map){.at = at, .bytes = bytes, .offset = offset, .there = true, .of = created, .number = atomic_fetch_add(&elastic->numbers, 1) + 1};
    return map;
}

void created_map_add(struct created_map *map)
{
    const size_t i = created_map_from(map->at);
    memmove(&all->map[i + 1], &all->map[i], (all->maps - i) * sizeof(void *));
    all->map[i] = map;
    all->maps++;
    map->next = map->of->map;
    map->of->map = map;
}

void created_map_remove(size_t i, struct created **ended)
{
    struct created_map *map = all->map[i], **place = &map->of->map;
    all->maps--;
    memmove(&all->map[i], &all->map[i + 1], (all->maps - i) * sizeof(void *));
    while (*place != map)
        place = &(*place)->next;
    *place = map->next;
    if (map->there && created_is_away(map->of))
        tangram.driver.cuMemUnmap(map->at, map->bytes); /* which it refused before */
    created_end_if_left(map->of, ended);
    free(map);
}

bool created_find_locked(CUdeviceptr at, struct created_found *found)
{
    if (!atomic_load_explicit(&all->any, memory_order_acquire))
        return false;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &found->cancelling);
    pthread_mutex_lock(&all->lock);
    found->map = created_map_at(created_map_from(at), at, 1);
    if (found->map == NULL) {
        created_unlock(found);
        return false;
    }
    found->block = created_block(found->map->of)->id;
    found->away = created_is_away(found->map->of);
    return true;
}

void created_unlock(const struct created_found *found)
{
    pthread_mutex_unlock(&all->lock);
    pthread_setcancelstate(found->cancelling, NULL);
}
