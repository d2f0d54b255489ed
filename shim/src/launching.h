/* launching.h - what every launch does, in line and in as few lines of the cache as can be: struct hot says why. */
#ifndef TANGRAM_LAUNCHING_H
#define TANGRAM_LAUNCHING_H

#include "process.h"
#include "streams.h"

/* activity.c: what is not in line. */
void activity_launched(struct stream_name name); /* it was counted: tell of it, and wait, where that is due */
void activity_launch_anywhere(CUstream stream, int ptds);

/* Is new work to wait? Only where suspending does not work. */
static inline bool turn_gated(void)
{
    struct wire_turn *page = atomic_load_explicit(&tangram.hot.page, memory_order_relaxed);
    return page != NULL && atomic_load_explicit(&page->gate, memory_order_relaxed) != 0;
}

/* Before something is put into a stream. A stream that the program made, or the default one of the only context there has been, in
 * the place where it is looked for first; all others are activity_launch_anywhere's. */
static inline void activity_launch(CUstream stream, int ptds)
{
    if (!atomic_load_explicit(&tangram.hot.watched, memory_order_relaxed))
        return;
    struct stream_name name = {(uintptr_t)stream, NULL};
    if (name.key <= 1 && !ptds && !atomic_load_explicit(&tangram.hot.several_contexts, memory_order_acquire))
        name = (struct stream_name){STREAM_LEGACY, CONTEXT_FIRST};
    struct activity_stream *of = stream_place_at(name, 0);
    if (UNLIKELY((name.key <= 2 && name.context == NULL) || !stream_is_at(of, name))) {
        activity_launch_anywhere(stream, ptds);
        return;
    }
    atomic_fetch_add(&of->launches, 1);
    if (UNLIKELY(!atomic_load_explicit(&tangram.hot.told, memory_order_relaxed) || turn_gated()))
        activity_launched(name);
}

#endif
