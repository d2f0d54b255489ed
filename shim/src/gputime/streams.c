/* streams.c - which place a stream has in the records of activity.c. See streams.h.
 *
 * A place whose stream has nothing left is reused for another; if all places of a stream are in use, a larger table is made. A thread
 * that launches finds its place without a lock, marks it, and checks again that it is still its own: a thread that reuses places
 * changes the key first and then checks whether something was launched.
 */
#include "gputime/streams.h"

#include <stdlib.h>
#include <string.h>

static _Thread_local uint64_t thread_anchor __attribute__((tls_model("initial-exec"))); /* no __tls_get_addr: musl keeps it elsewhere */

static CUcontext current(void)
{
    CUcontext context = NULL;
    bool known = tangram.driver.cuCtxGetCurrent(&context) == CUDA_SUCCESS;
    return known ? context : NULL;
}

CUcontext stream_context_named(CUcontext context)
{
    return context != NULL && context == atomic_load(&tangram.contexts.first) ? CONTEXT_FIRST : context;
}

CUcontext stream_context_of_thread(void)
{
    return stream_context_named(current());
}

void stream_context_check(void)
{
    if (atomic_load_explicit(&tangram.hot.several_contexts, memory_order_relaxed))
        return;
    CUcontext context = current();
    if (context != NULL && context != atomic_load(&tangram.contexts.first))
        contexts_are_several();
}

uintptr_t stream_key_of_thread(void)
{
    return (uintptr_t)&thread_anchor | 1;
}

static struct activity *const activity_ = &tangram.activity;

static size_t table_size(unsigned table)
{
    return (size_t)ACTIVITY_STREAMS << 2 * table;
}

/* Table 0 is the first. NULL: it was not made. */
static struct activity_stream *place_at(unsigned table, struct stream_name name, unsigned probe)
{
    size_t size = table_size(table), at = (size_t)(stream_hash(name) >> (56 - 2 * table)) + probe;
    struct activity_stream *first = table == 0 ? activity_->stream : atomic_load_explicit(&activity_->more[table - 1], memory_order_acquire);
    return first == NULL ? NULL : &first[at % size];
}

struct activity_stream *stream_find(struct stream_name name)
{
    struct activity_stream *of;
    for (unsigned table = 0; table <= ACTIVITY_TABLES && (of = place_at(table, name, 0)) != NULL; table++)
        for (unsigned probe = 0; probe < ACTIVITY_PROBES; probe++)
            if (stream_is_at(of = place_at(table, name, probe), name))
                return of;
    return NULL;
}

struct activity_stream *streams_next(size_t *at)
{
    for (; *at < ACTIVITY_STREAMS; *at = (*at / 64 + 1) * 64) {
        uint64_t bits = atomic_load_explicit(&activity_->used[*at / 64], memory_order_relaxed) >> *at % 64;
        if (bits != 0) {
            *at += (size_t)__builtin_ctzll(bits);
            return &activity_->stream[(*at)++];
        }
    }
    size_t from = ACTIVITY_STREAMS;
    for (unsigned table = 1; table <= ACTIVITY_TABLES; from += table_size(table++)) {
        struct activity_stream *first = atomic_load_explicit(&activity_->more[table - 1], memory_order_acquire);
        for (; first != NULL && *at < from + table_size(table);)
            if (atomic_load(&first[(*at)++ - from].key) != 0)
                return &first[*at - 1 - from];
    }
    return NULL;
}

struct activity_context *context_record(CUcontext named, bool make)
{
    struct activity_context *last = NULL, *of;
    for (of = &activity_->context; of != NULL; last = of, of = atomic_load(&of->next))
        if (atomic_load(&of->context) == named)
            return of;
    if (!make || named == NULL)
        return NULL;
    for (of = &activity_->context; of != NULL; of = atomic_load(&of->next)) {
        CUcontext none = NULL;
        if (atomic_compare_exchange_strong(&of->context, &none, named))
            return of;
    }
    if ((of = calloc(1, sizeof *of)) == NULL)
        return NULL;
    atomic_store(&of->context, named);
    for (struct activity_context *none = NULL; !atomic_compare_exchange_strong(&last->next, &none, of); none = NULL)
        last = none;
    return of;
}

bool stream_is_clean(struct activity_stream *of)
{
    uint64_t last = atomic_load(&of->last);
    if (last <= atomic_load(&of->clean))
        return true;
    CUcontext context = atomic_load(&of->context);
    struct activity_context *record = context == NULL ? NULL : context_record(context, false);
    return record != NULL && last <= atomic_load(&record->clean);
}

void stream_clean(_Atomic uint64_t *clean, uint64_t launches)
{
    uint64_t known = atomic_load(clean);
    while (known < launches && !atomic_compare_exchange_weak(clean, &known, launches))
        continue;
}

void stream_gone(struct activity_stream *of, struct stream_name name)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&activity_->placing);
    if (atomic_load(&of->key) == name.key) {
        stream_clean(&of->clean, atomic_load(&of->last));
        atomic_store(&of->context, NULL);
        atomic_store(&of->key, 0);
    }
    pthread_mutex_unlock(&activity_->placing);
    quiet_end(quiet);
}

static CUcontext context_of(CUstream stream)
{
    CUcontext context = NULL;
    bool known = tangram.driver.cuStreamGetCtx(stream, &context) == CUDA_SUCCESS;
    return known ? stream_context_named(context) : NULL;
}

/* Locked. Has the place no stream, or one with nothing left, which loses it? */
static bool is_free(struct activity_stream *of)
{
    uintptr_t key = atomic_exchange(&of->key, STREAM_BEING_NAMED);
    if (key == STREAM_BEING_NAMED || stream_is_event(key) || (key != 0 && !stream_is_clean(of))) { /* an event is queried first */
        atomic_store(&of->key, key);
        return false;
    }
    stream_clean(&of->clean, atomic_load(&of->last));
    return true;
}

/* Locked. False: there is no memory for it. */
static bool make_table(unsigned table)
{
    struct activity_stream *made = NULL;
    if (posix_memalign((void **)&made, sizeof *made, table_size(table) * sizeof *made) != 0)
        return false;
    memset(made, 0, table_size(table) * sizeof *made);
    atomic_store_explicit(&activity_->more[table - 1], made, memory_order_release);
    return true;
}

/* Locked. The first place that is this stream's, free, or of a stream with nothing left. NULL: there is no memory for one. */
static struct activity_stream *claim(struct stream_name name)
{
    for (unsigned table = 0; table <= ACTIVITY_TABLES; table++) {
        if (place_at(table, name, 0) == NULL && !make_table(table))
            return NULL;
        for (unsigned probe = 0; probe < ACTIVITY_PROBES; probe++) {
            struct activity_stream *of = place_at(table, name, probe);
            if (stream_is_at(of, name) || is_free(of))
                return of;
        }
    }
    return NULL;
}

static void note_used(const struct activity_stream *of)
{
    uintptr_t at = ((uintptr_t)of - (uintptr_t)activity_->stream) / sizeof *of;
    if (of >= activity_->stream && at < ACTIVITY_STREAMS)
        atomic_fetch_or(&activity_->used[at / 64], UINT64_C(1) << at % 64);
}

struct activity_stream *stream_place(struct stream_name name)
{
    struct activity_stream *of = stream_find(name);
    if (of != NULL)
        return of;
    const bool known = stream_is_default(name.key) || stream_is_event(name.key);
    CUcontext context = known ? name.context : context_of((CUstream)name.key);
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&activity_->placing);
    of = claim(name);
    if (of != NULL && !stream_is_at(of, name)) {
        atomic_store(&of->context, context);
        note_used(of); /* first: a thread that finds the key counts there at once */
        atomic_store(&of->key, name.key);
    }
    pthread_mutex_unlock(&activity_->placing);
    quiet_end(quiet);
    return of;
}
