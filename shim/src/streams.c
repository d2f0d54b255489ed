/* streams.c - which place a stream has in the books of activity.c. See streams.h. */
#include "streams.h"

static _Thread_local uint64_t thread_anchor __attribute__((tls_model("initial-exec"))); /* no __tls_get_addr: musl keeps it elsewhere */
#define BEING_NAMED ((uintptr_t)3)

static CUcontext current(void)
{
    CUcontext context = NULL;
    bool known = tangram.driver.cuCtxGetCurrent != NULL && tangram.driver.cuCtxGetCurrent(&context) == CUDA_SUCCESS;
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

struct activity_stream *stream_find(struct stream_name name)
{
    for (unsigned probe = 0; probe < ACTIVITY_PROBES; probe++)
        if (stream_is_at(stream_place_at(name, probe), name))
            return stream_place_at(name, probe);
    return NULL;
}

static CUcontext context_of(CUstream stream)
{
    CUcontext context = NULL;
    bool known = tangram.driver.cuStreamGetCtx != NULL && tangram.driver.cuStreamGetCtx(stream, &context) == CUDA_SUCCESS;
    return known ? stream_context_named(context) : NULL;
}

/* Two threads that name one default stream at once may take two places for it: each is asked, so that both come clean. */
static struct activity_stream *claim(struct stream_name name)
{
    for (unsigned probe = 0; probe < ACTIVITY_PROBES; probe++) {
        struct activity_stream *of = stream_place_at(name, probe);
        size_t at = (size_t)(of - tangram.activity.stream);
        atomic_fetch_or(&tangram.activity.used[at / 64], UINT64_C(1) << at % 64); /* first: who finds the key counts there at once */
        uintptr_t none = 0;
        if (!atomic_compare_exchange_strong(&of->key, &none, stream_is_default(name.key) ? BEING_NAMED : name.key)) {
            if (stream_is_at(of, name))
                return of;
            continue;
        }
        atomic_store(&of->context, stream_is_default(name.key) ? name.context : context_of((CUstream)name.key));
        atomic_store(&of->key, name.key);
        return of;
    }
    return &tangram.activity.crowded;
}

struct activity_stream *stream_place(struct stream_name name)
{
    struct activity_stream *of = stream_find(name);
    return of != NULL ? of : claim(name);
}
