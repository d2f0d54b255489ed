/* unit_blocks.c - blocks of cuMemCreate: to what they are charged, and what happens where the driver fails in the middle.
 *
 * Compiled with the library's own sources, so that the sanitizers see them. The driver is a few functions of this file. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/hooks/hook.h"
#include "../src/memory/memory.h"

#undef NDEBUG

enum { CUDA_ERROR_UNKNOWN = 999 };

static struct {
    unsigned blocks, mapped; /* that there are */
    uint64_t next;           /* handle or address */
    const char *fails;       /* the function that fails */
    CUresult (*meanwhile)(void); /* done by another thread while the driver maps; its answer is the map's */
} fake;

static CUresult step(const char *name)
{
    return fake.fails != NULL && strcmp(fake.fails, name) == 0 ? (CUresult)CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
    (void)bytes, (void)prop, (void)flags;
    *handle = ++fake.next;
    fake.blocks++;
    return CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle handle)
{
    (void)handle;
    CUresult rc = step("cuMemRelease");
    fake.blocks -= rc == CUDA_SUCCESS;
    if (fake.meanwhile != NULL)
        fake.meanwhile();
    return rc;
}
static CUresult import(CUmemGenericAllocationHandle *handle, void *os_handle, CUmemAllocationHandleType type)
{
    (void)os_handle, (void)type;
    return create(handle, 0, NULL, 0);
}
static CUresult properties(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    (void)handle;
    *prop = (CUmemAllocationProp){.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    return CUDA_SUCCESS;
}
static CUresult map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    (void)at, (void)bytes, (void)offset, (void)handle, (void)flags;
    CUresult rc = step("cuMemMap"), (*meanwhile)(void) = fake.meanwhile;
    fake.meanwhile = NULL;
    if (meanwhile != NULL)
        rc = meanwhile();
    fake.mapped += rc == CUDA_SUCCESS;
    return rc;
}
static CUresult unmap(CUdeviceptr at, size_t bytes)
{
    (void)at, (void)bytes;
    CUresult rc = step("cuMemUnmap");
    fake.mapped -= rc == CUDA_SUCCESS;
    return rc;
}
static CUresult address_reserve(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags)
{
    (void)bytes, (void)alignment, (void)wish, (void)flags;
    *at = UINT64_C(0x7f0000000000);
    return step("cuMemAddressReserve");
}
static CUresult address_free(CUdeviceptr at, size_t bytes)
{
    (void)at, (void)bytes;
    return CUDA_SUCCESS;
}
static CUresult set_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    (void)at, (void)bytes, (void)access, (void)count;
    return step("cuMemSetAccess");
}
static CUresult get_device(CUdevice *device)
{
    *device = 0;
    return CUDA_SUCCESS;
}
static CUresult stream_create(CUstream *stream, unsigned int flags)
{
    (void)flags;
    *stream = NULL;
    return CUDA_SUCCESS;
}
static CUresult of_stream(CUstream stream)
{
    (void)stream;
    return CUDA_SUCCESS;
}
static CUresult fill(CUdeviceptr at, unsigned char value, size_t bytes, CUstream stream)
{
    (void)at, (void)value, (void)bytes, (void)stream;
    return step("cuMemsetD8Async");
}

/* One GPU with so much of a lease, and no arbiter that grants more. */
static struct gpu *gpu_with(uint64_t lease_bytes)
{
    struct gpu *gpu = &tangram.grant.gpu[0];
    tangram.driver.cuMemCreate = create;
    tangram.driver.cuMemRelease = release;
    tangram.driver.cuMemImportFromShareableHandle = import;
    tangram.driver.cuMemGetAllocationPropertiesFromHandle = properties;
    tangram.driver.cuMemMap = map;
    tangram.driver.cuMemUnmap = unmap;
    tangram.driver.cuMemAddressReserve = address_reserve;
    tangram.driver.cuMemAddressFree = address_free;
    tangram.driver.cuMemSetAccess = set_access;
    tangram.driver.cuCtxGetDevice = get_device;
    tangram.driver.cuStreamCreate = stream_create;
    tangram.driver.cuStreamSynchronize = of_stream;
    tangram.driver.cuStreamDestroy_v2 = of_stream;
    tangram.driver.cuMemsetD8Async = fill;
    atomic_store(&tangram.hot.driver_found, true);
    atomic_store(&tangram.grant.state, GRANT_GOOD);
    tangram.grant.gpus = 1;
    tangram.grant.clear = false;
    atomic_store(&tangram.device_gpu[0], gpu);
    atomic_store(&gpu->limit_bytes, 0);
    atomic_store(&gpu->unused_bytes, lease_bytes);
    fake.fails = NULL;
    fake.meanwhile = NULL;
    return gpu;
}

static CUmemGenericAllocationHandle imported;

static CUresult another_maps_it_and_this_one_fails(void)
{
    assert(cuMemMap(UINT64_C(0x7f0000000000), 500 * MIB, 0, imported, 0) == CUDA_SUCCESS);
    return CUDA_ERROR_OUT_OF_MEMORY;
}
static size_t others_bytes;
static CUresult another_maps_it(void)
{
    return cuMemMap(UINT64_C(0x7f0000000000), others_bytes, 0, imported, 0);
}

static void a_mapping_that_fails_leaves_that_of_another_thread_paid(void)
{
    struct gpu *gpu = gpu_with(1000 * MIB);
    assert(cuMemImportFromShareableHandle(&imported, NULL, (CUmemAllocationHandleType)1) == CUDA_SUCCESS);
    fake.meanwhile = another_maps_it_and_this_one_fails;
    assert(cuMemMap(UINT64_C(0x7e0000000000), 500 * MIB, 0, imported, 0) == CUDA_ERROR_OUT_OF_MEMORY);
    assert(fake.mapped == 1 && atomic_load(&gpu->unused_bytes) == 500 * MIB);
    assert(cuMemUnmap(UINT64_C(0x7f0000000000), 500 * MIB) == CUDA_SUCCESS && cuMemRelease(imported) == CUDA_SUCCESS);
    assert(fake.mapped == 0 && fake.blocks == 0 && atomic_load(&gpu->unused_bytes) == 1000 * MIB);
}

static void two_threads_that_map_one_block_pay_for_it_once(size_t one_bytes, size_t other_bytes)
{
    struct gpu *gpu = gpu_with(1000 * MIB);
    others_bytes = other_bytes;
    assert(cuMemImportFromShareableHandle(&imported, NULL, (CUmemAllocationHandleType)1) == CUDA_SUCCESS);
    fake.meanwhile = another_maps_it;
    assert(cuMemMap(UINT64_C(0x7e0000000000), one_bytes, 0, imported, 0) == CUDA_SUCCESS);
    assert(fake.mapped == 2 && atomic_load(&gpu->unused_bytes) == 500 * MIB);
    assert(cuMemRelease(imported) == CUDA_SUCCESS && cuMemUnmap(UINT64_C(0x7f0000000000), other_bytes) == CUDA_SUCCESS);
    assert(atomic_load(&gpu->unused_bytes) == 500 * MIB);
    assert(cuMemUnmap(UINT64_C(0x7e0000000000), one_bytes) == CUDA_SUCCESS && atomic_load(&gpu->unused_bytes) == 1000 * MIB);
}

enum { HANDLES = 64 }; /* the first capacity */
static const CUmemAllocationProp on_gpu = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
static CUmemGenericAllocationHandle made[HANDLES + 1];

static CUresult another_takes_the_place(void)
{
    fake.meanwhile = NULL;
    return cuMemCreate(&made[HANDLES], 2 * MIB, &on_gpu, 0);
}

static void a_handle_that_the_driver_does_not_release_stays_known(void)
{
    struct gpu *gpu = gpu_with(1000 * MIB);
    for (unsigned i = 0; i < HANDLES; i++)
        assert(cuMemCreate(&made[i], 2 * MIB, &on_gpu, 0) == CUDA_SUCCESS);
    assert(tangram.vmm.handles == tangram.vmm.handles_capacity);
    fake.fails = "cuMemRelease";
    fake.meanwhile = another_takes_the_place;
    assert((int)cuMemRelease(made[3]) == CUDA_ERROR_UNKNOWN);
    assert(tangram.vmm.handles == HANDLES + 1 && tangram.vmm.handles <= tangram.vmm.handles_capacity);
    fake.fails = NULL;
    for (unsigned i = 0; i <= HANDLES; i++)
        assert(cuMemRelease(made[i]) == CUDA_SUCCESS);
    assert(fake.blocks == 0 && atomic_load(&gpu->unused_bytes) == 1000 * MIB);
}

static void a_block_that_cannot_be_zeroed_is_refused_and_costs_nothing(void)
{
    static const char *const steps[] = {"cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"};
    CUmemGenericAllocationHandle handle = 1234;
    struct gpu *gpu = gpu_with(1000 * MIB);
    tangram.grant.clear = true;
    for (unsigned i = 0; i < sizeof steps / sizeof *steps; i++) {
        fake.fails = steps[i];
        assert((int)cuMemCreate(&handle, 400 * MIB, &on_gpu, 0) == CUDA_ERROR_UNKNOWN && handle == 1234);
        assert(fake.blocks == 0 && fake.mapped == 0 && atomic_load(&gpu->unused_bytes) == 1000 * MIB);
    }
    fake.fails = "cuMemUnmap"; /* it stays where it is, and stays charged */
    assert((int)cuMemCreate(&handle, 400 * MIB, &on_gpu, 0) == CUDA_ERROR_UNKNOWN && handle == 1234);
    assert(fake.mapped == 1 && atomic_load(&gpu->unused_bytes) == 600 * MIB);
    fake.fails = NULL;
    assert(cuMemUnmap(UINT64_C(0x7f0000000000), 400 * MIB) == CUDA_SUCCESS && atomic_load(&gpu->unused_bytes) == 1000 * MIB);
}

static void tiles_of_sparse_arrays_are_not_mapped_to_be_zeroed(void)
{
    const CUmemAllocationProp tiles = {.location = on_gpu.location, .allocFlags = {.usage = CU_MEM_CREATE_USAGE_TILE_POOL}};
    CUmemGenericAllocationHandle handle;
    gpu_with(1000 * MIB);
    tangram.grant.clear = true;
    fake.fails = "cuMemMap"; /* as the driver does (580, H100) */
    assert(cuMemCreate(&handle, 2 * MIB, &tiles, 0) == CUDA_SUCCESS && cuMemRelease(handle) == CUDA_SUCCESS);
}

int main(void)
{
    a_handle_that_the_driver_does_not_release_stays_known();
    a_mapping_that_fails_leaves_that_of_another_thread_paid();
    two_threads_that_map_one_block_pay_for_it_once(400 * MIB, 500 * MIB);
    two_threads_that_map_one_block_pay_for_it_once(500 * MIB, 400 * MIB);
    a_block_that_cannot_be_zeroed_is_refused_and_costs_nothing();
    tiles_of_sparse_arrays_are_not_mapped_to_be_zeroed();
    puts("ok");
    return 0;
}
