/* direction.h - the thread that copies in one direction: its jobs in order, each with an end. */
#ifndef TANGRAM_COPIER_DIRECTION_H
#define TANGRAM_COPIER_DIRECTION_H

#include <pthread.h>

#include "driver.h"
#include "job.h"
#include "pool.h"

/* A copy in progress, and the most of them. While one runs, the next blocks are imported and the ones before are released, so that a block costs the
 * copy engine no pause; and FORGET ends a large block within so many chunks. */
enum { CHUNKS = 8, CHUNK_SHIFT = 26 };
#define CHUNK_BYTES (UINT64_C(1) << CHUNK_SHIFT)

struct address_range { /* reserved addresses for one block */
    CUdeviceptr at;
    uint64_t bytes;
    bool used;
};

struct active { /* the block of a job, imported */
    struct job *job;
    CUmemGenericAllocationHandle memory;
    struct address_range *range;
    uint64_t issued_bytes, began_us;
    unsigned chunks; /* in progress */
    bool issued;     /* no further chunk follows */
};

struct chunk {
    struct active *active;
    CUevent event;
    uint64_t bytes;
};

struct direction {
    bool saves;
    const struct driver *driver;
    const struct pool *pool;
    void (*finished)(void *argument, struct job *job); /* is called on this direction's thread */
    void *argument;

    pthread_mutex_t lock; /* guards `waiting` */
    pthread_cond_t came;
    struct job_queue waiting;

    _Atomic uint64_t step_us; /* when the thread began its present step; 0 = it waits for a job */

    /* of the thread alone */
    CUstream stream;
    struct address_range range[CHUNKS];
    struct active active[CHUNKS], *current; /* current: of which chunks are still to be issued */
    struct chunk chunk[CHUNKS];
    unsigned oldest, chunks; /* of the ring of chunks */
};

/* Starts the thread. Ends the program if it cannot. */
void direction_start(struct direction *direction, const struct driver *driver, const struct pool *pool);
void direction_give(struct direction *direction, struct job *job);

/* Whether its present step began within that time, or it waits for a job. A step is one call for a block, or the wait for one chunk: milliseconds. */
bool direction_moves(const struct direction *direction, uint64_t within_us);

#endif
