/* attributes.c - what the program learns of an elastic pointer: what the driver answers for a plain allocation.
 *
 * Measured beside each other on an H200 with driver 580 (docs/development/elastic-memory.md). The driver's answers for mapped memory differ in
 * a few, and it has none while a block is away. Two are not a plain allocation's, because the memory does not have these properties: no RDMA
 * and no hardware decompression.
 */
#include "gputime/launching.h"
#include "hooks/hook.h"
#include "memory/memory.h"

#include <string.h>

static const uint64_t BUFFER_IDS = UINT64_C(1) << 62; /* of ours; the driver counts its own from 1 */

/* What is chosen is there still, and does not leave after elastic_unable. */
static void await_memory_at(CUdeviceptr at)
{
    struct elastic_found found;
    if (UNLIKELY(launches_must_wait_for_memory()) && elastic_is_away() && (created_in(at, 1) || elastic_find(at, &found)))
        activity_await_memory();
}

static CUresult put(void *data, const void *value, size_t bytes)
{
    memcpy(data, value, bytes);
    return CUDA_SUCCESS;
}

static CUresult put_word(void *data, uint64_t value)
{
    return put(data, &value, sizeof value);
}

static CUresult put_number(void *data, unsigned value)
{
    return put(data, &value, sizeof value);
}

static CUresult attribute_of(const struct elastic_found *found, void *data, CUpointer_attribute attribute, CUdeviceptr at)
{
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        return put_word(data, found->pooled ? 0 : (uintptr_t)found->context);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        return put_word(data, at);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        return put_word(data, BUFFER_IDS | found->number);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        return put_word(data, found->at);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        return put_word(data, found->requested);
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        return put_word(data, found->mapping);
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
        return put_word(data, found->mapped);
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
        return put_word(data, BUFFER_IDS | found->block);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        return put_word(data, 0);
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        return put_word(data, (uintptr_t)found->pool);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        return put_number(data, CU_MEMORYTYPE_DEVICE);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        return put_number(data, (unsigned)found->device);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        return put_number(data, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    case CU_POINTER_ATTRIBUTE_MAPPED:
        return put_number(data, 1);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        return put_number(data, !found->opened && !found->pooled);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: /* it cannot be set */
        return put_number(data, 0);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        put_word(data, 0);
        return CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
        elastic_unable(ELASTIC_P2P_TOKENS); /* before they are known */
        break;
    default: /* what later drivers have */
        break;
    }
    await_memory();
    return tangram.driver.cuPointerGetAttribute(data, attribute, at);
}

/* Memory of cuMemCreate, while it is away: what the driver answers for it (H200, driver 580). */
static CUresult attribute_away(const struct created_map *map, void *data, CUpointer_attribute attribute, CUdeviceptr at)
{
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        return put_word(data, 0);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        return put_word(data, at);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        return put_word(data, map->at);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
        return put_word(data, map->bytes);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        return put_number(data, CU_MEMORYTYPE_DEVICE);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        return put_number(data, (unsigned)map->of->prop.location.id);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        return put_number(data, (unsigned)map->access);
    case CU_POINTER_ATTRIBUTE_MAPPED:
        return put_number(data, 1);
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
        return put_number(data, map->of->prop.allocFlags.gpuDirectRDMACapable);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: /* it cannot be set */
        return put_number(data, 0);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        put_word(data, 0);
        return CUDA_ERROR_INVALID_VALUE;
    default:
        return tangram.driver.cuPointerGetAttribute(data, attribute, at);
    }
}

/* The driver's own numbers change when a block is made again, and it may be made exportable for the library alone. */
static CUresult attribute_created(const struct created_found *found, void *data, CUpointer_attribute attribute, CUdeviceptr at)
{
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        return put_word(data, BUFFER_IDS | found->map->number);
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
        return put_word(data, BUFFER_IDS | found->block);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        return put_word(data, (unsigned)found->map->of->prop.requestedHandleTypes);
    default:
        return found->away ? attribute_away(found->map, data, attribute, at) : tangram.driver.cuPointerGetAttribute(data, attribute, at);
    }
}

/* Only the driver has the answer, and only while the memory is there. */
static bool is_of_driver(CUpointer_attribute attribute)
{
    return attribute == CU_POINTER_ATTRIBUTE_P2P_TOKENS || attribute > CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE;
}

/* Of memory that can be swapped. False: the address is in none. */
static bool answer(void *data, CUpointer_attribute attribute, CUdeviceptr at, CUresult *rc)
{
    struct elastic_found found;
    struct created_found created;
    if (elastic_find(at, &found)) {
        *rc = attribute_of(&found, data, attribute, at);
        return true;
    }
    if (is_of_driver(attribute) && created_in(at, 1)) {
        if (attribute == CU_POINTER_ATTRIBUTE_P2P_TOKENS)
            elastic_unable(ELASTIC_P2P_TOKENS); /* before they are known */
        await_memory();
    }
    if (!created_find_locked(at, &created))
        return false;
    *rc = attribute_created(&created, data, attribute, at);
    created_unlock(&created);
    return true;
}

EXPORT CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr at)
{
    NEEDS(cuPointerGetAttribute);
    CUresult rc;
    return data != NULL && answer(data, attribute, at, &rc) ? rc : tangram.driver.cuPointerGetAttribute(data, attribute, at);
}

/* An attribute that the pointer does not have is 0 here, and no error; one that no driver has is one. */
EXPORT CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr at)
{
    NEEDS(cuPointerGetAttributes);
    struct elastic_found found;
    if (count == 0 || attributes == NULL || data == NULL || !(elastic_find(at, &found) || created_in(at, 1)))
        return tangram.driver.cuPointerGetAttributes(count, attributes, data, at);
    for (unsigned i = 0; i < count; i++) {
        CUresult rc = CUDA_ERROR_INVALID_VALUE;
        if (data[i] != NULL && !answer(data[i], attributes[i], at, &rc))
            rc = tangram.driver.cuPointerGetAttribute(data[i], attributes[i], at); /* it was freed meanwhile */
        if (rc != CUDA_SUCCESS && (data[i] == NULL || attributes[i] != CU_POINTER_ATTRIBUTE_HOST_POINTER))
            return rc;
    }
    return CUDA_SUCCESS;
}

/* No driver sets SYNC_MEMOPS on such memory. A program that sets it passes the memory to another device: what it allocates next is plain. */
EXPORT CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr at)
{
    NEEDS(cuPointerSetAttribute);
    if (attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS && value != NULL && *(const unsigned *)value != 0)
        elastic_unable(ELASTIC_SYNC_MEMOPS);
    await_memory_at(at);
    return tangram.driver.cuPointerSetAttribute(value, attribute, at);
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr at)
{
    NEEDS(cuMemGetAddressRange_v2);
    struct elastic_found found;
    struct created_found created;
    if (created_find_locked(at, &created)) {
        if (created.away)
            found = (struct elastic_found){.at = created.map->at, .requested = created.map->bytes};
        CUresult rc = created.away ? CUDA_SUCCESS : tangram.driver.cuMemGetAddressRange_v2(base, bytes, at);
        created_unlock(&created);
        if (!created.away)
            return rc;
    } else if (!elastic_find(at, &found)) {
        return tangram.driver.cuMemGetAddressRange_v2(base, bytes, at);
    }
    if (base != NULL)
        *base = found.at;
    if (bytes != NULL)
        *bytes = found.requested;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr at, size_t bytes, CUmemRangeHandleType type, unsigned long long flags)
{
    NEEDS(cuMemGetHandleForAddressRange);
    elastic_unable(ELASTIC_ADDRESS_RANGE); /* before another device knows it */
    await_memory_at(at);
    return tangram.driver.cuMemGetHandleForAddressRange(handle, at, bytes, type, flags);
}
