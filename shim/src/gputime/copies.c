/* copies.c - copies, fills, prefetches, memory operations, and functions of the CPU in a stream's order: copies.def has the list.
 * activity.c reports them.
 *
 * A call without a stream goes into the default one. Some return before the GPU is done (fills, copies inside the GPU or from memory that is
 * not pinned), so the driver is queried afterwards, and the return does not count as the end; that costs a query only while
 * work is reported to the arbiter.
 */
#include "hooks/hook.h"
#include "gputime/launching.h"
#include "memory/memory.h"

#define INTO(name, base, since, ptds, stream, params, ...)                                                                     \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        activity_other(stream, ptds);                                                                                          \
        return tangram.driver.name(__VA_ARGS__);                                                                               \
    }
#define AT_ONCE(name, base, since, ptds, params, ...)                                                                          \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        activity_other(NULL, ptds);                                                                                            \
        const struct activity_call call = activity_call_begins();                                                              \
        CUresult rc = tangram.driver.name(__VA_ARGS__);                                                                        \
        activity_call_ends(call);                                                                                              \
        activity_something_synced();                                                                                           \
        return rc;                                                                                                             \
    }
/* name##_across is the copy where the process sees several GPUs. */
#define AT_ONCE_ACROSS(name, ptds, params, ...)                                                                                \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        activity_other(NULL, ptds);                                                                                            \
        const struct activity_call call = activity_call_begins();                                                              \
        CUresult rc = UNLIKELY(atomic_load_explicit(&tangram.hot.several_gpus, memory_order_relaxed))                          \
                          ? name##_across(__VA_ARGS__)                                                                         \
                          : tangram.driver.name(__VA_ARGS__);                                                                  \
        activity_call_ends(call);                                                                                              \
        activity_something_synced();                                                                                           \
        return rc;                                                                                                             \
    }
/* The copy, in the context of the memory where it has to be. Between this thread's default stream and the other context's nothing keeps an order: so what is before is
 * waited for. */
#define IN_ITS_CONTEXT(across, name, ptds, ...)                                                                                \
    CUresult rc = (across).how == ACROSS_CURRENT ? across_begin((across).to, ptds) : CUDA_SUCCESS;                             \
    if (rc != CUDA_SUCCESS)                                                                                                    \
        return rc;                                                                                                             \
    rc = tangram.driver.name(__VA_ARGS__);                                                                                     \
    if ((across).how == ACROSS_CURRENT)                                                                                        \
        across_end();                                                                                                          \
    return rc
#define ACROSS(name, base, since, ptds, params, ...)                                                                           \
    static CUresult name##_across params                                                                                       \
    {                                                                                                                          \
        const struct across across = across_look((CUdeviceptr)to, (CUdeviceptr)from, (CUstream)(uintptr_t)(ptds ? 2 : 0));     \
        if (across.how == ACROSS_PEER)                                                                                         \
            return ptds && HAS(cuMemcpyPeer_ptds)                                                                              \
                       ? tangram.driver.cuMemcpyPeer_ptds((CUdeviceptr)to, across.to, (CUdeviceptr)from, across.from, bytes)   \
                       : tangram.driver.cuMemcpyPeer((CUdeviceptr)to, across.to, (CUdeviceptr)from, across.from, bytes);       \
        IN_ITS_CONTEXT(across, name, ptds, __VA_ARGS__);                                                                       \
    }                                                                                                                          \
    AT_ONCE_ACROSS(name, ptds, params, __VA_ARGS__)
/* The same in two or three dimensions. */
#define AT_ONCE_BOX(name, look, base, since, ptds, params, ...)                                                                \
    static CUresult name##_across params                                                                                       \
    {                                                                                                                          \
        CUDA_MEMCPY3D_PEER box;                                                                                                \
        const struct across across = look(how, (CUstream)(uintptr_t)(ptds ? 2 : 0), &box);                                     \
        if (across.how == ACROSS_PEER && HAS(cuMemcpy3DPeer))                                                                  \
            return ptds && HAS(cuMemcpy3DPeer_ptds) ? tangram.driver.cuMemcpy3DPeer_ptds(&box)                                 \
                                                    : tangram.driver.cuMemcpy3DPeer(&box);                                     \
        IN_ITS_CONTEXT(across, name, ptds, __VA_ARGS__);                                                                       \
    }                                                                                                                          \
    AT_ONCE_ACROSS(name, ptds, params, __VA_ARGS__)
#define INTO_BOX(name, look, base, since, ptds, stream, params, ...)                                                           \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        activity_other(stream, ptds);                                                                                          \
        CUDA_MEMCPY3D_PEER box;                                                                                                \
        if (UNLIKELY(atomic_load_explicit(&tangram.hot.several_gpus, memory_order_relaxed)) && HAS(cuMemcpy3DPeerAsync) &&      \
            look(how, ptds && stream == NULL ? (CUstream)(uintptr_t)2 : stream, &box).how == ACROSS_PEER)                      \
            return ptds && HAS(cuMemcpy3DPeerAsync_ptsz) ? tangram.driver.cuMemcpy3DPeerAsync_ptsz(&box, stream)               \
                                                         : tangram.driver.cuMemcpy3DPeerAsync(&box, stream);                   \
        return tangram.driver.name(how, stream);                                                                               \
    }
#include "gputime/copies.def"
