/* growing.c - streams, which make their context grow: two mebibytes for every fourth, kept when they are destroyed and used again (measured:
 * bench/granularity). A bound is reserved before each, and settled (bound.c). */
#include "hooks/hook.h"
#include "memory/memory.h"

static const uint64_t STREAM_BYTES = 512 * 1024;

#define CREATES_STREAM(name, params, ...)                                                                                      \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct gpu *gpu = current_gpu();                                                                                       \
        if (!bound_begin(gpu, STREAM_BYTES))                                                                                   \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
        CUresult rc = tangram.driver.name(__VA_ARGS__);                                                                        \
        bound_end(gpu);                                                                                                        \
        return rc;                                                                                                             \
    }

CREATES_STREAM(cuStreamCreate, (CUstream * stream, unsigned int flags), stream, flags)
CREATES_STREAM(cuStreamCreateWithPriority, (CUstream * stream, unsigned int flags, int priority), stream, flags, priority)
