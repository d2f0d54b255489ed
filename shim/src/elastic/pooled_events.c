/* pooled_events.c - what streams have got to: an event is recorded behind each free, and queried when memory is needed or the program
 * synchronises. No lock is held meanwhile. A stream's events pass in their order, so the newest one is queried first.
 */
#include "memory/memory.h"
#include "memory/pool.h"

#include <stdlib.h>

static struct elastic *const elastic = &tangram.elastic;

#ifndef POOLED_EVENTS_MOST /* a test has fewer */
#define POOLED_EVENTS_MOST 64 /* of one stream; guessed: a query takes about a microsecond */
#endif
#define PER_THREAD ((CUstream)2)

CUstream pooled_named(CUstream stream, bool per_thread)
{
    return per_thread && stream == NULL ? PER_THREAD : stream;
}

/* Locked. Out of its stream's list. */
static struct pooled_event *take_last(struct pooled_stream *stream)
{
    struct pooled_event *before = NULL, *last = stream->first;
    for (; last != NULL && last->next != NULL; last = last->next)
        before = last;
    if (last == NULL)
        return NULL;
    *(before != NULL ? &before->next : &stream->first) = NULL;
    stream->last = before;
    stream->events--;
    return last;
}

/* Locked. */
static struct pooled_event *take_spare(CUcontext context)
{
    for (struct pooled_event **place = &elastic->pooled.spare, *event; (event = *place) != NULL; place = &event->next)
        if (event->context == context) {
            *place = event->next;
            return event;
        }
    return NULL;
}

/* One that is there. A stream that has many gets no more: its last one is recorded again, behind what it stood behind and more. */
static struct pooled_event *take(const struct pooled *pool, unsigned long long id, CUcontext context)
{
    lock_acquire(&elastic->lock);
    struct pooled_stream *stream = pooled_stream((struct pooled *)pool, id, false);
    const bool many = stream != NULL && stream->events >= POOLED_EVENTS_MOST;
    struct pooled_event *event = many ? take_last(stream) : take_spare(context);
    if (event != NULL)
        event->stood = many;
    lock_release(&elastic->lock);
    return event;
}

static struct pooled_event *make(CUcontext context)
{
    struct pooled_event *event = malloc(sizeof *event);
    if (event == NULL)
        return NULL;
    *event = (struct pooled_event){.context = context};
    if (tangram.driver.cuEventCreate(&event->event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS)
        return event;
    free(event);
    return NULL;
}

static void put_back(struct pooled *pool, unsigned long long id, struct pooled_event *event)
{
    if (event == NULL)
        return;
    lock_acquire(&elastic->lock);
    pooled_event_back(pool, id, event);
    lock_release(&elastic->lock);
}

/* In the current context, whose stream it has to be. */
static struct pooled_event *record_here(struct pooled *pool, unsigned long long id, CUstream stream, CUcontext context)
{
    struct pooled_event *event = take(pool, id, context);
    if (event == NULL)
        event = make(context);
    if (event != NULL && tangram.driver.cuEventRecord(event->event, stream) == CUDA_SUCCESS)
        return event;
    put_back(pool, id, event);
    return NULL;
}

/* A program may free in the stream of a context that is not its current one. */
static struct pooled_event *record_there(struct pooled *pool, unsigned long long id, CUstream stream, CUcontext current)
{
    CUcontext context, popped;
    if (!HAS(cuStreamGetCtx) || tangram.driver.cuStreamGetCtx(stream, &context) != CUDA_SUCCESS || context == current ||
        tangram.driver.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS)
        return NULL;
    struct pooled_event *event = record_here(pool, id, stream, context);
    tangram.driver.cuCtxPopCurrent_v2(&popped);
    return event;
}

struct pooled_event *pooled_record(struct pooled *pool, unsigned long long id, CUstream stream, uint64_t number)
{
    CUcontext context = NULL;
    struct pooled_event *event = NULL;
    CUstreamCaptureMode mode = relax(); /* another thread may capture */
    if (tangram.driver.cuCtxGetCurrent(&context) == CUDA_SUCCESS && context != NULL)
        event = record_here(pool, id, stream, context);
    if (event == NULL)
        event = record_there(pool, id, stream, context);
    relax_end(mode);
    if (event != NULL)
        event->number = number;
    return event;
}

/* Locked. Frees up to that number have happened. `ours`: the events are still there. */
static void passed(struct pooled *pool, unsigned long long id, uint64_t number, bool ours)
{
    struct pooled_stream *stream = pooled_stream(pool, id, false);
    if (stream == NULL) /* another thread found the same */
        return;
    for (struct pooled_event *event; (event = stream->first) != NULL && event->number <= number;) {
        stream->first = event->next;
        stream->events--;
        if (stream->first == NULL)
            stream->last = NULL;
        if (ours)
            pooled_spare(event);
        else
            free(event);
    }
    pooled_done(pool, stream, number);
}

/* Has the stream got to its newest free, or else its oldest? */
static bool look(struct pooled *pool, unsigned long long id, bool newest)
{
    CUevent event = NULL;
    uint64_t number = 0;
    lock_acquire(&elastic->lock);
    const struct pooled_stream *stream = pooled_stream(pool, id, false);
    const struct pooled_event *its = stream == NULL ? NULL : newest ? stream->last : stream->first;
    if (its != NULL) {
        event = its->event;
        number = its->number;
    }
    lock_release(&elastic->lock);
    if (event == NULL)
        return false;
    const CUresult rc = tangram.driver.cuEventQuery(event);
    if (rc != CUDA_SUCCESS && rc != CUDA_ERROR_INVALID_HANDLE && rc != CUDA_ERROR_CONTEXT_IS_DESTROYED) /* those: it went with its context */
        return false;
    lock_acquire(&elastic->lock);
    passed(pool, id, number, rc == CUDA_SUCCESS);
    lock_release(&elastic->lock);
    return true;
}

/* The next stream in which something waits, by id. */
static bool next_stream(const struct pooled *pool, unsigned long long *id, bool *any)
{
    bool found = false;
    unsigned long long least = 0;
    lock_acquire(&elastic->lock);
    for (const struct pooled_stream *stream = pool->streams; stream != NULL; stream = stream->next)
        if (stream->first != NULL && (!*any || stream->id > *id) && (!found || stream->id < least)) {
            found = true;
            least = stream->id;
        }
    lock_release(&elastic->lock);
    *any = true;
    *id = least;
    return found;
}

void pooled_settle(struct pooled *pool)
{
    unsigned long long id = 0;
    bool any = false;
    CUstreamCaptureMode mode = relax();
    while (next_stream(pool, &id, &any))
        if (!look(pool, id, true))
            while (look(pool, id, false))
                continue;
    relax_end(mode);
    lock_acquire(&elastic->lock);
    pooled_streams_end(pool);
    lock_release(&elastic->lock);
}

CUresult pooled_wait(const struct pooled_request *request, CUevent event)
{
    CUstreamCaptureMode mode = relax();
    const CUresult rc = tangram.driver.cuStreamWaitEvent(request->stream, event, 0);
    relax_end(mode);
    return rc;
}

/* Locked. Its events went with it, and their handles may be the program's by now. */
static void forget_events(struct pooled *pool, CUcontext context, uint64_t before)
{
    for (struct pooled_stream *stream = pool->streams; stream != NULL; stream = stream->next)
        for (struct pooled_event *event = stream->first, *next; event != NULL; event = next) {
            next = event->next;
            if (event->context == context && event->number <= before)
                passed(pool, stream->id, event->number, false); /* a stream is of one context */
        }
}

void pooled_forget_context(CUcontext context, uint64_t before)
{
    if (!atomic_load(&elastic->pooled.any))
        return;
    lock_acquire(&elastic->lock);
    for (struct pooled *pool = elastic->pooled.first; pool != NULL; pool = pool->next)
        forget_events(pool, context, before);
    for (struct pooled_event *event; (event = take_spare(context)) != NULL;)
        free(event);
    for (size_t i = 0; i < elastic->regions; i++)
        for (struct range *range = elastic->region[i]->pool != NULL ? elastic->region[i]->first : NULL; range != NULL; range = range->above)
            if (range->context == context && range->number <= before)
                range->context = NULL; /* memory of a pool stays */
    lock_release(&elastic->lock);
}
