/* direction.c - imports a block, maps it at a reserved address, copies it in chunks, unmaps and releases it.
 *
 *     begin      import, map, access             on the processor
 *     issue      one chunk after the other       queued on the direction's own stream, CHUNKS at most
 *     retire     a chunk's event has come        after a job's last chunk: unmap, release, answer
 *
 * The thread retires what is done, then issues one chunk, and waits only when it can do neither.
 */
#include "direction.h"

#include <time.h>
#include <unistd.h>

#include "fail.h"

static uint64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* The job has failed. Waits for all that was issued, for the block is unmapped next. Ends the program if the context can do nothing more: the next
 * copier has a new one. */
static void driver_failed(struct direction *direction, struct job *job, CUresult rc)
{
    if (job->result == COPIER_COPIED) {
        job->result = COPIER_DRIVER_FAILED;
        job->cuda_error = (uint32_t)rc;
    }
    CUresult after = direction->driver->stream_wait(direction->stream);
    if (after != CUDA_SUCCESS)
        fail("the GPU's context has failed with CUDA error %d: ending", (int)after);
}

/* A free range of addresses of at least so many bytes, or NULL with `rc`. There are as many as chunks, and each block in progress has a chunk. */
static struct address_range *range_take(struct direction *direction, uint64_t bytes, CUresult *rc)
{
    struct address_range *range = direction->range;
    while (range->used)
        range++;
    if (range->bytes < bytes) {
        if (range->bytes > 0)
            direction->driver->reserve_end(range->at, range->bytes);
        range->bytes = 0;
        *rc = direction->driver->reserve(&range->at, bytes, 0, 0, 0);
        if (*rc != CUDA_SUCCESS)
            return NULL;
        range->bytes = bytes;
    }
    range->used = true;
    return range;
}

static CUresult map_block(const struct direction *direction, const struct active *active)
{
    const struct driver *driver = direction->driver;
    const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = driver->gpu}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    uint64_t bytes = active->job->request.bytes;
    CUresult rc = driver->map(active->range->at, bytes, 0, active->memory, 0);
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = driver->set_access(active->range->at, bytes, &access, 1);
    if (rc != CUDA_SUCCESS)
        driver->unmap(active->range->at, bytes);
    return rc;
}

/* Imports and maps the block of `active`. On an error nothing of it is left. */
static CUresult take_block(struct direction *direction, struct active *active)
{
    const struct driver *driver = direction->driver;
    void *shareable = (void *)(intptr_t)active->job->descriptor;
    CUresult rc = driver->import(&active->memory, shareable, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (rc != CUDA_SUCCESS)
        return rc;
    active->range = range_take(direction, active->job->request.bytes, &rc);
    if (active->range != NULL && (rc = map_block(direction, active)) == CUDA_SUCCESS)
        return CUDA_SUCCESS;
    if (active->range != NULL)
        active->range->used = false;
    driver->release(active->memory);
    return rc;
}

static void answer(struct direction *direction, struct job *job, uint64_t began_us)
{
    if (job->result == COPIER_COPIED && job->copied_bytes < job->request.bytes)
        job->result = COPIER_FORGOTTEN;
    job->microseconds = now_us() - began_us;
    direction->finished(direction->argument, job);
}

static void begin(struct direction *direction, struct job *job)
{
    struct active *active = direction->active;
    uint64_t began_us = now_us();
    while (active->job != NULL)
        active++;
    *active = (struct active){.job = job, .began_us = began_us};
    CUresult rc = atomic_load(&job->forgotten) ? CUDA_SUCCESS : take_block(direction, active);
    close(job->descriptor);
    if (active->range != NULL && rc == CUDA_SUCCESS) {
        direction->current = active;
        return;
    }
    if (rc != CUDA_SUCCESS)
        driver_failed(direction, job, rc);
    active->job = NULL;
    answer(direction, job, began_us);
}

static void end(struct direction *direction, struct active *active)
{
    struct job *job = active->job;
    CUresult unmapped = direction->driver->unmap(active->range->at, job->request.bytes);
    CUresult released = direction->driver->release(active->memory);
    if (unmapped != CUDA_SUCCESS || released != CUDA_SUCCESS) /* the GPU would keep the block for as long as this process lives */
        fail("a block cannot be released: CUDA errors %d and %d: ending", (int)unmapped, (int)released);
    active->range->used = false;
    active->job = NULL;
    answer(direction, job, active->began_us);
}

static void end_if_done(struct direction *direction, struct active *active)
{
    if (active->issued && active->chunks == 0)
        end(direction, active);
}

/* Up to the end of the block, of a chunk, or of a step in which the pool was registered. */
static uint64_t chunk_bytes(const struct active *active)
{
    uint64_t left = active->job->request.bytes - active->issued_bytes;
    uint64_t to_step = POOL_STEP - (active->job->request.slot_offset + active->issued_bytes) % POOL_STEP;
    uint64_t most = to_step < CHUNK_BYTES ? to_step : CHUNK_BYTES;
    return left < most ? left : most;
}

static CUresult copy_chunk(const struct direction *direction, const struct active *active, const struct chunk *chunk)
{
    CUdeviceptr at = active->range->at + active->issued_bytes;
    void *host = direction->pool->at + active->job->request.slot_offset + active->issued_bytes;
    CUresult rc = direction->saves ? direction->driver->copy_out(host, at, chunk->bytes, direction->stream)
                                   : direction->driver->copy_in(at, host, chunk->bytes, direction->stream);
    return rc != CUDA_SUCCESS ? rc : direction->driver->event_record(chunk->event, direction->stream);
}

/* The next chunk of the current block. */
static void issue(struct direction *direction)
{
    struct active *active = direction->current;
    if (!atomic_load(&active->job->forgotten) && active->job->result == COPIER_COPIED) {
        struct chunk *chunk = &direction->chunk[(direction->oldest + direction->chunks) % CHUNKS];
        chunk->active = active;
        chunk->bytes = chunk_bytes(active);
        CUresult rc = copy_chunk(direction, active, chunk);
        if (rc == CUDA_SUCCESS) {
            direction->chunks++;
            active->chunks++;
            active->issued_bytes += chunk->bytes;
            active->issued = active->issued_bytes == active->job->request.bytes;
        } else {
            driver_failed(direction, active->job, rc);
            active->issued = true;
        }
    } else {
        active->issued = true;
    }
    if (active->issued) {
        direction->current = NULL;
        end_if_done(direction, active);
    }
}

/* The oldest chunk has ended, with `rc`. */
static void retire(struct direction *direction, CUresult rc)
{
    struct chunk *chunk = &direction->chunk[direction->oldest];
    struct active *active = chunk->active;
    direction->oldest = (direction->oldest + 1) % CHUNKS;
    direction->chunks--;
    active->chunks--;
    if (rc == CUDA_SUCCESS)
        active->job->copied_bytes += chunk->bytes;
    else
        driver_failed(direction, active->job, rc);
    end_if_done(direction, active);
}

static void retire_done(struct direction *direction)
{
    while (direction->chunks > 0) {
        CUresult rc = direction->driver->event_query(direction->chunk[direction->oldest].event);
        if ((int)rc == CUDA_ERROR_NOT_READY_)
            return;
        retire(direction, rc);
    }
}

/* The next job; NULL at once if there is none, unless `wait`. */
static struct job *next_job(struct direction *direction, bool wait)
{
    pthread_mutex_lock(&direction->lock);
    struct job *job = job_pop(&direction->waiting);
    if (job == NULL && wait)
        atomic_store(&direction->step_us, 0);
    while (job == NULL && wait) {
        pthread_cond_wait(&direction->came, &direction->lock);
        job = job_pop(&direction->waiting);
    }
    pthread_mutex_unlock(&direction->lock);
    atomic_store(&direction->step_us, now_us());
    return job;
}

static void step(struct direction *direction)
{
    struct job *job;
    atomic_store(&direction->step_us, now_us());
    retire_done(direction);
    if (direction->chunks == CHUNKS)
        retire(direction, direction->driver->event_wait(direction->chunk[direction->oldest].event));
    else if (direction->current != NULL)
        issue(direction);
    else if ((job = next_job(direction, direction->chunks == 0)) != NULL)
        begin(direction, job);
    else
        retire(direction, direction->driver->event_wait(direction->chunk[direction->oldest].event));
}

_Noreturn static void *run(void *argument)
{
    struct direction *direction = argument;
    const struct driver *driver = direction->driver;
    CUresult rc = driver->context_use(driver->context);
    if (rc == CUDA_SUCCESS)
        rc = driver->stream_create(&direction->stream, NOT_WITH_THE_DEFAULT_STREAM);
    for (unsigned i = 0; i < CHUNKS && rc == CUDA_SUCCESS; i++)
        rc = driver->event_create(&direction->chunk[i].event, SLEEP_WHILE_WAITING | NO_TIMING);
    if (rc != CUDA_SUCCESS)
        fail("the driver makes no stream: CUDA error %d", (int)rc);
    for (;;)
        step(direction);
}

void direction_start(struct direction *direction, const struct driver *driver, const struct pool *pool)
{
    pthread_t thread;
    direction->driver = driver;
    direction->pool = pool;
    if (pthread_create(&thread, NULL, run, direction) != 0)
        fail("no thread can be started");
}

bool direction_moves(const struct direction *direction, uint64_t within_us)
{
    uint64_t step_us = atomic_load(&direction->step_us), at_us = now_us();
    return step_us == 0 || at_us < step_us + within_us;
}

void direction_give(struct direction *direction, struct job *job)
{
    pthread_mutex_lock(&direction->lock);
    job_push(&direction->waiting, job);
    pthread_cond_signal(&direction->came);
    pthread_mutex_unlock(&direction->lock);
}
