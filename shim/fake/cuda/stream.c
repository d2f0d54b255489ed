/* stream.c - streams and events: both are points in what the process has queued on a GPU. Streams that capture: what is
 * launched there becomes a node of a graph (graph.c). */
#include "internal.h"
#include "calls.h"

#include <stdlib.h>

CUresult stream_get(CUstream handle, CUstream *stream)
{
    if ((uintptr_t)handle <= 2) { /* NULL and CU_STREAM_LEGACY, CU_STREAM_PER_THREAD */
        CUcontext ctx;
        TRY(current(&ctx));
        *stream = &ctx->stream[(uintptr_t)handle == 2];
        return CUDA_SUCCESS;
    }
    TRY(handle_ok(handle, HANDLE_STREAM, CUDA_ERROR_INVALID_HANDLE));
    CHECK(context_ok(handle->ctx), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    TRY(sticky(handle->ctx->device));
    *stream = handle;
    return CUDA_SUCCESS;
}

static void raise_to(_Atomic uint64_t *at, uint64_t ns)
{
    uint64_t was = atomic_load_explicit(at, memory_order_relaxed);
    while (was < ns && !atomic_compare_exchange_weak(at, &was, ns))
        continue;
}

CUresult synchronize(int device, uint64_t done_ns)
{
    work_wait(device, done_ns);
    pools_synchronized(device);
    return sticky(device);
}

CUresult sticky(int device)
{
    struct device *of = &cuda.device[device];
    _Atomic uint32_t *error = &cuda.client.page->slot[cuda.client.slot].error[of->unit];
    const uint32_t next = atomic_load(&of->trap);
    if (next != 0 && atomic_load(error) == 0 && work_done(device, atomic_load(&of->trap_ns)))
        atomic_store(error, next);
    return (CUresult)atomic_load(error);
}

void trap(int device, uint32_t error, uint64_t done_ns)
{
    struct device *of = &cuda.device[device];
    if (error == 0 || atomic_load(&of->trap) != 0) /* the first one counts */
        return;
    atomic_store(&of->trap_ns, done_ns);
    atomic_store(&of->trap, error);
}

void fail_now(int device, uint32_t error)
{
    uint32_t none = 0;
    atomic_compare_exchange_strong(&cuda.client.page->slot[cuda.client.slot].error[cuda.device[device].unit], &none, error);
}

uint64_t stream_queue(CUstream stream, uint64_t ns)
{
    const uint64_t end = gpu_time_queue(cuda.client.page, cuda.client.slot, cuda.device[stream->ctx->device].unit, ns);
    raise_to(&stream->done_ns, end);
    raise_to(&stream->ctx->done_ns, end);
    return end;
}

static _Thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

CUresult beside(void *(*run)(void *given), const void *given, size_t bytes)
{
    pthread_t thread;
    void *own = malloc(bytes);
    CHECK(own != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    memcpy(own, given, bytes);
    if (pthread_create(&thread, NULL, run, own) != 0) {
        free(own);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_detach(thread);
    return CUDA_SUCCESS;
}

/* on: the stream as the program calls it. */
static CUresult host_call(struct job *job, CUstream on, CUhostFn run, CUstreamCallback callback, void *data)
{
    *job = (struct job){.kind = JOB_HOST, .run = run, .callback = callback, .on = on, .data = data};
    return must(run != NULL || callback != NULL, CUDA_ERROR_INVALID_VALUE);
}

CUresult stream_job(CUstream stream, CUgraphNodeType type, const struct job *job)
{
    if (stream->capture != NULL)
        return node_add(stream->capture, (struct work){.type = type, .job = *job}, NULL);
    return job->kind == JOB_HOST ? job_submit(stream, job) : job_later(stream, *job);
}

static CUresult stream_synchronize(CUstream stream)
{
    if (stream == stream->ctx->stream)
        return legacy_idle(stream->ctx) ?: synchronize(stream->ctx->device, 0);
    job_wait(atomic_load(&stream->job));
    return synchronize(stream->ctx->device, atomic_load(&stream->done_ns));
}

/* Events. One that was never recorded stands behind nothing. */

static CUresult event_ok(CUevent event)
{
    TRY(handle_ok(event, HANDLE_EVENT, CUDA_ERROR_INVALID_HANDLE));
    return sticky(event->ctx->device);
}

/* Is it reached? Notes when that was first seen. */
static bool event_done(CUevent event)
{
    uint64_t unseen = 0;
    CHECK(job_ended(atomic_load(&event->job)) && work_done(event->device, atomic_load(&event->done_ns)), false);
    atomic_compare_exchange_strong(&event->seen_ns, &unseen, page_now_ns());
    return true;
}

static CUresult event_record(CUevent event, CUstream stream)
{
    event->device = stream->ctx->device;
    atomic_store(&event->done_ns, atomic_load(&stream->done_ns));
    atomic_store(&event->job, atomic_load(&stream->job));
    atomic_store(&event->seen_ns, 0);
    event->recorded = true;
    event_done(event); /* behind nothing, it is there now */
    return CUDA_SUCCESS;
}

static CUresult event_synchronize(CUevent event)
{
    job_wait(atomic_load(&event->job));
    return synchronize(event->device, atomic_load(&event->done_ns));
}

static float milliseconds_between(CUevent start, CUevent end)
{
    const uint64_t seen = atomic_load(&end->seen_ns) - atomic_load(&start->seen_ns);
    const uint64_t worked = start->device == end->device ? atomic_load(&end->done_ns) - atomic_load(&start->done_ns) : 0;
    const int64_t longer = (int64_t)seen > (int64_t)worked ? (int64_t)seen : (int64_t)worked; /* both may be seen late */
    return (float)((double)longer / 1e6);
}

static CUresult stream_follows(CUstream stream, CUevent event)
{
    const uint64_t job = atomic_load(&event->job);
    if (!job_ended(job))
        TRY(job_submit(stream, &(struct job){.kind = JOB_TIME, .after = job}));
    if (event->device == stream->ctx->device)
        raise_to(&stream->done_ns, atomic_load(&event->done_ns));
    else
        work_wait(event->device, atomic_load(&event->done_ns)); /* another GPU's work: here the caller waits for it */
    return CUDA_SUCCESS;
}

#include "stream.def"
