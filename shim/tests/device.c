/* device.c - see device.h. */
#include "device.h"

#include <assert.h>
#include <fcntl.h>

#undef NDEBUG

struct device library, alone;

struct physical *physical_of(struct device *device, CUmemGenericAllocationHandle handle)
{
    return handle > 0 && handle <= device->made && device->physical[handle].handles > 0 ? &device->physical[handle] : NULL;
}

bool is_there(const struct physical *physical)
{
    return physical->handles > 0 || physical->mappings > 0;
}

CUresult dev_create(struct device *device, CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop)
{
    *handle = ++device->made;
    assert(device->made < PHYSICAL && bytes / PAGE <= PAGES_IN_BLOCK);
    device->physical[*handle] = (struct physical){.pages = (unsigned)(bytes / PAGE), .handles = 1, .prop = *prop};
    return CUDA_SUCCESS;
}

CUresult dev_release(struct device *device, CUmemGenericAllocationHandle handle)
{
    struct physical *physical = physical_of(device, handle);
    if (physical == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    physical->handles--;
    return CUDA_SUCCESS;
}

CUresult dev_map(struct device *device, CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle)
{
    struct physical *physical = physical_of(device, handle);
    const unsigned first = (unsigned)((at - BASE) / PAGE), pages = (unsigned)(bytes / PAGE);
    if (physical == NULL || offset != 0 || pages == 0 || pages > physical->pages || at < BASE || first + pages > PAGES)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < pages; i++)
        if (device->place[first + i].physical != 0)
            return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < pages; i++)
        device->place[first + i] = (struct place){.physical = (unsigned)handle, .first = first, .pages = pages};
    physical->mappings++;
    return CUDA_SUCCESS;
}

/* Whole mappings, side by side. */
bool is_covered(const struct device *device, unsigned first, unsigned pages)
{
    for (unsigned i = 0; i < pages; i++) {
        const struct place *place = &device->place[first + i];
        if (first + i >= PAGES || place->physical == 0 || place->first < first || place->first + place->pages > first + pages)
            return false;
    }
    return pages > 0;
}

CUresult dev_change(struct device *device, CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    const unsigned first = (unsigned)((at - BASE) / PAGE), pages = (unsigned)(bytes / PAGE);
    if (!is_covered(device, first, pages))
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = first; i < first + pages; i++) {
        struct place *place = &device->place[i];
        if (access != NULL) {
            for (size_t one = 0; one < count; one++)
                place->access[access[one].location.id] = (unsigned)access[one].flags;
        } else {
            device->physical[place->physical].mappings -= place->first == i;
            *place = (struct place){0};
        }
    }
    return CUDA_SUCCESS;
}

CUresult dev_retain(struct device *device, CUmemGenericAllocationHandle *handle, void *at)
{
    const struct place *place = &device->place[((uintptr_t)at - BASE) / PAGE];
    if (place->physical == 0)
        return CUDA_ERROR_INVALID_VALUE;
    device->physical[place->physical].handles++;
    *handle = place->physical;
    return CUDA_SUCCESS;
}

/* The driver under the library. */
unsigned countdown, in_a_row;
static bool fails(void)
{
    if (countdown > 1) {
        countdown--;
        return false;
    }
    return countdown == 1 && in_a_row > 0 && in_a_row-- > 0;
}
static CUresult create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
    (void)flags;
    assert(prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    return fails() ? CUDA_ERROR_OUT_OF_MEMORY : dev_create(&library, handle, bytes, prop);
}
static CUresult release(CUmemGenericAllocationHandle handle)
{
    return dev_release(&library, handle);
}
static CUresult map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    (void)flags;
    return fails() ? CUDA_ERROR_OUT_OF_MEMORY : dev_map(&library, at, bytes, offset, handle);
}
static CUresult unmap(CUdeviceptr at, size_t bytes)
{
    return fails() ? CUDA_ERROR_OUT_OF_MEMORY : dev_change(&library, at, bytes, NULL, 0);
}
static CUresult set_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    return fails() ? CUDA_ERROR_OUT_OF_MEMORY : dev_change(&library, at, bytes, access, count);
}
static CUresult get_access(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr at)
{
    const struct place *place = &library.place[(at - BASE) / PAGE];
    *flags = place->access[location->id];
    return place->physical != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
static CUresult retain(CUmemGenericAllocationHandle *handle, void *at)
{
    return dev_retain(&library, handle, at);
}
static CUresult properties(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    (void)prop, (void)handle;
    return CUDA_ERROR_INVALID_VALUE;
}
static CUresult export_it(void *fd, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags)
{
    (void)type, (void)flags;
    if (physical_of(&library, handle) == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *(int *)fd = open("/dev/null", O_RDONLY);
    return CUDA_SUCCESS;
}
static CUresult address_free(CUdeviceptr at, size_t bytes)
{
    (void)at, (void)bytes;
    return CUDA_SUCCESS;
}

void device_begin(void)
{
    tangram.driver.cuMemCreate = create;
    tangram.driver.cuMemRelease = release;
    tangram.driver.cuMemMap = map;
    tangram.driver.cuMemUnmap = unmap;
    tangram.driver.cuMemSetAccess = set_access;
    tangram.driver.cuMemGetAccess = get_access;
    tangram.driver.cuMemRetainAllocationHandle = retain;
    tangram.driver.cuMemGetAllocationPropertiesFromHandle = properties;
    tangram.driver.cuMemExportToShareableHandle = export_it;
    tangram.driver.cuMemAddressFree = address_free;
}
