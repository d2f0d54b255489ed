/* jobs.h - work that does something to memory, or waits behind such work in its stream.
 *
 * A kernel that computes nothing is a stretch of time in the process's one queue on a GPU (launch.c) and never becomes a job, unless it
 * stands behind one. Copies, fills and host functions become jobs if they cannot happen at the call. Jobs run on one thread a
 * process, piece by piece, each stream's in its order.
 */
#ifndef TANGRAM_FAKE_CUDA_JOBS_H
#define TANGRAM_FAKE_CUDA_JOBS_H

#include "state.h"

#define PIECE_BYTES ((uint64_t)256 << 10) /* at most so much is done between two moments at which a suspend can stop it */
#define QUEUE_MOST 1024u                  /* jobs of a stream: a launch waits for the end of one beyond it */

enum job_kind {
    JOB_TIME,                                /* a kernel without effect, or nothing at all */
    JOB_WRITE, JOB_ADD, JOB_COMPARE, JOB_WAIT, /* kernels, does.def */
    JOB_COPY, JOB_FILL, JOB_FREE, JOB_HOST
};

/* Rows of bytes, and how far the work has come in them. */
struct area {
    uint64_t at, from; /* where the first row is, and of a copy what goes there */
    uint64_t at_pitch, from_pitch, width, rows;
    uint64_t row, column; /* the next piece begins here */
};

enum { AT_DEVICE = 1, FROM_DEVICE = 2 }; /* which ends must be memory that CUDA knows; the others are the host's */

struct job {
    enum job_kind kind;
    struct area area;
    unsigned ends;
    CUcontext ctx, at_ctx, from_ctx; /* whose work it is; of a copy between contexts: which use its ends */
    uint32_t value, element; /* of a fill: the value and the bytes of an element; of a kernel: what its cells begin with */
    uint64_t to;             /* where the number of wrong cells goes; what a waiting kernel sets. 0 = nowhere */
    uint64_t ns, counter;    /* of a kernel: how long it takes, where it counts meanwhile (0 = nowhere) */
    uint32_t error;          /* in which it ends */
    CUhostFn run;
    CUstreamCallback callback;
    CUstream on; /* the stream as the program calls it */
    void *data;
    /* While it runs. */
    void *own;                 /* bytes that are the job's: what a copy takes from pageable memory, cells before they are written */
    bool prepared, told;       /* own has the cells of this piece; `to` is written */
    uint32_t wrong;            /* cells so far */
    uint64_t start_ns, end_ns; /* of a kernel, in what the process will have run on the unit */
    /* The list's (jobs.c). */
    uint64_t id, after, after_ns; /* begins when job `after` has ended and the process has run so much */
    enum { JOB_QUEUED, JOB_RUNNING } state;
    _Atomic bool ended; /* a host function has returned */
    CUstream stream;
    bool blocking;
    struct job *next;
};

/* steps.c */
enum step { STEP_DONE, STEP_HELD /* suspended: to be done again */, STEP_FAULT /* no such memory */ };
/* The next piece of a copy, fill or kernel. */
enum step job_step(struct job *job, int device);
bool job_complete(const struct job *job); /* there is no next piece */
bool job_is_piece(const struct job *job); /* one is all of it */
/* May a kernel, of which so much ran, do its next piece? */
bool job_due(const struct job *job, uint64_t ran_ns);
/* All of its memory is there now; marked as written. */
bool job_covered(const struct job *job);
uint64_t job_bytes(const struct job *job);

/* jobs.c */
/* Behind everything in that stream. It waits if the stream is full. */
CUresult job_submit(CUstream stream, const struct job *like);
/* A copy or fill that the caller waits for, or not. CUDA_ERROR_INVALID_VALUE: some of its memory is not there. */
CUresult job_now(CUcontext ctx, struct job job);
CUresult job_later(CUstream stream, struct job job);
/* Must new work of the stream become a job? */
bool jobs_before(CUstream stream);
bool job_ended(uint64_t id); /* 0: there is none */
void job_wait(uint64_t id);
void jobs_wait(CUcontext ctx, CUstream before); /* all that is queued now; of those only what the stream is behind, NULL: all */

#endif
