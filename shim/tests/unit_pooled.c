/* unit_pooled.c - stream-ordered memory that is served from pools of ours: random calls against an obvious slow model.
 *
 * Compiled with the library's own sources, so that the sanitizers see them. The driver is streaming.c. The model is a list of all that is live and of all that was freed: memory may be returned again if it was
 * freed in the same stream, or if the stream in which it was freed has got there, or if the stream that gets it waits for that. At the end nothing is left.
 */
#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bursting.h"
#include "streaming.h"

#undef NDEBUG

enum { MOST = 300, STEPS = 120000, LEASE_PAGES = 120, THREADS = 4, THREAD_STEPS = 6000 };

/* The program and the model. */

static struct piece {
    uint64_t at, bytes;
    unsigned pool, stream;
} held[MOST];
static unsigned count;
static struct freed { /* what was freed and not returned again */
    uint64_t at, bytes, queued;
    unsigned stream;
} freed[100000];
static unsigned freed_count;
static CUmemoryPool other;

static bool overlap(uint64_t at, uint64_t bytes, uint64_t its, uint64_t its_bytes)
{
    return at < its + its_bytes && its < at + bytes;
}

/* May this stream have memory that was freed so? */
static bool may_have(unsigned stream, const struct freed *what)
{
    return what->stream == stream || fake.stream[what->stream].ended >= what->queued || fake.stream[stream].after[what->stream] >= what->queued;
}

static void returned(unsigned stream, uint64_t at, uint64_t bytes)
{
    for (unsigned i = 0; i < count; i++)
        assert(!overlap(at, bytes, held[i].at, pooled_rounded(held[i].bytes)));
    for (unsigned i = 0; i < freed_count;) {
        const struct freed was = freed[i];
        if (!overlap(at, bytes, was.at, was.bytes)) {
            i++;
            continue;
        }
        assert(may_have(stream, &was));
        freed[i] = freed[--freed_count]; /* who has it next comes after this one; what is left of it on both sides stays */
        if (was.at < at)
            freed[freed_count++] = (struct freed){was.at, at - was.at, was.queued, was.stream};
        if (at + bytes < was.at + was.bytes)
            freed[freed_count++] = (struct freed){at + bytes, was.at + was.bytes - at - bytes, was.queued, was.stream};
    }
}

static uint64_t used_of(unsigned pool)
{
    uint64_t bytes = 0;
    for (unsigned i = 0; i < count; i++)
        bytes += held[i].pool == pool ? held[i].bytes : 0;
    return bytes;
}

static uint64_t attribute(unsigned pool, CUmemPool_attribute which)
{
    cuuint64_t value = 77;
    assert(cuMemPoolGetAttribute(pool == 0 ? POOL : other, which, &value) == CUDA_SUCCESS);
    return value;
}

static uint64_t some_bytes(void)
{
    switch (draw(4)) {
    case 0:
        return 1 + draw(3000);
    case 1:
        return 1 + draw(2 << 20);
    default:
        return 1 + draw(12 << 20);
    }
}

static void allocates(void)
{
    const unsigned stream = draw(STREAMS + 1), pool = other != NULL ? draw(2) : 0;
    const uint64_t bytes = some_bytes();
    CUdeviceptr at = 0;
    CUresult rc;
    if (count == MOST)
        return;
    if (pool == 1)
        rc = cuMemAllocFromPoolAsync(&at, bytes, other, stream_at(stream));
    else if (stream == STREAMS)
        rc = cuMemAllocAsync_ptsz(&at, bytes, NULL);
    else
        rc = cuMemAllocAsync(&at, bytes, stream_at(stream));
    assert(rc == CUDA_SUCCESS || rc == CUDA_ERROR_OUT_OF_MEMORY);
    fake.refused += rc != CUDA_SUCCESS;
    if (rc != CUDA_SUCCESS)
        return;
    fake.served++;
    assert(at % 256 == 0);
    returned(stream, at, pooled_rounded(bytes)); /* what is beyond the request goes with it */
    held[count++] = (struct piece){at, bytes, pool, stream};
    fake.stream[stream].queued += draw(3); /* work that uses it */
}

static void frees(void)
{
    if (count == 0)
        return;
    const unsigned i = draw(count), stream = draw(3) == 0 ? draw(STREAMS + 1) : i % (STREAMS + 1);
    const struct piece was = held[i];
    held[i] = held[--count];
    if (draw(12) == 0) {
        assert(cuMemFree_v2(was.at) == CUDA_SUCCESS);
        return;
    }
    if (stream != was.stream) /* as every program has to, which frees in another stream */
        fake.stream[stream].after[was.stream] = fake.stream[was.stream].queued;
    fake.stream[stream].queued += draw(3) + (stream != was.stream);
    freed[freed_count++] = (struct freed){was.at, pooled_rounded(was.bytes), fake.stream[stream].queued, stream};
    assert((stream == STREAMS ? cuMemFreeAsync_ptsz(was.at, NULL) : cuMemFreeAsync(was.at, stream_at(stream))) == CUDA_SUCCESS);
    assert(cuMemFreeAsync(was.at, stream_at(0)) == CUDA_ERROR_INVALID_VALUE); /* a second time */
}

static void progresses(void)
{
    struct work *work = &fake.stream[draw(STREAMS + 1)];
    if (work->ended < work->queued)
        ends((unsigned)(work - fake.stream), work->ended + 1 + draw((unsigned)(work->queued - work->ended)));
    for (unsigned i = 0; i < freed_count;)
        if (fake.stream[freed[i].stream].ended >= freed[i].queued)
            freed[i] = freed[--freed_count];
        else
            i++;
}

static void other_pool(void)
{
    const CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    if (other == NULL) {
        assert(cuMemPoolCreate(&other, &properties) == CUDA_SUCCESS);
        return;
    }
    assert(cuMemPoolDestroy(other) == CUDA_SUCCESS);
    other = NULL;
    for (unsigned i = 0; i < count; i++)
        held[i].pool += held[i].pool == 1; /* of a pool that is gone: its memory stays until it is freed */
}

static void synchronizes(void)
{
    if (draw(2) == 0)
        assert(cuCtxSynchronize() == CUDA_SUCCESS);
    else
        assert(cuStreamSynchronize(stream_at(draw(STREAMS))) == CUDA_SUCCESS);
}

static void one_step(unsigned number)
{
    switch (draw(20)) {
    case 0: case 1: case 2: case 3: case 4: case 5: case 6: case 7:
        allocates();
        break;
    case 8: case 9: case 10: case 11: case 12: case 13: case 14:
        frees();
        break;
    case 15: case 16: case 17:
        progresses();
        break;
    case 18:
        if (draw(20) == 0)
            other_pool();
        else if (draw(10) == 0)
            synchronizes();
        break;
    default:
        if (draw(10) == 0)
            assert(cuMemPoolTrimTo(POOL, draw(40) * PAGE) == CUDA_SUCCESS);
    }
    if (number % 1000 == 0) {
        fake.threshold = draw(3) == 0 ? UINT64_MAX : draw(2) * draw(40) * PAGE;
        fake.opportunistic = draw(4) > 0;
        fake.internal = draw(4) > 0;
        fake.fails = draw(3) == 0 ? 20 : 0;
    }
}

static void check(const struct gpu *gpu)
{
    uint64_t reserved = 0;
    for (unsigned pool = 0; pool < (other != NULL ? 2 : 1); pool++) {
        assert(attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == used_of(pool));
        assert(attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH) >= used_of(pool));
        assert(attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) >= used_of(pool));
        reserved += attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
    }
    assert(reserved <= fake.pages * PAGE); /* and what is left of pools that are gone */
    assert(fake.pages * PAGE + atomic_load(&gpu->elastic_unused_bytes) == LEASE_PAGES * PAGE);
    assert(fake.pages * PAGE == atomic_load(&gpu->elastic_bytes));
}

static void all_is_freed(const struct gpu *gpu)
{
    fake.threshold = 0;
    while (count > 0)
        assert(cuMemFreeAsync(held[--count].at, stream_at(0)) == CUDA_SUCCESS);
    freed_count = 0;
    all_end();
    assert(cuCtxSynchronize() == CUDA_SUCCESS);
    assert(fake.pages == 0 && atomic_load(&gpu->elastic_unused_bytes) == LEASE_PAGES * PAGE);
    assert(attribute(0, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 0 && attribute(0, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 0);
    uint64_t zero = 0;
    assert(cuMemPoolSetAttribute(POOL, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &zero) == CUDA_SUCCESS);
    assert(attribute(0, CU_MEMPOOL_ATTR_USED_MEM_HIGH) == 0);
}

/* The pool keeps a region of 100 MiB, whatever is needed. */
static void keeps_a_region(void)
{
    CUdeviceptr at;
    fake.threshold = UINT64_MAX;
    assert(cuMemAllocAsync(&at, 50 * PAGE, stream_at(0)) == CUDA_SUCCESS && cuMemFreeAsync(at, stream_at(0)) == CUDA_SUCCESS);
    all_end();
    assert(cuCtxSynchronize() == CUDA_SUCCESS && attribute(0, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 50 * PAGE);
}

static void an_idle_region_that_is_larger_than_what_is_missing_is_released(struct gpu *gpu)
{
    keeps_a_region();
    assert(elastic_trim(gpu, PAGE) == 50 * PAGE && elastic_trim(gpu, PAGE) == 0);
}

static void a_recall_releases_what_is_idle(struct gpu *gpu)
{
    struct wire_packet packet = {.header.type = WIRE_RECALL, .body.amount.bytes = LEASE_PAGES * PAGE};
    keeps_a_region();
    assert(!link_handle(&packet)); /* there is no arbiter, to which it would be returned */
    assert(fake.pages == 0 && atomic_load(&gpu->elastic_unused_bytes) == LEASE_PAGES * PAGE);
}

/* As where the regions that are kept are being swapped, and none of them can be released. */
static void what_is_idle_in_a_pool_is_no_surplus(struct gpu *gpu)
{
    keeps_a_region();
    atomic_store(&gpu->kept_bytes, UINT64_C(1) << 30);
    atomic_store(&gpu->kept_least_bytes, UINT64_C(1) << 30);
    elastic_surplus();
    assert(attribute(0, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 50 * PAGE);
    atomic_store(&gpu->kept_bytes, 0);
    atomic_store(&gpu->kept_least_bytes, 0);
    assert(elastic_trim(gpu, UINT64_MAX) == 50 * PAGE);
}

static void what_fits_into_no_lease_waits_for_no_memory(void)
{
    CUdeviceptr at;
    atomic_store(&tangram.elastic.moving, 1);
    atomic_store(&tangram.hot.swapped, true);
    alarm(20);
    assert(cuMemAllocAsync(&at, UINT64_C(1) << 50, stream_at(0)) == CUDA_ERROR_OUT_OF_MEMORY);
    alarm(0);
    atomic_store(&tangram.elastic.moving, 0);
    atomic_store(&tangram.hot.swapped, false);
}

/* One thread looks whether stream 0 has got to its last event. Before its query, another takes that event to record it again, which fails; and a third
 * frees in stream 1, which has got there, and needs an event. */
static CUdeviceptr last_freed, freed_elsewhere;
static CUresult (*real_query)(CUevent), (*real_record)(CUevent, CUstream), (*real_synchronize)(CUstream);

static CUresult refuse_to_record(CUevent event, CUstream stream)
{
    (void)event, (void)stream;
    return (CUresult)REFUSED;
}

static CUresult free_elsewhere(CUstream stream)
{
    (void)stream;
    tangram.driver.cuEventRecord = real_record;
    assert(cuMemFreeAsync(freed_elsewhere, stream_at(1)) == CUDA_SUCCESS);
    ends(1, fake.stream[1].queued);
    return (CUresult)REFUSED;
}

static CUresult query_later(CUevent event)
{
    tangram.driver.cuEventQuery = real_query;
    tangram.driver.cuEventRecord = refuse_to_record;
    tangram.driver.cuStreamSynchronize = free_elsewhere;
    assert(cuMemFreeAsync(last_freed, stream_at(0)) == (CUresult)REFUSED);
    tangram.driver.cuStreamSynchronize = real_synchronize;
    return real_query(event);
}

static void an_event_that_another_thread_queries_is_not_another_streams(void)
{
    CUdeviceptr at[POOLED_EVENTS_MOST];
    struct pooled *pool = tangram.elastic.pooled.first;
    while (pool->handle != POOL || pool->gone)
        pool = pool->next;
    for (unsigned i = 0; i < POOLED_EVENTS_MOST; i++)
        assert(cuMemAllocAsync(&at[i], PAGE, stream_at(0)) == CUDA_SUCCESS);
    assert(cuMemAllocAsync(&last_freed, PAGE, stream_at(0)) == CUDA_SUCCESS && cuMemAllocAsync(&freed_elsewhere, PAGE, stream_at(1)) == CUDA_SUCCESS);
    fake.stream[0].queued++;
    fake.stream[1].queued++;
    for (unsigned i = 0; i < POOLED_EVENTS_MOST; i++)
        assert(cuMemFreeAsync(at[i], stream_at(0)) == CUDA_SUCCESS);
    real_query = tangram.driver.cuEventQuery;
    real_record = tangram.driver.cuEventRecord;
    real_synchronize = tangram.driver.cuStreamSynchronize;
    tangram.driver.cuEventQuery = query_later;
    pooled_settle(pool);
    const struct pooled_stream *stream = pooled_stream(pool, fake.stream[0].id, false);
    assert(tangram.driver.cuEventQuery == real_query && stream != NULL && stream->oldest != NULL && stream->events == POOLED_EVENTS_MOST);
    held[count++] = (struct piece){.at = last_freed};
}

/* Several threads, each with a stream of its own and its own memory, which the others free. */
static _Atomic(uint64_t) mailbox[THREADS];

static void *thread(void *number)
{
    const unsigned own = (unsigned)(uintptr_t)number;
    unsigned seed = own + 1;
    for (unsigned i = 0; i < THREAD_STEPS; i++) {
        CUdeviceptr at = 0;
        const uint64_t bytes = 1 + (uint64_t)rand_r(&seed) % (i % 3 == 0 ? 3 << 20 : 9000);
        if (cuMemAllocAsync(&at, bytes, stream_at(own)) != CUDA_SUCCESS)
            at = 0;
        at = atomic_exchange(&mailbox[(unsigned)rand_r(&seed) % THREADS], at);
        if (at != 0)
            assert(cuMemFreeAsync(at, stream_at(own)) == CUDA_SUCCESS);
        if (i % 50 == 0)
            cuStreamSynchronize(stream_at(own));
    }
    return NULL;
}

static void threads(void)
{
    pthread_t made[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        assert(pthread_create(&made[i], NULL, thread, (void *)i) == 0); /* NOLINT(performance-no-int-to-ptr) */
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(made[i], NULL);
    for (unsigned i = 0; i < THREADS; i++)
        if (mailbox[i] != 0)
            held[count++] = (struct piece){.at = mailbox[i]};
}

int main(void)
{
    process_check();
    streaming_begin();
    struct gpu *gpu = bursting_gpu(0, LEASE_PAGES * PAGE);
    for (unsigned number = 1; number <= STEPS; number++) {
        one_step(number);
        check(gpu);
        if (number % 20000 == 0) {
            all_is_freed(gpu);
            check(gpu);
        }
    }
    fake.fails = 0;
    all_is_freed(gpu);
    threads();
    all_is_freed(gpu);
    an_idle_region_that_is_larger_than_what_is_missing_is_released(gpu);
    a_recall_releases_what_is_idle(gpu);
    what_is_idle_in_a_pool_is_no_surplus(gpu);
    what_fits_into_no_lease_waits_for_no_memory();
    an_event_that_another_thread_queries_is_not_another_streams();
    all_is_freed(gpu);
    assert(fake.waited > 0);
    printf("unit_pooled: ok, %u served, %u refused, %u waits between streams, %u events\n", fake.served, fake.refused, fake.waited, fake.events);
    return 0;
}
