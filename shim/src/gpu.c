/* gpu.c - which GPU of the grant a call means.
 *
 * Device numbers are the process's own (CUDA_VISIBLE_DEVICES may choose and reorder), so a device is known by its UUID and by
 * nothing else. The answer is kept per device number: a process cannot renumber its devices once the driver is initialised.
 */
#include "memory/memory.h"

#include <string.h>

struct gpu *gpu_of_uuid(const uint8_t uuid[16])
{
    enum grant_state state = grant_ready();
    if (state == GRANT_BAD)
        return &tangram.grant.closed;
    for (unsigned i = 0; state == GRANT_GOOD && i < tangram.grant.gpus; i++)
        if (memcmp(tangram.grant.gpu[i].uuid, uuid, 16) == 0)
            return &tangram.grant.gpu[i];
    return NULL;
}

struct gpu *gpu_of_device(CUdevice device)
{
    bool kept = device >= 0 && device < DEVICES_LIMIT;
    if (kept) {
        struct gpu *known = atomic_load_explicit(&tangram.device_gpu[device], memory_order_acquire);
        if (known != NULL)
            return known == &tangram.unshared ? NULL : known;
    }
    enum grant_state state = grant_ready();
    if (state == GRANT_NONE)
        return NULL;
    CUuuid uuid;
    CUresult rc = HAS(cuDeviceGetUuid) ? tangram.driver.cuDeviceGetUuid(&uuid, device) : CUDA_ERROR_NOT_SUPPORTED;
    if (rc == CUDA_ERROR_INVALID_DEVICE || rc == CUDA_ERROR_NOT_INITIALIZED || rc == CUDA_ERROR_DEINITIALIZED)
        return state == GRANT_BAD ? &tangram.grant.closed : NULL; /* the driver's own error is the answer */
    if (rc != CUDA_SUCCESS) {
        warn(WARN_NO_UUID, "the driver does not name device %d (error %d): its memory is refused", device, (int)rc);
        tangram.grant.closed.closed = true;
        return &tangram.grant.closed; /* it may be one of ours: a GPU that is not identified is not unlimited */
    }
    struct gpu *gpu = gpu_of_uuid((const uint8_t *)uuid.bytes);
    if (kept)
        atomic_store_explicit(&tangram.device_gpu[device], gpu ? gpu : &tangram.unshared, memory_order_release);
    return gpu;
}

/* CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN of CUDA 13.5: a part of a device's memory, its number in the low byte. */
enum { LOCATION_PART_OF_DEVICE = 6 };

bool device_of_location(const CUmemLocation *location, CUdevice *device)
{
    bool part = (int)location->type == LOCATION_PART_OF_DEVICE;
    *device = part ? location->id & 0xff : location->id;
    return part || location->type == CU_MEM_LOCATION_TYPE_DEVICE;
}

struct gpu *gpu_of_location(const CUmemLocation *location)
{
    CUdevice device;
    return device_of_location(location, &device) ? gpu_of_device(device) : NULL;
}

bool is_drivers_answer(CUresult rc)
{
    return rc == CUDA_ERROR_INVALID_VALUE || rc == CUDA_ERROR_NOT_INITIALIZED || rc == CUDA_ERROR_DEINITIALIZED || rc == CUDA_ERROR_INVALID_DEVICE ||
           rc == CUDA_ERROR_INVALID_CONTEXT || rc == CUDA_ERROR_INVALID_HANDLE || rc == CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

/* A GPU that is not identified may be one of ours, and is not unlimited. The next call tries again. */
static struct gpu *unknown_gpu(CUresult rc)
{
    if (grant_ready() == GRANT_NONE)
        return NULL;
    warn(WARN_NO_UUID, "the driver does not report which GPU is current (error %d): its memory is refused", (int)rc);
    tangram.grant.closed.closed = true;
    return &tangram.grant.closed;
}

/* `known`: this is the answer until the context changes. */
static struct gpu *learn_current_gpu(bool *known)
{
    CUdevice device;
    int devices = 0;
    CUresult rc = tangram.driver.cuCtxGetDevice(&device);
    *known = rc == CUDA_SUCCESS;
    if (rc != CUDA_SUCCESS)
        return is_drivers_answer(rc) ? NULL : unknown_gpu(rc);
    struct gpu *gpu = gpu_of_device(device);
    *known = gpu != &tangram.grant.closed;
    if (*known && tangram.driver.cuDeviceGetCount(&devices) == CUDA_SUCCESS && devices == 1)
        atomic_store_explicit(&tangram.only_gpu, gpu ? gpu : &tangram.unshared, memory_order_release);
    return gpu;
}

void gpu_note_only(void)
{
    int devices = 0;
    if (atomic_load_explicit(&tangram.only_gpu, memory_order_acquire) != NULL || tangram.driver.cuDeviceGetCount(&devices) != CUDA_SUCCESS || devices != 1)
        return;
    struct gpu *gpu = gpu_of_device(0);
    if (gpu != &tangram.grant.closed)
        atomic_store_explicit(&tangram.only_gpu, gpu ? gpu : &tangram.unshared, memory_order_release);
}

/* Looked up at every allocation. A process with one device needs no query; one with several caches, thread by thread, the
 * GPU of the context it saw last, until some context is destroyed. */
struct gpu *current_gpu(void)
{
    static _Thread_local __attribute__((tls_model("initial-exec"))) struct {
        CUcontext context;
        unsigned contexts_gone;
        struct gpu *gpu;
    } seen;
    struct gpu *only = atomic_load_explicit(&tangram.only_gpu, memory_order_acquire);
    if (only != NULL)
        return only == &tangram.unshared ? NULL : only;
    if (grant_ready() == GRANT_NONE)
        return NULL;
    CUcontext context = NULL;
    unsigned gone = atomic_load_explicit(&tangram.contexts_gone, memory_order_acquire);
    if (tangram.driver.cuCtxGetCurrent(&context) != CUDA_SUCCESS)
        context = NULL;
    if (context != NULL && context == seen.context && gone == seen.contexts_gone)
        return seen.gpu;
    bool known;
    struct gpu *gpu = learn_current_gpu(&known);
    seen.gpu = gpu;
    seen.context = known ? context : NULL; /* nothing is known of no context */
    seen.contexts_gone = gone;
    return gpu;
}

/* The device whose pool a stream allocates from. Streams 0 to 2 are the default ones of the current context. */
CUresult device_of_stream(CUstream stream, CUdevice *device)
{
    CUcontext context;
    if (atomic_load_explicit(&tangram.only_gpu, memory_order_acquire) != NULL) {
        *device = 0;
        return CUDA_SUCCESS;
    }
    if ((uintptr_t)stream <= 2)
        return tangram.driver.cuCtxGetDevice(device);
    if (HAS(cuStreamGetDevice))
        return tangram.driver.cuStreamGetDevice(stream, device);
    CUresult rc = tangram.driver.cuStreamGetCtx(stream, &context);
    if (rc != CUDA_SUCCESS || (rc = tangram.driver.cuCtxPushCurrent_v2(context)) != CUDA_SUCCESS)
        return rc;
    rc = tangram.driver.cuCtxGetDevice(device);
    CUresult popped = tangram.driver.cuCtxPopCurrent_v2(&context);
    return rc != CUDA_SUCCESS ? rc : popped;
}
