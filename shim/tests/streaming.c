/* streaming.c - see streaming.h. */
#include "streaming.h"

#include <assert.h>
#include <stdlib.h>

#undef NDEBUG

enum { NOT_READY = 600 };

struct streaming fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .next = UINT64_C(0x7f0000000000), .seed = 1, .opportunistic = 1, .internal = 1};

unsigned draw(unsigned below)
{
    return (unsigned)rand_r(&fake.seed) % below;
}

static CUresult step(void)
{
    return fake.fails > 0 && draw(fake.fails) == 0 ? (CUresult)REFUSED : CUDA_SUCCESS;
}

/* Streams are numbers from 10 on. */
static unsigned place_of(CUstream stream)
{
    return (uintptr_t)stream == 2 ? STREAMS : (unsigned)(uintptr_t)stream - 10;
}
CUstream stream_at(unsigned place)
{
    return (CUstream)(uintptr_t)(place == STREAMS ? 2 : place + 10); /* NOLINT(performance-no-int-to-ptr) */
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
    (void)prop, (void)flags;
    pthread_mutex_lock(&fake.lock);
    *handle = bytes / PAGE;
    fake.pages += bytes / PAGE;
    pthread_mutex_unlock(&fake.lock);
    return CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle handle)
{
    pthread_mutex_lock(&fake.lock);
    fake.pages -= handle;
    pthread_mutex_unlock(&fake.lock);
    return CUDA_SUCCESS;
}
static CUresult map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    (void)at, (void)bytes, (void)offset, (void)handle, (void)flags;
    return CUDA_SUCCESS;
}
static CUresult unmap(CUdeviceptr at, size_t bytes)
{
    (void)at, (void)bytes;
    return CUDA_SUCCESS;
}
static CUresult give_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    (void)at, (void)bytes, (void)access, (void)count;
    return CUDA_SUCCESS;
}
static CUresult reserve_addresses(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags)
{
    (void)alignment, (void)wish, (void)flags;
    pthread_mutex_lock(&fake.lock);
    *at = fake.next;
    fake.next += bytes + 4 * PAGE;
    pthread_mutex_unlock(&fake.lock);
    return CUDA_SUCCESS;
}
static CUresult free_addresses(CUdeviceptr at, size_t bytes)
{
    (void)at, (void)bytes;
    return CUDA_SUCCESS;
}
static CUresult exchange(CUstreamCaptureMode *mode)
{
    (void)mode;
    return CUDA_SUCCESS;
}
static CUresult is_capturing(CUstream stream, CUstreamCaptureStatus *status)
{
    (void)stream;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}
static CUresult id_of(CUstream stream, unsigned long long *id)
{
    if (place_of(stream) > STREAMS)
        return CUDA_ERROR_INVALID_HANDLE;
    *id = fake.stream[place_of(stream)].id;
    return CUDA_SUCCESS;
}
static CUresult context_now(CUcontext *context)
{
    *context = CONTEXT;
    return CUDA_SUCCESS;
}
static CUresult event_new(CUevent *event, unsigned int flags)
{
    (void)flags;
    pthread_mutex_lock(&fake.lock);
    const CUresult rc = step();
    assert(fake.events < sizeof fake.event / sizeof *fake.event - 1);
    if (rc == CUDA_SUCCESS)
        *event = (CUevent)(uintptr_t)++fake.events; /* NOLINT(performance-no-int-to-ptr) */
    pthread_mutex_unlock(&fake.lock);
    return rc;
}
static struct recorded *recorded(CUevent event)
{
    return &fake.event[(uintptr_t)event];
}
static CUresult event_record(CUevent event, CUstream stream)
{
    pthread_mutex_lock(&fake.lock);
    const CUresult rc = step();
    if (rc == CUDA_SUCCESS)
        *recorded(event) = (struct recorded){place_of(stream), fake.stream[place_of(stream)].queued};
    pthread_mutex_unlock(&fake.lock);
    return rc;
}
static CUresult event_query(CUevent event)
{
    pthread_mutex_lock(&fake.lock);
    const struct recorded its = *recorded(event);
    const bool passed = fake.stream[its.stream].ended >= its.queued;
    pthread_mutex_unlock(&fake.lock);
    return passed ? CUDA_SUCCESS : (CUresult)NOT_READY;
}
static CUresult stream_wait(CUstream stream, CUevent event, unsigned int flags)
{
    (void)flags;
    pthread_mutex_lock(&fake.lock);
    const struct recorded its = *recorded(event);
    uint64_t *after = &fake.stream[place_of(stream)].after[its.stream];
    if (*after < its.queued)
        *after = its.queued;
    fake.waited++;
    pthread_mutex_unlock(&fake.lock);
    return CUDA_SUCCESS;
}
/* Locked. So much of it has ended, and what it waited for before that. */
void ends(unsigned place, uint64_t ended)
{
    struct work *work = &fake.stream[place];
    if (work->ended >= ended)
        return;
    work->ended = ended;
    for (unsigned i = 0; i <= STREAMS; i++)
        ends(i, work->after[i]);
}
static CUresult stream_end(CUstream stream)
{
    pthread_mutex_lock(&fake.lock);
    ends(place_of(stream), fake.stream[place_of(stream)].queued);
    pthread_mutex_unlock(&fake.lock);
    return CUDA_SUCCESS;
}
CUresult all_end(void)
{
    for (unsigned i = 0; i <= STREAMS; i++)
        stream_end(stream_at(i));
    return CUDA_SUCCESS;
}
static CUresult plain_alloc(CUdeviceptr *at, size_t bytes)
{
    (void)bytes;
    *at = 1;
    return CUDA_SUCCESS;
}
static CUresult plain_free(CUdeviceptr at)
{
    return at == 1 ? all_end() : CUDA_ERROR_INVALID_VALUE;
}
static CUresult never_async(CUdeviceptr *at, size_t bytes, CUstream stream)
{
    (void)at, (void)bytes, (void)stream;
    return (CUresult)REFUSED;
}
static CUresult never_from_pool(CUdeviceptr *at, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    (void)at, (void)bytes, (void)pool, (void)stream;
    return (CUresult)REFUSED;
}
static CUresult never_free(CUdeviceptr at, CUstream stream)
{
    (void)at, (void)stream;
    return CUDA_ERROR_INVALID_VALUE;
}
static CUresult default_pool(CUmemoryPool *pool, CUdevice device)
{
    (void)device;
    *pool = POOL;
    return CUDA_SUCCESS;
}
static CUresult pool_create(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    (void)properties;
    *pool = OTHER_POOL;
    return CUDA_SUCCESS;
}
static CUresult pool_end(CUmemoryPool pool)
{
    (void)pool;
    return CUDA_SUCCESS;
}
static CUresult pool_get(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
        *(int *)value = 1;
        break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
        *(int *)value = fake.opportunistic;
        break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        *(int *)value = fake.internal;
        break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        *(cuuint64_t *)value = pool == POOL ? fake.threshold : 0;
        break;
    default:
        *(cuuint64_t *)value = 0;
    }
    return CUDA_SUCCESS;
}
static CUresult pool_set(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    (void)pool, (void)attribute, (void)value;
    return CUDA_SUCCESS;
}
static CUresult pool_trim_to(CUmemoryPool pool, size_t keep)
{
    (void)pool, (void)keep;
    return CUDA_SUCCESS;
}

void streaming_begin(void)
{
    tangram.driver.cuMemCreate = create;
    tangram.driver.cuMemRelease = release;
    tangram.driver.cuMemMap = map;
    tangram.driver.cuMemUnmap = unmap;
    tangram.driver.cuMemSetAccess = give_access;
    tangram.driver.cuMemAddressReserve = reserve_addresses;
    tangram.driver.cuMemAddressFree = free_addresses;
    tangram.driver.cuThreadExchangeStreamCaptureMode = exchange;
    tangram.driver.cuStreamIsCapturing = is_capturing;
    tangram.driver.cuStreamGetId = id_of;
    tangram.driver.cuStreamWaitEvent = stream_wait;
    tangram.driver.cuStreamSynchronize = stream_end;
    tangram.driver.cuCtxSynchronize = all_end;
    tangram.driver.cuCtxGetCurrent = context_now;
    tangram.driver.cuEventCreate = event_new;
    tangram.driver.cuEventRecord = event_record;
    tangram.driver.cuEventQuery = event_query;
    tangram.driver.cuMemAlloc_v2 = plain_alloc;
    tangram.driver.cuMemFree_v2 = plain_free;
    tangram.driver.cuMemAllocAsync = tangram.driver.cuMemAllocAsync_ptsz = never_async;
    tangram.driver.cuMemAllocFromPoolAsync = never_from_pool;
    tangram.driver.cuMemFreeAsync = tangram.driver.cuMemFreeAsync_ptsz = never_free;
    tangram.driver.cuDeviceGetMemPool = tangram.driver.cuDeviceGetDefaultMemPool = default_pool;
    tangram.driver.cuMemPoolCreate = pool_create;
    tangram.driver.cuMemPoolDestroy = pool_end;
    tangram.driver.cuMemPoolGetAttribute = pool_get;
    tangram.driver.cuMemPoolSetAttribute = pool_set;
    tangram.driver.cuMemPoolTrimTo = pool_trim_to;
    for (unsigned i = 0; i <= STREAMS; i++)
        fake.stream[i].id = 100 + i;
}
