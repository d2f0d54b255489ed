/* pooled.c - the records of pools that can be swapped: which range waits in which stream, and which regions are idle. Everything here is under
 * the lock of struct elastic and calls nothing but the allocator. See pooled.h.
 */
#include "memory/memory.h"
#include "memory/pool.h"

#include <stdlib.h>

static struct pooled_all *const all = &tangram.elastic.pooled;

/* The place of a pool that is destroyed and has no memory any more, or a new one. */
static struct pooled *vacant(void)
{
    for (struct pooled *pool = all->first; pool != NULL; pool = pool->next)
        if (pool->gone && pool->regions == 0)
            return pool;
    struct pooled *pool = calloc(1, sizeof *pool);
    if (pool != NULL) {
        pool->next = all->first;
        all->first = pool;
    }
    return pool;
}

struct pooled *pooled_of(struct pool *pool, bool make)
{
    struct pooled *its = atomic_load(&pool->pooled);
    if (its != NULL || !make || (its = vacant()) == NULL)
        return its;
    its->handle = atomic_load(&pool->handle);
    its->device = atomic_load(&pool->device);
    its->gpu = atomic_load(&pool->gpu);
    its->used = its->used_high = its->reserved_high = 0;
    its->others = (struct access){0, 0};
    its->gone = false;
    atomic_store(&pool->pooled, its);
    atomic_store(&all->any, true);
    return its;
}

struct pooled_stream *pooled_stream(struct pooled *pool, unsigned long long id, bool make)
{
    struct pooled_stream *stream = pool->streams;
    while (stream != NULL && stream->id != id)
        stream = stream->next;
    if (stream != NULL || !make || (stream = calloc(1, sizeof *stream)) == NULL)
        return stream;
    stream->id = id;
    stream->next = pool->streams;
    return pool->streams = stream;
}

void pooled_streams_end(struct pooled *pool)
{
    for (struct pooled_stream **place = &pool->streams, *stream; (stream = *place) != NULL;) {
        if (stream->oldest != NULL || stream->first != NULL) {
            place = &stream->next;
            continue;
        }
        *place = stream->next;
        for (unsigned size = 0; size < POOLED_SIZES; size++)
            free(stream->heap[size].spare);
        free(stream);
    }
}

bool pooled_waits(const struct pooled *pool)
{
    for (const struct pooled_stream *stream = pool->streams; stream != NULL; stream = stream->next)
        if (stream->oldest != NULL)
            return true;
    return false;
}

uint64_t pooled_reserved(const struct pooled *pool)
{
    return pool->region_bytes[POOLED_SMALL] + pool->region_bytes[POOLED_PAGES];
}

static enum pooled_size size_of(const struct elastic_region *region)
{
    return region->kind == REGION_POOL_SMALL ? POOLED_SMALL : POOLED_PAGES;
}

/* Idle regions. */

static void idle_add(struct pooled *pool, struct elastic_region *region)
{
    region->older = pool->newest;
    region->newer = NULL;
    *(pool->newest != NULL ? &pool->newest->newer : &pool->oldest) = region;
    pool->newest = region;
    pool->idle_bytes += region->bytes;
}

static void idle_remove(struct pooled *pool, struct elastic_region *region)
{
    *(region->older != NULL ? &region->older->newer : &pool->oldest) = region->newer;
    *(region->newer != NULL ? &region->newer->older : &pool->newest) = region->older;
    pool->idle_bytes -= region->bytes;
}

/* So many more of its bytes are not free for every stream, or so many less. */
static void busier(struct elastic_region *region, uint64_t bytes)
{
    if (region->busy == 0)
        idle_remove(region->pool, region);
    region->busy += bytes;
}

static void less_busy(struct elastic_region *region, uint64_t bytes)
{
    region->busy -= bytes;
    if (region->busy == 0)
        idle_add(region->pool, region);
}

/* What waits in a stream. */

static void unlink_range(struct pooled_stream *stream, struct range *range)
{
    *(range->older != NULL ? &range->older->newer : &stream->oldest) = range->newer;
    *(range->newer != NULL ? &range->newer->older : &stream->newest) = range->older;
    range->freed = 0;
}

/* By number: threads that free in one stream may come here in another order than they were numbered in. */
static void link_range(struct pooled_stream *stream, struct range *range, uint64_t number)
{
    struct range *before = stream->newest;
    while (before != NULL && before->freed > number)
        before = before->older;
    range->freed = number;
    range->older = before;
    range->newer = before != NULL ? before->newer : stream->oldest;
    *(range->newer != NULL ? &range->newer->older : &stream->newest) = range;
    *(before != NULL ? &before->newer : &stream->oldest) = range;
}

/* A neighbour that waits in the same stream becomes one with it: both are free when the later of the two is. */
static uint64_t join(struct pooled_stream *stream, struct heap *heap, struct range *neighbour, uint64_t number)
{
    if (neighbour == NULL || neighbour->in != heap)
        return number;
    const uint64_t its = neighbour->freed;
    unlink_range(stream, neighbour);
    return its > number ? its : number;
}

static void wait_in(struct pooled_stream *stream, struct range *range, enum pooled_size size, uint64_t number)
{
    struct heap *heap = &stream->heap[size];
    number = join(stream, heap, range->above, number);
    number = join(stream, heap, range->below, number);
    link_range(stream, heap_give(heap, range), number);
}

void pooled_spare(struct pooled_event *event)
{
    event->next = all->spare;
    all->spare = event;
}

/* By number, as the ranges are. */
static void link_event(struct pooled_stream *stream, struct pooled_event *event)
{
    struct pooled_event **place = &stream->first;
    if (stream->last != NULL && stream->last->number < event->number)
        place = &stream->last->next;
    while (*place != NULL && (*place)->number < event->number)
        place = &(*place)->next;
    event->next = *place;
    *place = event;
    if (event->next == NULL)
        stream->last = event;
    stream->events++;
}

/* A thread that has queried it, or is about to, takes its answer for one about the frees of this stream. So it is never another stream's before it has
 * passed here, whether or not it could be recorded again. */
void pooled_event_back(struct pooled *pool, unsigned long long id, struct pooled_event *event)
{
    struct pooled_stream *stream = event->stood ? pooled_stream(pool, id, false) : NULL;
    if (stream != NULL && event->number > stream->done)
        link_event(stream, event);
    else
        pooled_spare(event);
}

bool pooled_put(struct pooled *pool, struct range *range, unsigned long long id, struct pooled_event *event)
{
    struct pooled_stream *stream = pooled_stream(pool, id, true);
    if (stream == NULL)
        return false;
    if (event->number <= stream->done) { /* a later one has passed meanwhile */
        pooled_give(pool, range);
        pooled_spare(event);
        return true;
    }
    wait_in(stream, range, size_of(region_of(range->at)), event->number);
    link_event(stream, event);
    return true;
}

void pooled_give(struct pooled *pool, struct range *range)
{
    struct elastic_region *region = region_of(range->at);
    const uint64_t bytes = range->bytes;
    heap_give(&pool->heap[size_of(region)], range);
    less_busy(region, bytes);
}

void pooled_done(struct pooled *pool, struct pooled_stream *stream, uint64_t number)
{
    if (number > stream->done)
        stream->done = number;
    for (struct range *range; (range = stream->oldest) != NULL && range->freed <= stream->done;) {
        unlink_range(stream, range);
        heap_close(range->in, range);
        pooled_give(pool, range);
    }
}

/* Requests. */

static struct range *live(const struct pooled_request *request, struct range *range)
{
    struct pooled *pool = request->pool;
    range->state = RANGE_LIVE;
    range->requested = request->requested;
    range->context = request->context;
    range->number = atomic_fetch_add(&tangram.elastic.numbers, 1) + 1;
    *region_start(region_of(range->at), range->at) = range;
    pool->used += range->requested;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    return range;
}

/* The rest of it, if there is one, waits as it did. */
static struct range *take_from_stream(struct pooled_stream *stream, struct heap *heap, uint64_t bytes)
{
    struct range *range = heap_take(heap, bytes);
    if (range == NULL)
        return NULL;
    const uint64_t number = range->freed;
    unlink_range(stream, range);
    if (range->above != NULL && range->above->in == heap && range->above->freed == 0)
        link_range(stream, range->above, number);
    return range;
}

static enum pooled_size size_for(const struct pooled_request *request)
{
    return request->bytes < PAGE ? POOLED_SMALL : POOLED_PAGES;
}

struct range *pooled_take(const struct pooled_request *request)
{
    struct pooled *pool = request->pool;
    const enum pooled_size size = size_for(request);
    struct pooled_stream *stream = pooled_stream(pool, request->id, false);
    struct range *range = stream != NULL ? take_from_stream(stream, &stream->heap[size], request->bytes) : NULL;
    if (range != NULL)
        return live(request, range);
    range = heap_take(&pool->heap[size], request->bytes);
    if (range == NULL)
        return NULL;
    busier(region_of(range->at), range->bytes);
    return live(request, range);
}

/* The first event behind that free; NULL: another thread is recording it. */
static const struct pooled_event *event_behind(const struct pooled_stream *stream, uint64_t number)
{
    const struct pooled_event *event = stream->first;
    while (event != NULL && event->number < number)
        event = event->next;
    return event;
}

struct range *pooled_take_waiting(const struct pooled_request *request, CUevent *event)
{
    const enum pooled_size size = size_for(request);
    for (struct pooled_stream *stream = request->pool->streams; stream != NULL; stream = stream->next) {
        struct range *range = stream->id != request->id ? heap_best_fit(&stream->heap[size], request->bytes) : NULL;
        const struct pooled_event *behind = range != NULL ? event_behind(stream, range->freed) : NULL;
        if (behind == NULL || (range = take_from_stream(stream, &stream->heap[size], request->bytes)) == NULL)
            continue;
        *event = behind->event;
        return live(request, range);
    }
    return NULL;
}

void pooled_leave(struct pooled *pool, struct range *range)
{
    range->state = RANGE_LEAVING;
    pool->used -= range->requested;
    *region_start(region_of(range->at), range->at) = NULL;
}

void pooled_stays(struct pooled *pool, struct range *range)
{
    range->state = RANGE_LIVE;
    pool->used += range->requested;
    *region_start(region_of(range->at), range->at) = range;
}

/* Regions. */

void pooled_open(struct pooled *pool, struct elastic_region *region)
{
    pool->regions++;
    pool->region_bytes[size_of(region)] += region->bytes;
    const uint64_t reserved = pooled_reserved(pool);
    if (reserved > pool->reserved_high)
        pool->reserved_high = reserved;
    heap_open(&pool->heap[size_of(region)], region->first);
    idle_add(pool, region);
}

struct elastic_region *pooled_take_idle(struct pooled *pool, uint64_t keep, uint64_t most)
{
    const uint64_t reserved = pooled_reserved(pool);
    struct elastic_region *region = pool->oldest;
    while (region != NULL && (region->moving > 0 || region->bytes > most || reserved - region->bytes < keep))
        region = region->newer;
    if (region == NULL)
        return NULL;
    idle_remove(pool, region);
    heap_close(&pool->heap[size_of(region)], region->first);
    pool->region_bytes[size_of(region)] -= region->bytes;
    pool->regions--;
    region_unlist(region);
    return region;
}
