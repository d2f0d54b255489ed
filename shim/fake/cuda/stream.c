/* stream.c - streams and events: both are points in what the process has queued on a card. Streams that capture: what is
 * launched there becomes a node of a graph (graph.c). */
#include "internal.h"

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

CUresult stream_captures(CUstream handle, CUgraphNodeType type, bool *captured)
{
    CUstream stream;
    TRY(stream_get(handle, &stream));
    *captured = stream->capture != NULL;
    return *captured ? node_add(stream->capture, (struct work){.type = type}, NULL) : CUDA_SUCCESS;
}

static void raise_to(_Atomic uint64_t *at, uint64_t ns)
{
    uint64_t was = atomic_load_explicit(at, memory_order_relaxed);
    while (was < ns && !atomic_compare_exchange_weak(at, &was, ns))
        continue;
}

bool work_done(int device, uint64_t done_ns)
{
    return gpu_time_reached(cuda.client.page, cuda.client.slot, cuda.device[device].unit, done_ns);
}

void work_wait(int device, uint64_t done_ns)
{
    gpu_time_wait(cuda.client.page, cuda.client.slot, cuda.device[device].unit, done_ns);
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

uint64_t stream_queue(CUstream stream, uint64_t ns)
{
    const uint64_t end = gpu_time_queue(cuda.client.page, cuda.client.slot, cuda.device[stream->ctx->device].unit, ns);
    raise_to(&stream->done_ns, end);
    raise_to(&stream->ctx->done_ns, end);
    return end;
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *made, unsigned flags, int priority)
{
    FAULT(cuStreamCreateWithPriority, 0);
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(made != NULL && flags <= CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
    CHECK(losses_stream(ctx), CUDA_ERROR_OUT_OF_MEMORY);
    CUstream stream;
    TRY(handle_new(&stream, HANDLE_STREAM, sizeof *stream));
    stream->ctx = ctx;
    stream->flags = flags;
    stream->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    stream->id = ++cuda.ids;
    *made = stream;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamDestroy_v2(CUstream handle)
{
    CUstream stream;
    TRY(stream_get(handle, &stream));
    CHECK((uintptr_t)handle > 2, CUDA_ERROR_INVALID_HANDLE);
    losses_stream_end(stream->ctx);
    handle_free(stream);
    return CUDA_SUCCESS;
}

ALIAS(cuStreamDestroy, cuStreamDestroy_v2)

EXPORT CUresult cuStreamSynchronize(CUstream handle)
{
    FAULT(cuStreamSynchronize, 0);
    CUstream stream;
    TRY(stream_get(handle, &stream));
    CHECK(stream->capture == NULL, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    const bool legacy = stream == &stream->ctx->stream[0]; /* waits for the blocking streams, too */
    return synchronize(stream->ctx->device, atomic_load(legacy ? &stream->ctx->done_ns : &stream->done_ns));
}

EXPORT CUresult cuStreamQuery(CUstream handle)
{
    FAULT(cuStreamQuery, 0);
    CUstream stream;
    TRY(stream_get(handle, &stream));
    CHECK(stream->capture == NULL, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return work_done(stream->ctx->device, atomic_load(&stream->done_ns)) ? sticky(stream->ctx->device) : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode)
{
    CUstream stream;
    (void)mode;
    TRY(stream_get(handle, &stream));
    CHECK((uintptr_t)handle > 1, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED); /* the legacy stream cannot be captured */
    CHECK(stream->capture == NULL, CUDA_ERROR_ILLEGAL_STATE);
    return graph_new(&stream->capture, HANDLE_GRAPH);
}

EXPORT CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph)
{
    CUstream stream;
    TRY(stream_get(handle, &stream));
    CHECK(graph != NULL, CUDA_ERROR_INVALID_VALUE);
    CHECK(stream->capture != NULL, CUDA_ERROR_ILLEGAL_STATE);
    *graph = stream->capture;
    stream->capture = NULL;
    return CUDA_SUCCESS;
}

/* All but the status may be NULL. */
CUresult capture_info(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **after,
                      const CUgraphEdgeData **edges, size_t *afters)
{
    CUstream stream;
    TRY(stream_get(handle, &stream));
    CHECK(status != NULL, CUDA_ERROR_INVALID_VALUE);
    *status = stream->capture != NULL ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    if (id != NULL)
        *id = (cuuint64_t)(uintptr_t)stream->capture;
    if (graph != NULL)
        *graph = stream->capture;
    if (after != NULL)
        *after = NULL;
    if (edges != NULL)
        *edges = NULL;
    if (afters != NULL)
        *afters = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    static _Thread_local CUstreamCaptureMode now = CU_STREAM_CAPTURE_MODE_GLOBAL;
    CHECK(mode != NULL && (unsigned)*mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    const CUstreamCaptureMode was = now;
    now = *mode;
    *mode = was;
    return CUDA_SUCCESS;
}

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

struct host_call {
    CUhostFn run;
    CUstreamCallback callback;
    CUstream stream;
    void *data;
    int device;
    uint64_t done_ns;
};

static void *host_thread(void *given)
{
    const struct host_call call = *(struct host_call *)given;
    free(given);
    work_wait(call.device, call.done_ns);
    if (call.run != NULL)
        call.run(call.data);
    else
        call.callback(call.stream, CUDA_SUCCESS, call.data);
    return NULL;
}

CUresult stream_call(CUstream handle, CUhostFn run, CUstreamCallback callback, void *data)
{
    CUstream stream;
    TRY(stream_get(handle, &stream));
    CHECK(run != NULL || callback != NULL, CUDA_ERROR_INVALID_VALUE);
    if (stream->capture != NULL)
        return node_add(stream->capture, (struct work){.type = CU_GRAPH_NODE_TYPE_HOST}, NULL);
    const struct host_call call = {run, callback, handle, data, stream->ctx->device, atomic_load(&stream->done_ns)};
    return beside(host_thread, &call, sizeof call);
}

EXPORT CUresult cuEventCreate(CUevent *made, unsigned flags)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(made != NULL && flags < 8, CUDA_ERROR_INVALID_VALUE);
    CUevent event;
    TRY(handle_new(&event, HANDLE_EVENT, sizeof *event));
    event->ctx = ctx;
    event->flags = flags;
    *made = event;
    return CUDA_SUCCESS;
}

CUresult event_ok(CUevent event)
{
    TRY(handle_ok(event, HANDLE_EVENT, CUDA_ERROR_INVALID_HANDLE));
    return sticky(event->ctx->device);
}

/* Is it reached? Notes when that was first seen. */
static bool event_done(CUevent event)
{
    uint64_t unseen = 0;
    CHECK(work_done(event->device, atomic_load(&event->done_ns)), false);
    atomic_compare_exchange_strong(&event->seen_ns, &unseen, page_now_ns());
    return true;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream handle)
{
    FAULT(cuEventRecord, 0);
    CUstream stream;
    TRY(event_ok(event));
    TRY(stream_get(handle, &stream));
    if (stream->capture != NULL)
        return node_add(stream->capture, (struct work){.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD}, NULL);
    event->device = stream->ctx->device;
    atomic_store(&event->done_ns, atomic_load(&stream->done_ns));
    atomic_store(&event->seen_ns, 0);
    event->recorded = true;
    event_done(event); /* behind nothing, it is there now */
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventQuery(CUevent event)
{
    FAULT(cuEventQuery, 0);
    TRY(event_ok(event));
    return !event->recorded || event_done(event) ? sticky(event->ctx->device) : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuEventSynchronize(CUevent event)
{
    FAULT(cuEventSynchronize, 0);
    TRY(event_ok(event));
    if (!event->recorded)
        return synchronize(event->ctx->device, 0);
    const CUresult rc = synchronize(event->device, atomic_load(&event->done_ns));
    event_done(event);
    return rc;
}

EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end)
{
    TRY(event_ok(start));
    TRY(event_ok(end));
    CHECK(milliseconds != NULL, CUDA_ERROR_INVALID_VALUE);
    CHECK(start->recorded && end->recorded, CUDA_ERROR_INVALID_HANDLE);
    CHECK(((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) == 0, CUDA_ERROR_INVALID_HANDLE);
    TRY(cuEventQuery(start));
    TRY(cuEventQuery(end));
    const uint64_t seen = atomic_load(&end->seen_ns) - atomic_load(&start->seen_ns);
    const uint64_t worked = start->device == end->device ? atomic_load(&end->done_ns) - atomic_load(&start->done_ns) : 0;
    const int64_t longer = (int64_t)seen > (int64_t)worked ? (int64_t)seen : (int64_t)worked; /* both may be seen late */
    *milliseconds = (float)((double)longer / 1e6);
    return CUDA_SUCCESS;
}

ALIAS(cuEventElapsedTime, cuEventElapsedTime_v2)

EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags)
{
    CUstream stream;
    (void)flags;
    TRY(event_ok(event));
    TRY(stream_get(handle, &stream));
    if (event->recorded && event->device == stream->ctx->device)
        raise_to(&stream->done_ns, atomic_load(&event->done_ns));
    else if (event->recorded)
        work_wait(event->device, atomic_load(&event->done_ns)); /* another card's work: here the caller waits for it */
    return CUDA_SUCCESS;
}
