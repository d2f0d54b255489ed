/* created_calls.c - the driver's functions, for memory of created.c. Each is one call of the driver, but for what is away. */
#include "hooks/hook.h"
#include "memory/memory.h"

#include <stdlib.h>

CUresult created_map(CUdeviceptr at, uint64_t bytes, uint64_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    struct quiet quiet = created_enter();
    struct created *created = created_here(handle);
    if (created == NULL)
        rc = created_unknown();
    else if (created_map_at(created_map_from(at), at, bytes) == NULL) { /* what is away has its addresses still */
        struct created_map *map = created_map_new(at, bytes, offset, created);
        rc = map == NULL ? CUDA_ERROR_OUT_OF_MEMORY : tangram.driver.cuMemMap(at, bytes, offset, created_block(created)->handle, flags);
        if (rc == CUDA_SUCCESS)
            created_map_add(map);
        else
            free(map);
    }
    created_leave(quiet, NULL);
    return rc;
}

CUresult created_release(CUmemGenericAllocationHandle handle)
{
    struct created *ended = NULL;
    struct quiet quiet = created_enter();
    struct created *created = created_of(handle);
    if (created != NULL) {
        created->handles--;
        created_end_if_left(created, &ended);
    }
    created_leave(quiet, ended);
    return created != NULL ? CUDA_SUCCESS : created_unknown();
}

static bool is_whole(const struct created_map *map, CUdeviceptr at, uint64_t bytes)
{
    return map->at >= at && map->bytes <= bytes && map->at - at <= bytes - map->bytes;
}

/* What is mapped in the range, from `at` up to the next mapping that is away, which is *away (NULL: none), or to the end. */
static uint64_t part(CUdeviceptr at, uint64_t bytes, struct created_map **away)
{
    size_t i = created_map_from(at);
    while ((*away = created_map_at(i, at, bytes)) != NULL && !created_is_away((*away)->of))
        i++;
    return *away != NULL ? (*away)->at - at : bytes;
}

/* Every mapping of such memory there that is away is whole. */
static bool are_whole(CUdeviceptr at, uint64_t bytes)
{
    struct created_map *map;
    for (size_t i = created_map_from(at); (map = created_map_at(i, at, bytes)) != NULL; i++)
        if (created_is_away(map->of) && !is_whole(map, at, bytes))
            return false;
    return true;
}

static void maps_remove(CUdeviceptr at, uint64_t bytes, struct created **ended)
{
    const size_t i = created_map_from(at);
    while (created_map_at(i, at, bytes) != NULL)
        created_map_remove(i, ended);
}

/* One call of the driver, but for what is away: its records are all that there is of it. */
CUresult created_unmap(CUdeviceptr at, uint64_t bytes)
{
    struct created *ended = NULL;
    struct quiet quiet = created_enter();
    CUresult rc = are_whole(at, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    while (rc == CUDA_SUCCESS && bytes > 0) {
        struct created_map *away;
        const uint64_t here = part(at, bytes, &away), its = away != NULL ? away->bytes : 0;
        if (here > 0)
            rc = tangram.driver.cuMemUnmap(at, here);
        if (rc == CUDA_SUCCESS)
            maps_remove(at, here + its, &ended);
        at += here + its;
        bytes -= here + its;
    }
    created_leave(quiet, ended);
    return rc;
}

/* Access of the block's own GPU alone. Whether another GPU can have it, only the driver can judge. */
static bool is_plain(const struct created_map *map, const CUmemAccessDesc *access, size_t count)
{
    return count == 1 && access->location.id == map->of->region->device;
}

/* Nothing there is away any more. False: at the end of the program. */
static bool is_back(CUdeviceptr at, uint64_t bytes)
{
    struct created_map *away;
    while (part(at, bytes, &away), away != NULL)
        if (!created_wait())
            return false;
    return true;
}

/* The last one counts, as for the driver. */
static void note(struct created_map *map, const CUmemAccessDesc *access, size_t count)
{
    const CUdevice own = map->of->region->device;
    for (size_t i = 0; i < count; i++)
        if (access[i].location.id == own)
            map->access = access[i].flags;
    access_note(&map->others, own, access, count);
}

/* What the records do not have in full is of resident memory. The driver refuses a part of a mapping itself, by what cuda.h specifies. */
static CUresult note_access(CUdeviceptr at, uint64_t bytes, const CUmemAccessDesc *access, size_t count, struct created **ended)
{
    struct created_map *map;
    bool whole = true;
    for (size_t i = created_map_from(at); (map = created_map_at(i, at, bytes)) != NULL; i++)
        if (is_whole(map, at, bytes))
            note(map, access, count);
        else
            whole = false;
    return whole || created_stay_in(at, bytes, ended) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult set_plain(CUdeviceptr at, uint64_t bytes, const CUmemAccessDesc *access, size_t count, struct created **ended)
{
    CUresult rc = CUDA_SUCCESS;
    while (rc == CUDA_SUCCESS && bytes > 0) {
        struct created_map *away;
        const uint64_t here = part(at, bytes, &away), its = away != NULL ? away->bytes : 0;
        if (here > 0)
            rc = tangram.driver.cuMemSetAccess(at, here, access, count);
        if (rc == CUDA_SUCCESS)
            rc = note_access(at, here + its, access, count, ended);
        at += here + its;
        bytes -= here + its;
    }
    return rc;
}

/* Anything else is of resident memory, for the records do not have it. */
static CUresult set_unusual(CUdeviceptr at, uint64_t bytes, const CUmemAccessDesc *access, size_t count, struct created **ended)
{
    return created_stay_in(at, bytes, ended) ? tangram.driver.cuMemSetAccess(at, bytes, access, count) : CUDA_ERROR_INVALID_VALUE;
}

CUresult created_set_access(CUdeviceptr at, uint64_t bytes, const CUmemAccessDesc *access, size_t count)
{
    if (access == NULL || count == 0)
        return tangram.driver.cuMemSetAccess(at, bytes, access, count);
    struct created *ended = NULL;
    struct quiet quiet = created_enter();
    const struct created_map *first = created_map_at(created_map_from(at), at, bytes);
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    if (first == NULL || !access_can_note(access, count))
        rc = set_unusual(at, bytes, access, count, &ended);
    else if ((is_plain(first, access, count) || is_back(at, bytes)) && are_whole(at, bytes))
        rc = set_plain(at, bytes, access, count, &ended);
    created_leave(quiet, ended);
    return rc;
}

CUresult created_address_free(CUdeviceptr at, uint64_t bytes)
{
    struct created_map *away;
    struct quiet quiet = created_enter();
    part(at, bytes, &away);
    const CUresult rc = away != NULL ? CUDA_ERROR_INVALID_VALUE : tangram.driver.cuMemAddressFree(at, bytes);
    created_leave(quiet, NULL);
    return rc;
}

CUresult created_properties(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    struct quiet quiet = created_enter();
    const struct created *created = prop != NULL ? created_of(handle) : NULL;
    if (created != NULL)
        *prop = created->prop;
    created_leave(quiet, NULL);
    return created != NULL ? CUDA_SUCCESS : prop != NULL ? created_unknown() : CUDA_ERROR_INVALID_VALUE;
}

bool created_retain(CUmemGenericAllocationHandle *handle, CUdeviceptr at, CUresult *rc)
{
    struct created_found found;
    if (!created_find_locked(at, &found))
        return false;
    *rc = handle != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (handle != NULL) {
        found.map->of->handles++;
        *handle = created_handle(found.block);
    }
    created_unlock(&found);
    return true;
}
