/* jobs.c - the jobs of this process, in the order in which they were queued, and the thread that runs them.
 *
 * The thread is there from the first job on. Again and again it lets each job that may run do one piece, so that copies and kernels of
 * different streams go on side by side. Only it takes jobs off the list. If it can do nothing it looks again LOOK_NS later: what it waits for
 * may be kernels, the end of a suspend, or a flag that the host sets.
 */
#include "internal.h"

#include <stdlib.h>

enum { LOOK_NS = 200000, WAIT_NS = 100000000, QUANTUM_NS = 2000000 };
enum { STAGED_MOST = 64 << 10, AT_ONCE_MOST = 2 << 20 };

static struct {
    pthread_mutex_t lock; /* of the list */
    struct job *first;
    bool started;
    _Atomic uint64_t ids;
    _Atomic uint32_t count, bell; /* bell: a futex that changes when a job is queued or has ended */
} jobs = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* The list. */

static bool legacy(CUcontext ctx, CUstream stream)
{
    return stream == ctx->stream;
}

/* Does work of one stream stand behind earlier work of the other? The legacy stream and the blocking ones wait for each other. */
static bool follows(CUcontext ctx, CUstream stream, bool blocking, const struct job *other)
{
    return ctx == other->ctx && (stream == other->stream || (legacy(ctx, stream) && other->blocking) || (blocking && legacy(ctx, other->stream)));
}

static bool is_blocking(CUstream stream)
{
    return (stream->flags & CU_STREAM_NON_BLOCKING) == 0;
}

/* Under the lock: is one of those on the list, up to that number? */
static bool listed(CUcontext ctx, CUstream before, uint64_t last)
{
    for (const struct job *job = jobs.first; job != NULL && job->id <= last; job = job->next)
        if (before == NULL ? job->ctx == ctx : follows(ctx, before, is_blocking(before), job))
            return true;
    return false;
}

static bool listed_before(const struct job *job)
{
    for (const struct job *other = jobs.first; other != job; other = other->next)
        if (follows(job->ctx, job->stream, job->blocking, other))
            return true;
    return false;
}

static bool pending(CUcontext ctx, CUstream before, uint64_t last)
{
    CHECK(atomic_load(&jobs.count) > 0, false);
    SCOPED list = locked(&jobs.lock);
    return listed(ctx, before, last);
}

bool jobs_before(CUstream stream)
{
    return pending(stream->ctx, stream, UINT64_MAX);
}

bool job_ended(uint64_t id)
{
    CHECK(id != 0 && atomic_load(&jobs.count) > 0, true);
    SCOPED list = locked(&jobs.lock);
    const struct job *job = jobs.first;
    while (job != NULL && job->id < id)
        job = job->next;
    return job == NULL || job->id != id;
}

void job_wait(uint64_t id)
{
    for (uint32_t bell = atomic_load(&jobs.bell); !job_ended(id); bell = atomic_load(&jobs.bell))
        bell_wait(&jobs.bell, bell, WAIT_NS);
}

void jobs_wait(CUcontext ctx, CUstream before)
{
    const uint64_t last = atomic_load(&jobs.ids);
    for (uint32_t bell = atomic_load(&jobs.bell); pending(ctx, before, last); bell = atomic_load(&jobs.bell))
        bell_wait(&jobs.bell, bell, WAIT_NS);
}

/* What runs. Each answers whether it could do something; a job that is `over` is taken off the list. */

static uint64_t ran_ns(int device)
{
    gpu_time_settle(cuda.client.page, cuda.device[device].unit);
    return atomic_load(&cuda.client.page->slot[cuda.client.slot].ran_ns[cuda.device[device].unit]);
}

static uint64_t take_time(const struct job *job, uint64_t ns)
{
    return gpu_time_queue(cuda.client.page, cuda.client.slot, cuda.device[job->ctx->device].unit, ns);
}

static void *host_thread(void *given)
{
    struct job *job = *(struct job **)given;
    free(given);
    if (job->run != NULL)
        job->run(job->data);
    else
        job->callback(job->on, CUDA_SUCCESS, job->data);
    atomic_store(&job->ended, true);
    bell_ring(&jobs.bell); /* the job may be gone */
    return NULL;
}

static bool start(struct job *job)
{
    const int device = job->ctx->device;
    if (!job_ended(job->after) || !work_done(device, job->after_ns))
        return false;
    if (job->kind == JOB_HOST && beside(host_thread, &job, sizeof job) != CUDA_SUCCESS)
        return false; /* there is no thread now */
    if (job->kind <= JOB_WAIT) {
        job->end_ns = job->ns > 0 ? take_time(job, job->ns) : job->after_ns;
        job->start_ns = job->end_ns - job->ns;
        kernel_started(device, job->error, job->counter, job->ns, job->end_ns);
    }
    job->state = JOB_RUNNING;
    return true;
}

/* A kernel that waits takes time as long as it waits: up to QUANTUM_NS are queued ahead. */
static bool kernel_goes_on(struct job *job, bool *over)
{
    const int device = job->ctx->device;
    const uint64_t ran = ran_ns(device);
    const bool waits = job->kind == JOB_WAIT;
    if (job->kind == JOB_TIME || job_complete(job))
        return *over = waits || ran >= job->end_ns;
    if (waits && ran + QUANTUM_NS / 2 >= job->end_ns)
        job->end_ns = take_time(job, QUANTUM_NS);
    if (!waits && !job_due(job, ran))
        return false;
    const enum step step = job_step(job, device);
    if (step == STEP_FAULT)
        fail_now(device, CUDA_ERROR_ILLEGAL_ADDRESS);
    return step == STEP_DONE && (!waits || job_complete(job));
}

static bool goes_on(struct job *job, bool *over)
{
    const int device = job->ctx->device;
    enum step step;
    if (job->kind <= JOB_WAIT)
        return kernel_goes_on(job, over);
    switch (job->kind) {
    case JOB_HOST: return *over = atomic_load(&job->ended);
    case JOB_FREE:
        memory_free(job->area.at, SPAN_DEVICE);
        return *over = true;
    default:
        step = job_step(job, device);
        if (step == STEP_FAULT)
            fail_now(device, CUDA_ERROR_ILLEGAL_ADDRESS);
        *over = job_complete(job);
        return step == STEP_DONE;
    }
}

static bool run(struct job *job, bool *over)
{
    const CUresult error = sticky(job->ctx->device);
    if (error == CUDA_SUCCESS)
        return job->state == JOB_RUNNING ? goes_on(job, over) : start(job);
    if (job->kind == JOB_HOST && job->state == JOB_RUNNING)
        return *over = atomic_load(&job->ended); /* else it is dropped, as everything behind an error */
    return *over = true;
}

static bool run_each(void)
{
    bool did = false;
    pthread_mutex_lock(&jobs.lock);
    for (struct job **at = &jobs.first, *job; (job = *at) != NULL;) {
        bool over = false;
        if (!listed_before(job)) {
            pthread_mutex_unlock(&jobs.lock);
            did |= run(job, &over);
            pthread_mutex_lock(&jobs.lock);
        }
        if (!over) {
            at = &job->next;
            continue;
        }
        *at = job->next;
        atomic_fetch_sub(&jobs.count, 1);
        bell_ring(&jobs.bell);
        free(job->own);
        free(job);
    }
    pthread_mutex_unlock(&jobs.lock);
    return did;
}

static void *run_jobs(void *unused)
{
    for (;;) {
        const uint32_t bell = atomic_load(&jobs.bell);
        if (!run_each())
            bell_wait(&jobs.bell, bell, atomic_load(&jobs.count) > 0 ? LOOK_NS : WAIT_NS);
    }
    return unused;
}

/* What is queued. */

static uint64_t later_of(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* How far the process's kernels must be before new work of the stream begins. */
static uint64_t behind_ns(CUstream stream)
{
    const CUcontext ctx = stream->ctx;
    const uint64_t own = atomic_load(&stream->done_ns);
    return legacy(ctx, stream) ? later_of(own, atomic_load(&ctx->done_ns)) : is_blocking(stream) ? later_of(own, atomic_load(&ctx->stream[0].done_ns)) : own;
}

static void wait_for_room(CUstream stream)
{
    for (;;) {
        const uint32_t bell = atomic_load(&jobs.bell);
        unsigned queued = 0;
        pthread_mutex_lock(&jobs.lock);
        for (const struct job *job = jobs.first; job != NULL; job = job->next)
            queued += job->stream == stream && job->ctx == stream->ctx;
        pthread_mutex_unlock(&jobs.lock);
        if (queued < QUEUE_MOST)
            return;
        bell_wait(&jobs.bell, bell, WAIT_NS);
    }
}

/* Its number, which job_wait takes. */
static CUresult submit(CUstream stream, const struct job *like, uint64_t *id)
{
    wait_for_room(stream);
    struct job *job = malloc(sizeof *job);
    CHECK(job != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *job = *like;
    job->ctx = stream->ctx;
    job->stream = stream;
    job->blocking = is_blocking(stream);
    job->after_ns = behind_ns(stream);
    SCOPED list = locked(&jobs.lock);
    if (!jobs.started && beside(run_jobs, "", 1) != CUDA_SUCCESS) {
        free(job);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    jobs.started = true;
    struct job **end = &jobs.first;
    while (*end != NULL)
        end = &(*end)->next;
    *id = job->id = atomic_fetch_add(&jobs.ids, 1) + 1;
    job->next = NULL;
    *end = job;
    atomic_store(&stream->job, job->id);
    atomic_fetch_add(&jobs.count, 1);
    bell_ring(&jobs.bell);
    return CUDA_SUCCESS;
}

CUresult job_submit(CUstream stream, const struct job *like)
{
    uint64_t id;
    return submit(stream, like, &id);
}

/* By the calling thread, until it is complete or its channels are suspended. What is one piece is not checked before. */
static CUresult run_here(struct job *job, int device, bool *held)
{
    const CUresult otherwise = job_is_piece(job) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_ILLEGAL_ADDRESS;
    for (*held = false; !*held && !job_complete(job);) {
        const enum step step = job_step(job, device);
        *held = step == STEP_HELD;
        if (step == STEP_FAULT && otherwise == CUDA_ERROR_ILLEGAL_ADDRESS)
            fail_now(device, otherwise);
        if (step == STEP_FAULT)
            return otherwise;
    }
    return CUDA_SUCCESS;
}

CUresult job_now(CUcontext ctx, struct job job)
{
    struct fake_unit *on = unit_of(ctx->device);
    job.ctx = ctx;
    CHECK(job_is_piece(&job) || job_covered(&job), CUDA_ERROR_INVALID_VALUE);
    for (bool held = true; held;) {
        const uint32_t bell = atomic_load(&on->time_bell);
        TRY(run_here(&job, ctx->device, &held));
        if (held)
            bell_wait(&on->time_bell, bell, WAIT_NS);
    }
    return CUDA_SUCCESS;
}

/* From or to memory that CUDA does not know, as the real driver does: a little is taken at the call, more is waited for. */
static bool is_pageable(const struct job *job)
{
    return job->kind == JOB_COPY && job->ends != (AT_DEVICE | FROM_DEVICE);
}

static bool stage(struct job *job)
{
    CHECK((job->ends & FROM_DEVICE) == 0 && job->area.rows == 1 && job->area.width <= STAGED_MOST, false);
    job->own = malloc(job->area.width);
    CHECK(job->own != NULL, false);
    memcpy(job->own, (const void *)(uintptr_t)job->area.from, job->area.width);
    job->area.from = (uintptr_t)job->own;
    return true;
}

CUresult job_later(CUstream stream, struct job job)
{
    const int device = stream->ctx->device;
    uint64_t id;
    bool held;
    job.ctx = stream->ctx;
    CHECK(job_covered(&job), CUDA_ERROR_INVALID_VALUE);
    if (job_bytes(&job) <= AT_ONCE_MOST && !jobs_before(stream) && work_done(device, behind_ns(stream)))
        TRY(run_here(&job, device, &held));
    if (job_complete(&job))
        return CUDA_SUCCESS;
    const bool waits = is_pageable(&job) && !stage(&job);
    const CUresult rc = submit(stream, &job, &id);
    if (rc != CUDA_SUCCESS)
        free(job.own);
    TRY(rc);
    if (waits)
        job_wait(id);
    return waits ? sticky(device) : CUDA_SUCCESS;
}
