/* capture.c - streams that capture: what is launched there becomes a node of a graph (graph.c). */
#include "internal.h"

CUresult cuGraphCreate(CUgraph *graph, unsigned flags);

EXPORT CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode)
{
    CUstream stream;
    (void)mode;
    TRY(stream_get(handle, &stream));
    CHECK((uintptr_t)handle > 1, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED); /* the legacy stream cannot be captured */
    CHECK(stream->capture == NULL, CUDA_ERROR_ILLEGAL_STATE);
    return cuGraphCreate(&stream->capture, 0);
}

EXPORT CUresult cuStreamBeginCapture(CUstream handle)
{
    return cuStreamBeginCapture_v2(handle, CU_STREAM_CAPTURE_MODE_GLOBAL);
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

EXPORT CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status)
{
    CUstream stream;
    TRY(stream_get(handle, &stream));
    CHECK(status != NULL, CUDA_ERROR_INVALID_VALUE);
    *status = stream->capture != NULL ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                          const CUgraphNode **after, size_t *afters)
{
    CUstream stream;
    TRY(cuStreamIsCapturing(handle, status));
    TRY(stream_get(handle, &stream));
    if (id != NULL)
        *id = (cuuint64_t)(uintptr_t)stream->capture;
    if (graph != NULL)
        *graph = stream->capture;
    if (after != NULL)
        *after = NULL;
    if (afters != NULL)
        *afters = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                          const CUgraphNode **after, const CUgraphEdgeData **edges, size_t *afters)
{
    if (edges != NULL)
        *edges = NULL;
    return cuStreamGetCaptureInfo_v2(handle, status, id, graph, after, afters);
}

EXPORT CUresult cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id)
{
    return cuStreamGetCaptureInfo_v2(handle, status, id, NULL, NULL, NULL);
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
