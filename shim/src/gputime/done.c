/* done.c - whether streams have anything left: by the records, else by a query of the driver.
 *
 * Any answer but "not ready" ends a stream's work, errors too. Each context has a default stream of its own, and a context may lie on another
 * GPU: the state of one implies nothing about another. No query is made while the calling thread or the stream captures: it would end the capture.
 */
#include <stdlib.h>

#include "hooks/hook.h"
#include "gputime/launching.h"
#include "memory/memory.h"
#include "memory/pool.h"

enum { INVALID_HANDLE = 400 };

/* A stream whose context has failed, or that is gone, does not capture. */
bool stream_captures(CUstream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult rc = HAS(cuStreamIsCapturing) ? tangram.driver.cuStreamIsCapturing(stream, &status) : CUDA_SUCCESS;
    return rc == CUDA_SUCCESS ? status != CU_STREAM_CAPTURE_STATUS_NONE : !work_ended(rc) && (int)rc != INVALID_HANDLE;
}

/* By the calling thread, in the context that it has. */
static bool can_be_requested(struct activity_stream *of)
{
    uintptr_t key = atomic_load(&of->key);
    if (!stream_is_default(key))
        return key != 0;
    return (key == STREAM_LEGACY || key == stream_key_of_thread()) && atomic_load(&of->context) == stream_context_now();
}

/* The driver reports that the stream has nothing left, or does not exist any more. */
static bool driver_done(CUstream stream)
{
    if (stream_captures(stream))
        return false;
    CUresult rc = tangram.driver.cuStreamQuery(stream);
    return work_ended(rc) || ((int)rc == INVALID_HANDLE && (uintptr_t)stream > 2);
}

/* Has the stream nothing left? */
bool stream_done(struct activity_stream *of)
{
    uint64_t last = atomic_load(&of->last);
    if (UNLIKELY(stream_is_event(atomic_load(&of->key))))
        return destroyed_done(of);
    if (stream_is_clean(of))
        return true;
    if (!can_be_requested(of))
        return false;
    uintptr_t key = atomic_load(&of->key);
    if (!driver_done(stream_is_default(key) && key != STREAM_LEGACY ? (CUstream)2 : (CUstream)key))
        return false;
    stream_clean(&of->clean, last);
    return true;
}

/* In the calling thread's context, up to the first stream that is not done. A query in relaxed mode does not end a capture
 * elsewhere. */
bool streams_done(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    bool exchanged = tangram.driver.cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS;
    struct activity_stream *of;
    bool done = true;
    stream_context_check();
    for (size_t at = 0; done && (of = streams_next(&at)) != NULL;)
        done = stream_done(of);
    if (exchanged)
        tangram.driver.cuThreadExchangeStreamCaptureMode(&mode);
    return done;
}

bool streams_clean(void)
{
    struct activity_stream *of;
    bool clean = true;
    for (size_t at = 0; clean && (of = streams_next(&at)) != NULL;)
        clean = stream_is_clean(of);
    return clean;
}

/* In a context that our own thread makes current: its default stream, and what can be queried in it. A context that no longer exists has
 * nothing left. */
static bool context_done(CUcontext context)
{
    CUcontext popped;
    struct activity_stream *of;
    if (tangram.driver.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS)
        return false;
    bool done = driver_done((CUstream)STREAM_LEGACY);
    for (size_t at = 0; done && (of = streams_next(&at)) != NULL;)
        done = stream_done(of) || stream_is_default(atomic_load(&of->key)); /* another context's is queried there */
    tangram.driver.cuCtxPopCurrent_v2(&popped);
    return done;
}

/* The same, without the records: a launch that the program was about to make may have been taken for done. Not known of default streams of threads. */
static bool context_has_more(CUcontext context)
{
    CUcontext popped;
    struct activity_stream *of;
    if (tangram.driver.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS)
        return false;
    bool more = !driver_done((CUstream)STREAM_LEGACY);
    for (size_t at = 0; !more && (of = streams_next(&at)) != NULL;) {
        const uintptr_t key = atomic_load(&of->key);
        more = key != 0 && !stream_is_default(key) && !stream_is_event(key) && !driver_done((CUstream)key);
    }
    tangram.driver.cuCtxPopCurrent_v2(&popped);
    return more;
}

bool contexts_have_more(void)
{
    const size_t capacity = contexts_list(NULL, 0);
    CUcontext *context = malloc(capacity * sizeof *context + 1);
    const size_t count = context == NULL ? 0 : contexts_list(context, capacity);
    bool more = false;
    for (size_t c = 0; c < count && c < capacity && !more; c++)
        more = context_has_more(context[c]);
    free(context);
    return more;
}

/* A default stream of a context that is none of these: of one that was not seen being made. */
static bool is_of_none(struct activity_stream *of, const CUcontext *context, size_t count)
{
    bool none = atomic_load(&of->key) == STREAM_LEGACY;
    for (size_t c = 0; c < count; c++)
        none = none && atomic_load(&of->context) != stream_context_named(context[c]);
    return none;
}

/* From our own thread, which has no context: any of ours will do for a stream's handle, and each is queried for its default
 * stream. The work in an unknown context counts as done when all others are done. */
bool contexts_done(void)
{
    struct activity_stream *of;
    uint64_t launches = atomic_load(&tangram.activity.launches);
    size_t capacity = contexts_list(NULL, 0);
    CUcontext *context = malloc(capacity * sizeof *context + 1);
    size_t count = context == NULL ? 0 : contexts_list(context, capacity);
    bool done = count > 0 && count <= capacity;
    for (size_t c = 0; c < count && done; c++)
        done = context_done(context[c]);
    for (size_t at = 0; done && (of = streams_next(&at)) != NULL;)
        if (is_of_none(of, context, count))
            stream_clean(&of->clean, launches);
    free(context);
    return done && streams_clean();
}
