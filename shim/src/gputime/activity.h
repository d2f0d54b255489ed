/* activity.h - when this process has work for the GPU, and when it has none. process.h includes this. */
#ifndef TANGRAM_ACTIVITY_H
#define TANGRAM_ACTIVITY_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "abi.h"
#include "link/wire.h"

enum {
    ACTIVITY_STREAMS = 256, /* places of the first table */
    ACTIVITY_TABLES = 8,    /* each after it is four times as large as the one before: there is a place while there is memory */
    ACTIVITY_PROBES = 4
};

/* Launches have numbers, one sequence for the whole process. What is known to be done is known up to a number. */
struct activity_stream {
    _Atomic uintptr_t key;      /* 0 = free */
    _Atomic(CUcontext) context; /* in which it lies, as streams.h names it; NULL = not known */
    _Atomic uint64_t last;      /* launch in it */
    _Atomic uint64_t clean;     /* up to this one it is done */
} __attribute__((aligned(32)));

struct activity_context {
    _Atomic(CUcontext) context; /* as streams.h names it; NULL: it ended, and another may have this record */
    _Atomic uint64_t clean;     /* all of its streams are done up to this launch */
    _Atomic(struct activity_context *) next;
};

struct activity {
    _Atomic uint64_t launches; /* the number of the last */
    _Atomic unsigned waiting;  /* threads that wait at the gate, each with work */
    pthread_mutex_t reporting;
    uint64_t idle_reported_us; /* guarded by `reporting` */
    uint64_t began_us;         /* when work began whose report is late; 0 = there is none such; guarded by `reporting` */
    _Atomic bool others;       /* something other than a kernel was launched since idleness was reported; written with `reporting` held */
    _Atomic bool drained;      /* all that is left waits at the gate, and that was reported; guarded by `reporting` */
    _Atomic bool unreported;   /* there is work, and its report did not fit into the socket; written with `reporting` held */
    _Atomic bool full;         /* the arbiter's state of our work is out of date, because the socket is full; the same */
    _Atomic bool foreign;      /* and events of other processes were opened */
    _Atomic bool idle_later;   /* there was nothing to do, and that was not reported so soon after the last time */
    uint64_t looked_at;        /* launches at the last look; the helper alone */
    uint64_t still_ms;         /* when STILL is due; the helper alone */
    pthread_mutex_t placing;   /* the thread that gives a stream its place */
    _Atomic uint64_t used[ACTIVITY_STREAMS / 64]; /* one bit a place that ever had a stream */
    struct activity_stream stream[ACTIVITY_STREAMS];
    _Atomic(struct activity_stream *) more[ACTIVITY_TABLES]; /* NULL = was not needed yet */
    struct activity_context context;                         /* the first of a list that only grows */
};

/* What had been launched when a synchronising call began; passed back when all of that has ended. */
struct activity_before {
    struct activity_stream *stream;
    struct activity_context *context;
    uint64_t launches;
};
struct activity_before activity_sync_begins(CUstream stream, int ptds);
struct activity_before activity_context_sync_begins(CUcontext context); /* NULL: the calling thread's */
void activity_synced(struct activity_before before);
void activity_something_synced(void); /* an event, a copy: queries the streams */

/* The driver's answer to a wait, or to a query of whether something is left: is nothing left? Work ends with an error as well: one
 * that stays with the context ends all of it. */
static inline bool work_ended(CUresult rc)
{
    enum { INVALID_VALUE = 1, NOT_INITIALISED = 3, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, CAPTURE_FIRST = 900, CAPTURE_LAST = 908 };
    int answer = (int)rc;
    if (answer == NOT_READY || (answer >= CAPTURE_FIRST && answer <= CAPTURE_LAST))
        return false; /* of a stream that captures nothing is known */
    return answer != INVALID_VALUE && answer != NOT_INITIALISED && answer != INVALID_CONTEXT && answer != INVALID_HANDLE; /* no query was made */
}

/* Its handle may be reused. Call before the driver destroys it. */
void activity_stream_ends(CUstream stream);
/* With their context, which the driver destroyed. last: there is no other. */
void activity_context_ended(CUcontext context, bool last);

/* What the program announces has no state that could be sent later, so it is sent only after the arbiter's state of our work is current.
 * False when it was not sent. */
bool activity_announce(enum wire_activity what, uint64_t value);

/* A thread waits for memory that is away, which is work, until it has it. */
void activity_waits_for_memory(void);
void activity_has_memory(void);
void activity_await_memory(void); /* until nothing is away; the arbiter brings it back as for a launch. The caller has no lock */

/* For time_link.c. */
bool activity_work_reported(void); /* the last state that reached the arbiter is WORK */
void activity_look(void);           /* has work ended that was never waited for? */
bool activity_report_later(void);   /* send a report that was too early or did not fit, if it is still true; false = there was none */
void activity_watch(void);
void activity_arbiter_is_new(void);
void activity_forget(void);         /* in a forked child */

#endif
