/* job.h - one block to copy, from its request to its answer. */
#ifndef TANGRAM_COPIER_JOB_H
#define TANGRAM_COPIER_JOB_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "protocol.h"

struct job {
    struct copier_job request;
    bool saves;  /* from the GPU to the pool */
    bool in_use; /* by the thread of the connection alone, as is `orphan` */
    bool orphan; /* its connection has ended: no answer */
    atomic_bool forgotten;
    int descriptor;
    enum copier_result result;
    uint32_t cuda_error;
    uint64_t copied_bytes, microseconds;
    struct job *next; /* in a queue */
};

struct job_queue {
    struct job *first, *last;
};

static inline void job_push(struct job_queue *queue, struct job *job)
{
    job->next = NULL;
    if (queue->last != NULL)
        queue->last->next = job;
    else
        queue->first = job;
    queue->last = job;
}

static inline struct job *job_pop(struct job_queue *queue)
{
    struct job *job = queue->first;
    if (job != NULL && (queue->first = job->next) == NULL)
        queue->last = NULL;
    return job;
}

#endif
