/* destroyed.c - streams that are destroyed while they have work, which the driver then does all the same.
 *
 * Such a stream cannot be queried any more. An event that is recorded in it before has its place in the records of activity.c, under a key
 * that no stream has, until it has passed or its context was waited for. One thread at a time queries an event, as the one that finds it passed
 * destroys it.
 */
#include "gputime/launching.h"
#include "memory/memory.h"
#include "memory/pool.h"

enum { INVALID_HANDLE = 400 };
static struct activity *const activity_ = &tangram.activity;

/* NULL: the driver refused it, or is too old. */
static CUevent event_in(CUstream stream)
{
    CUevent event = NULL;
    CUcontext context, popped;
    if (tangram.driver.cuStreamGetCtx(stream, &context) != CUDA_SUCCESS ||
        tangram.driver.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS)
        return NULL;
    if (tangram.driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        event = NULL;
    else if (tangram.driver.cuEventRecord(event, stream) != CUDA_SUCCESS) {
        tangram.driver.cuEventDestroy_v2(event);
        event = NULL;
    }
    tangram.driver.cuCtxPopCurrent_v2(&popped);
    return event;
}

void destroyed_leaves(CUstream stream, const struct activity_stream *of)
{
    CUevent event = event_in(stream);
    if (event != NULL) {
        struct stream_name name = {(uintptr_t)event | STREAM_OF_EVENT, atomic_load(&of->context)};
        struct activity_stream *place = stream_place(name);
        if (place != NULL)
            stream_mark(place, atomic_fetch_add(&activity_->launches, 1) + 1);
        else
            tangram.driver.cuEventDestroy_v2(event);
    }
}

/* Takes the key out while the event is queried; false: another thread has. */
static bool exchange_key(struct activity_stream *of, uintptr_t from, uintptr_t to)
{
    pthread_mutex_lock(&activity_->placing);
    bool is_ours = atomic_compare_exchange_strong(&of->key, &from, to);
    pthread_mutex_unlock(&activity_->placing);
    return is_ours;
}

bool destroyed_done(struct activity_stream *of)
{
    const uintptr_t key = atomic_load(&of->key);
    if (!stream_is_event(key) || !exchange_key(of, key, STREAM_BEING_NAMED))
        return stream_is_clean(of);
    CUevent event = (CUevent)(key & ~STREAM_OF_EVENT); /* NOLINT(performance-no-int-to-ptr) */
    CUresult rc = HAS(cuEventQuery) ? tangram.driver.cuEventQuery(event) : CUDA_SUCCESS;
    const bool done = stream_is_clean(of) || work_ended(rc) || (int)rc == INVALID_HANDLE;
    if (done) {
        tangram.driver.cuEventDestroy_v2(event); /* passed, or gone with its context */
        stream_clean(&of->clean, atomic_load(&of->last));
    }
    exchange_key(of, STREAM_BEING_NAMED, done ? 0 : key);
    return done;
}
