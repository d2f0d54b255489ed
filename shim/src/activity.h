/* activity.h - when this process has work for the GPU, and when it has none. process.h includes this. */
#ifndef TANGRAM_ACTIVITY_H
#define TANGRAM_ACTIVITY_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "abi.h"

enum { ACTIVITY_STREAMS = 256, ACTIVITY_PROBES = 4 };

struct activity_stream {
    _Atomic uintptr_t key;      /* 0 = free */
    _Atomic(CUcontext) context; /* in which it lies, as streams.h names it; NULL = not known */
    _Atomic uint64_t launches;  /* ever */
    _Atomic uint64_t clean;     /* of them, known to be done */
} __attribute__((aligned(32)));

struct activity {
    _Atomic unsigned waiting; /* threads that the gate holds back, each with work */
    pthread_mutex_t telling;
    uint64_t idle_told_us; /* guarded by telling */
    _Atomic bool idle_later; /* there was nothing to do, and that was not told so soon after the last time */
    uint64_t looked_at;   /* launches at the last look; the thread of turn.c alone */
    _Atomic uint64_t used[ACTIVITY_STREAMS / 64]; /* one bit a place that ever had a stream */
    struct activity_stream stream[ACTIVITY_STREAMS];
    struct activity_stream crowded; /* streams that found no place: clean only when the whole context was waited for */
};

/* What had been launched when a synchronising call began; handed back when it succeeded. */
struct activity_before {
    struct activity_stream *of;
    uint64_t launches;
};
struct activity_before activity_sync_begins(CUstream stream, int ptds);
struct activity_before activity_context_sync_begins(void);
void activity_stream_synced(struct activity_before before);
void activity_context_synced(struct activity_before before);
void activity_something_synced(void); /* an event, a copy: asks the streams */

/* Its handle may be given out again. Call before the driver destroys it. */
void activity_stream_ends(CUstream stream);
/* With their context, which the driver destroyed. last: there is no other. */
void activity_context_ended(CUcontext context, bool last);

/* For turn.c. */
bool activity_is_told(void);
void activity_look(void);           /* has work ended that was never waited for? */
bool activity_tell_later(void);     /* tell what it was too soon for, if it is still true; false = there was nothing */
void activity_watch(void);
void activity_arbiter_is_new(void);
void activity_forget(void);         /* in a forked child */

#endif
