/* answers.c - the table answers.def, and what its values are made of. */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>

static const char *text_of(CUresult error, bool name)
{
    switch ((int)error) {
#define ERROR(value, sentence) case value: return name ? #value : sentence;
#include "errors.def"
    default: return NULL;
    }
}

static CUresult text_or_error(const char **answer, const char *text)
{
    *answer = text;
    return text != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult none_of(const void **table)
{
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

static int device_attribute(CUdevice_attribute attribute, CUdevice device)
{
    const struct fake_card *card = card_of(device);
    switch ((int)attribute) {
#define ATTRIBUTE(name, value) case CU_DEVICE_ATTRIBUTE_##name: return (int)(value);
#include "attributes.def"
    default: return 0;
    }
}

static CUuuid uuid_of(const void *bytes)
{
    CUuuid uuid;
    memcpy(uuid.bytes, bytes, sizeof uuid.bytes);
    return uuid;
}

static bool are_linked(CUdevice device, CUdevice peer)
{
    const bool whole = profile_of(device) == NULL && profile_of(peer) == NULL;
    return whole && cuda.device[device].card != cuda.device[peer].card && card_of(device)->links_wired > 0;
}

static CUresult primary_flags_set(CUdevice device, unsigned flags)
{
    TRY(device_ok(device));
    cuda.device[device].primary_flags = flags;
    return CUDA_SUCCESS;
}

static CUresult must(bool condition, CUresult otherwise)
{
    return condition ? CUDA_SUCCESS : otherwise;
}

static bool loads_eagerly(void)
{
    const char *wanted = getenv("CUDA_MODULE_LOADING");
    return wanted != NULL && strcmp(wanted, "EAGER") == 0;
}

static CUresult context_idle(void)
{
    CUcontext ctx;
    TRY(current(&ctx));
    work_wait(ctx->device, atomic_load(&ctx->done_ns));
    return CUDA_SUCCESS;
}

static CUresult copy_3d(const CUDA_MEMCPY3D *how)
{
    return how != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The functions. */

#pragma GCC diagnostic ignored "-Wunused-parameter"
#define FUNCTION(function, parameters, find, valid, otherwise, ...)                                                            \
    EXPORT CUresult function parameters                                                                                        \
    {                                                                                                                          \
        CUcontext ctx = NULL;                                                                                                  \
        CUstream stream = NULL;                                                                                                \
        CUmemoryPool pool = NULL;                                                                                              \
        struct span *span = NULL;                                                                                              \
        struct physical *memory = NULL;                                                                                        \
        bool captured = false;                                                                                                 \
        (void)ctx, (void)stream, (void)pool, (void)span, (void)memory, (void)captured;                                         \
        TRY(find);                                                                                                             \
        CHECK(valid, otherwise);                                                                                               \
        __VA_ARGS__;                                                                                                           \
    }
#define GET(function, parameters, find, valid, value)                                                                          \
    FUNCTION(function, parameters, find, answer != NULL && (valid), CUDA_ERROR_INVALID_VALUE, *answer = value; return CUDA_SUCCESS)
#define PAIR(function, parameters, find, valid, first_value, second_value)                                                     \
    FUNCTION(function, parameters, find, valid, CUDA_ERROR_INVALID_VALUE, if (first != NULL) *first = first_value;             \
             if (second != NULL) *second = second_value; return CUDA_SUCCESS)
#define TEXT(function, parameters, find, ...)                                                                                  \
    FUNCTION(function, parameters, find, answer != NULL && room > 0, CUDA_ERROR_INVALID_VALUE,                                 \
             snprintf(answer, (size_t)room, __VA_ARGS__); return CUDA_SUCCESS)
#define ACCEPT(function, parameters, find, valid, otherwise)                                                                   \
    FUNCTION(function, parameters, find, valid, otherwise, return CUDA_SUCCESS)
#define FORM(function, parameters, valid, ...)                                                                                 \
    FUNCTION(function, parameters, CUDA_SUCCESS, valid, CUDA_ERROR_INVALID_VALUE, return __VA_ARGS__)
#define NOW(function, parameters, call) FUNCTION(function, parameters, context_idle(), true, CUDA_SUCCESS, return call)
#define LATER(function, parameters, on, type, call)                                                                            \
    FUNCTION(function, parameters, stream_captures(on, CU_GRAPH_NODE_TYPE_##type, &captured), !captured, CUDA_SUCCESS, return call)
#include "answers.def"
