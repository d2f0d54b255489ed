/* streams.h - the names of streams, by which activity.c keeps records of them.
 *
 * A stream that the program made has a handle unlike any other's. The default ones are known by their context as well: each context
 * has its own, and those of a thread, which only that thread can query, differ from thread to thread: an odd key, unlike any
 * handle. The legacy default stream has two names. What a stream had when it was destroyed is known by an event (destroyed.c).
 *
 * The first context is CONTEXT_FIRST here, not its handle: while a process has had no other, a launch need not find out in which it is.
 */
#ifndef TANGRAM_STREAMS_H
#define TANGRAM_STREAMS_H

#include "process.h"

#define STREAM_LEGACY ((uintptr_t)1)
#define STREAM_OF_EVENT ((uintptr_t)2) /* this bit and an event's address, in a key */
#define STREAM_BEING_NAMED ((uintptr_t)3)
#define CONTEXT_FIRST ((CUcontext)(uintptr_t)2) /* unlike any handle */

struct stream_name {
    uintptr_t key;
    CUcontext context; /* NULL where the key is enough */
};

CUcontext stream_context_named(CUcontext context);
CUcontext stream_context_of_thread(void); /* from the driver; NULL = none */
/* Is the calling thread's context one that was not seen being made? A launch does not look. */
void stream_context_check(void);
uintptr_t stream_key_of_thread(void);

/* NULL = none */
static inline CUcontext stream_context_now(void)
{
    bool several = atomic_load_explicit(&tangram.hot.several_contexts, memory_order_acquire);
    return UNLIKELY(several) ? stream_context_of_thread() : CONTEXT_FIRST;
}

/* As the calling thread and its context mean it. */
static inline struct stream_name stream_name(CUstream stream, int ptds)
{
    uintptr_t key = (uintptr_t)stream;
    if (key > 2)
        return (struct stream_name){key, NULL};
    bool of_thread = key == 2 || (key == 0 && ptds);
    return (struct stream_name){UNLIKELY(of_thread) ? stream_key_of_thread() : STREAM_LEGACY, stream_context_now()};
}

static inline bool stream_is_default(uintptr_t key)
{
    return (key & 1) != 0;
}

static inline bool stream_is_event(uintptr_t key)
{
    return (key & 3) == STREAM_OF_EVENT;
}

static inline uint64_t stream_hash(struct stream_name name)
{
    return name.key * UINT64_C(0x9e3779b97f4a7c15) ^ (uintptr_t)name.context * UINT64_C(0xc2b2ae3d27d4eb4f);
}

/* Where a stream is looked for first. */
static inline struct activity_stream *stream_home(struct stream_name name)
{
    return &tangram.activity.stream[stream_hash(name) >> 56]; /* of ACTIVITY_STREAMS */
}

static inline bool stream_is_at(struct activity_stream *of, struct stream_name name)
{
    return atomic_load_explicit(&of->key, memory_order_acquire) == name.key &&
           (!stream_is_default(name.key) || atomic_load_explicit(&of->context, memory_order_relaxed) == name.context);
}

/* A launch with that number goes into the stream. False: it has a later one. */
static inline bool stream_mark(struct activity_stream *of, uint64_t launch)
{
    uint64_t last = atomic_load_explicit(&of->last, memory_order_relaxed);
    while (last < launch)
        if (atomic_compare_exchange_weak(&of->last, &last, launch))
            return true;
    return false;
}

struct activity_stream *stream_find(struct stream_name name);  /* NULL: it has no place */
struct activity_stream *stream_place(struct stream_name name); /* NULL: there is no memory for one */
struct activity_stream *streams_next(size_t *at);              /* each that has or had a place, from *at = 0 on; NULL: no more */
bool stream_is_clean(struct activity_stream *of);
void stream_clean(_Atomic uint64_t *clean, uint64_t launches); /* raises it to that */
void stream_gone(struct activity_stream *of, struct stream_name name); /* with whatever was in it, if the place is still its */

/* done.c: queries the driver where the records do not suffice */
bool stream_captures(CUstream stream);
bool stream_done(struct activity_stream *of);
bool streams_done(void);  /* by the calling thread, in its context */
bool streams_clean(void); /* by the records alone */
bool contexts_done(void); /* by our own thread, in every context that is known */
bool contexts_have_more(void); /* the same, whatever the records say: something may have been taken for done */

/* destroyed.c: the stream is destroyed with work in it; an event takes its place. Has the event passed? */
void destroyed_leaves(CUstream stream, const struct activity_stream *of);
bool destroyed_done(struct activity_stream *of);

struct activity_context *context_record(CUcontext named, bool make); /* NULL: there is none, and none is or can be made */

#endif
