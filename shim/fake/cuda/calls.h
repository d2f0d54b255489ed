/* calls.h - what a row of a table of entry points means. Each file has its table beside it: stream.c ends with stream.def.
 *
 *   CALL(function, parameters, find, valid, otherwise, call)   what the call answers
 *   LOCKED(function, parameters, find, valid, otherwise, call) the same under cuda.lock, from find on
 *   FORM(function, parameters, valid, call)                    a CALL that finds nothing: another form of a function
 *   GET(function, parameters, find, valid, value)              `answer`, one of the parameters, is where the value goes
 *   SET(function, parameters, find, valid, place, value)       one value is kept
 *   PAIR(function, parameters, find, valid, first, second)     two answers, in `first` and `second`: either may be NULL
 *   TEXT(function, parameters, find, format...)                a text, in `answer` of `capacity` bytes
 *   ACCEPT(function, parameters, find, valid, otherwise)       nothing is done: CUDA_SUCCESS, or otherwise if it is not valid
 *   NOW(function, parameters, call)                            a copy or fill, the `job` that the call sets: it waits for work before and for it
 *   LATER(function, parameters, on, type, call)                one on a stream: that is captured as a node of that type, or queued
 *
 * `find` is what must succeed first, and sets what the row uses: `ctx`, `stream`, `span`, `pool` or `memory`; a ?: b is a,
 * or b if a succeeded, and a call may begin so, too. What is not `valid`, or has no place for its answer, is `otherwise`,
 * CUDA_ERROR_INVALID_VALUE where a row has no such column. A parameter that a row does not use is not read. */
#ifndef TANGRAM_FAKE_CUDA_CALLS_H
#define TANGRAM_FAKE_CUDA_CALLS_H

#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-variable"
#define FUNCTION(function, parameters, before, find, valid, otherwise, ...)                                                    \
    EXPORT CUresult function parameters                                                                                        \
    {                                                                                                                          \
        CUcontext ctx = NULL;                                                                                                  \
        CUstream stream = NULL;                                                                                                \
        CUmemoryPool pool = NULL;                                                                                              \
        struct span *span = NULL;                                                                                              \
        struct physical *memory = NULL;                                                                                        \
        bool captured = false;                                                                                                 \
        before;                                                                                                                \
        TRY(find);                                                                                                             \
        CHECK(valid, otherwise);                                                                                               \
        __VA_ARGS__;                                                                                                           \
    }
#define CALL(function, parameters, find, valid, otherwise, ...)                                                                \
    FUNCTION(function, parameters, (void)0, find, valid, otherwise, return __VA_ARGS__)
#define LOCKED(function, parameters, find, valid, otherwise, ...)                                                              \
    FUNCTION(function, parameters, SCOPED tables = locked(&cuda.lock), find, valid, otherwise, return __VA_ARGS__)
#define FORM(function, parameters, valid, ...) CALL(function, parameters, CUDA_SUCCESS, valid, CUDA_ERROR_INVALID_VALUE, __VA_ARGS__)
#define SET(function, parameters, find, valid, place, ...)                                                                     \
    FUNCTION(function, parameters, (void)0, find, valid, CUDA_ERROR_INVALID_VALUE, place = __VA_ARGS__; return CUDA_SUCCESS)
#define GET(function, parameters, find, valid, ...) SET(function, parameters, find, answer != NULL && (valid), *answer, __VA_ARGS__)
#define PAIR(function, parameters, find, valid, first_value, second_value)                                                     \
    FUNCTION(function, parameters, (void)0, find, valid, CUDA_ERROR_INVALID_VALUE, PUT(first, first_value);                    \
             PUT(second, second_value); return CUDA_SUCCESS)
#define TEXT(function, parameters, find, ...)                                                                                  \
    FUNCTION(function, parameters, (void)0, find, answer != NULL && capacity > 0, CUDA_ERROR_INVALID_VALUE,                        \
             snprintf(answer, (size_t)capacity, __VA_ARGS__); return CUDA_SUCCESS)
#define ACCEPT(function, parameters, find, valid, otherwise) CALL(function, parameters, find, valid, otherwise, CUDA_SUCCESS)
#define NOW(function, parameters, ...)                                                                                         \
    FUNCTION(function, parameters, struct job job, current(&ctx), true, CUDA_SUCCESS, return legacy_idle(ctx) ?: __VA_ARGS__ ?: job_now(ctx, job))
#define LATER(function, parameters, on, type, ...)                                                                             \
    FUNCTION(function, parameters, struct job job, stream_get(on, &stream), true, CUDA_SUCCESS,                                \
             return __VA_ARGS__ ?: stream_job(stream, CU_GRAPH_NODE_TYPE_##type, &job))

#endif
