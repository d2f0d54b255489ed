/* created_hooks.c - functions of the driver that are hooked for memory of created.c alone. */
#include "gputime/launching.h"
#include "hooks/hook.h"
#include "memory/memory.h"

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    NEEDS(cuMemGetAllocationPropertiesFromHandle);
    return created_is(handle) ? created_properties(prop, handle) : tangram.driver.cuMemGetAllocationPropertiesFromHandle(prop, handle);
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    NEEDS(cuMemSetAccess);
    if (UNLIKELY(elastic_in(at, bytes)))
        return CUDA_ERROR_INVALID_VALUE; /* as for any memory of cuMemAlloc */
    return created_in(at, bytes) ? created_set_access(at, bytes, access, count) : tangram.driver.cuMemSetAccess(at, bytes, access, count);
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr at)
{
    NEEDS(cuMemGetAccess);
    struct created_found found;
    struct elastic_found elastic;
    if (elastic_find(at, &elastic))
        await_memory();
    if (!created_find_locked(at, &found))
        return tangram.driver.cuMemGetAccess(flags, location, at);
    CUresult rc = CUDA_SUCCESS;
    const CUmemLocation *own = &found.map->of->prop.location;
    if (found.away && flags != NULL && location != NULL && location->type == own->type && location->id >= 0 && location->id < PEER_DEVICES)
        *flags = (unsigned)(location->id == own->id ? found.map->access : access_of(&found.map->others, location->id));
    else
        rc = tangram.driver.cuMemGetAccess(flags, location, at);
    created_unlock(&found);
    return rc;
}

/* The driver would free the addresses of what is away, for nothing is mapped there. */
EXPORT CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes)
{
    NEEDS(cuMemAddressFree);
    if (UNLIKELY(elastic_in(at, bytes)))
        return CUDA_ERROR_INVALID_VALUE; /* as for any memory of cuMemAlloc */
    if (!created_in(at, bytes))
        return tangram.driver.cuMemAddressFree(at, bytes);
    return created_address_free(at, bytes);
}

/* What is bound to an object of several GPUs is not swapped: others have its physical addresses. Memory of cuMemAlloc cannot be bound. */
#define BIND_MEMORY(name, params, arguments)                                                                                   \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        if (!created_is(memory))                                                                                               \
            return tangram.driver.name arguments;                                                                              \
        struct block *block;                                                                                                   \
        CUresult rc = created_fix(memory, &memory, &block);                                                                    \
        if (rc != CUDA_SUCCESS)                                                                                                \
            return rc;                                                                                                         \
        rc = tangram.driver.name arguments;                                                                                    \
        vmm_let_go(block);                                                                                                     \
        return rc;                                                                                                             \
    }
#define BIND_ADDRESS(name, params, arguments)                                                                                  \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct elastic_found found;                                                                                            \
        if (elastic_find((CUdeviceptr)at, &found))                                                                             \
            return CUDA_ERROR_INVALID_VALUE;                                                                                   \
        if (created_in((CUdeviceptr)at, bytes) && !created_fix_range((CUdeviceptr)at, bytes))                                  \
            return CUDA_ERROR_OUT_OF_MEMORY; /* the driver's error where a bind lacks resources (specified: cuda.h) */         \
        return tangram.driver.name arguments;                                                                                  \
    }

BIND_MEMORY(cuMulticastBindMem,
            (CUmemGenericAllocationHandle object, size_t offset, CUmemGenericAllocationHandle memory, size_t memory_offset, size_t bytes, unsigned long long flags),
            (object, offset, memory, memory_offset, bytes, flags))
BIND_MEMORY(cuMulticastBindMem_v2,
            (CUmemGenericAllocationHandle object, CUdevice device, size_t offset, CUmemGenericAllocationHandle memory, size_t memory_offset, size_t bytes,
             unsigned long long flags),
            (object, device, offset, memory, memory_offset, bytes, flags))
BIND_MEMORY(cuLogicalEndpointBindMem,
            (unsigned int endpoint, CUdevice device, cuuint64_t offset, CUmemGenericAllocationHandle memory, cuuint64_t memory_offset, cuuint64_t bytes,
             unsigned long long flags),
            (endpoint, device, offset, memory, memory_offset, bytes, flags))
BIND_ADDRESS(cuMulticastBindAddr, (CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr at, size_t bytes, unsigned long long flags),
             (object, offset, at, bytes, flags))
BIND_ADDRESS(cuMulticastBindAddr_v2, (CUmemGenericAllocationHandle object, CUdevice device, size_t offset, CUdeviceptr at, size_t bytes, unsigned long long flags),
             (object, device, offset, at, bytes, flags))
BIND_ADDRESS(cuLogicalEndpointBindAddr, (unsigned int endpoint, CUdevice device, cuuint64_t offset, void *at, cuuint64_t bytes, unsigned long long flags),
             (endpoint, device, offset, at, bytes, flags))
