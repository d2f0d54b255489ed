/* context.c - contexts, and the thread's stack of current ones.
 *
 * A context loses memory while it lives (losses.c), and counts on the process's slot.
 */
#include "internal.h"

#include <stdlib.h>

#define STACK 64
static _Thread_local CUcontext stack[STACK];
static _Thread_local unsigned depth; /* stack[depth - 1] is current */

CUresult ready(void)
{
    const int state = atomic_load_explicit(&cuda.state, memory_order_acquire);
    if (state == STATE_ENDED && getenv("TANGRAM_FAKE_STRICT_END") != NULL)
        abort(); /* a real driver may not survive it */
    return state == STATE_READY ? CUDA_SUCCESS : state == STATE_ENDED ? CUDA_ERROR_DEINITIALIZED : CUDA_ERROR_NOT_INITIALIZED;
}

bool context_ok(CUcontext ctx)
{
    return handle_is(ctx, HANDLE_CONTEXT) && ctx->live;
}

CUresult current_even_failed(CUcontext *ctx)
{
    TRY(ready());
    CHECK(depth > 0 && stack[depth - 1] != NULL, CUDA_ERROR_INVALID_CONTEXT);
    *ctx = stack[depth - 1];
    return context_ok(*ctx) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult current(CUcontext *ctx)
{
    TRY(current_even_failed(ctx));
    return sticky((*ctx)->device);
}

static void count_context(int device, bool more)
{
    struct fake_page *page = cuda.client.page;
    page_lock(page);
    uint32_t *count = &page->slot[cuda.client.slot].contexts[cuda.device[device].unit];
    *count = more ? *count + 1 : *count - (*count > 0);
    page_unlock(page);
}

static void stream_init(struct CUstream_st *stream, CUcontext ctx)
{
    stream->handle.kind = HANDLE_STREAM;
    stream->ctx = ctx;
}

static CUresult context_new(CUcontext *made, unsigned flags, CUdevice device)
{
    CHECK(atomic_load(&card_of(device)->lost) == 0, CUDA_ERROR_DEVICE_UNAVAILABLE);
    TRY(sticky(device));
    CUcontext ctx = handle_new(HANDLE_CONTEXT, sizeof *ctx);
    CHECK(ctx != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    ctx->device = device;
    if (losses_begin(ctx) != CUDA_SUCCESS) {
        handle_free(ctx);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    ctx->flags = flags;
    ctx->live = true;
    lock();
    ctx->id = ++cuda.ids;
    unlock();
    stream_init(&ctx->stream[0], ctx);
    stream_init(&ctx->stream[1], ctx);
    ctx->limit[CU_LIMIT_PRINTF_FIFO_SIZE] = 1 << 20;
    ctx->limit[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20;
    count_context(device, true);
    ctx->channels = channels_new(device);
    take_a_while();
    *made = ctx;
    return CUDA_SUCCESS;
}

static void context_end(CUcontext ctx)
{
    work_wait(ctx->device, atomic_load(&ctx->done_ns));
    ctx->live = false;
    channels_free(ctx->device, ctx->channels);
    count_context(ctx->device, false);
    losses_end(ctx);
    memory_context_gone(ctx);
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *made, unsigned flags, CUdevice device)
{
    FAULT(cuCtxCreate_v2, 0);
    TRY(device_ok(device));
    CHECK(made != NULL && depth < STACK, CUDA_ERROR_INVALID_VALUE);
    TRY(context_new(made, flags, device));
    stack[depth++] = *made;
    return CUDA_SUCCESS;
}

ALIAS(cuCtxCreate, cuCtxCreate_v2)

EXPORT CUresult cuCtxCreate_v3(CUcontext *made, CUexecAffinityParam *affinity, int count, unsigned flags, CUdevice device)
{
    (void)affinity, (void)count;
    return cuCtxCreate_v2(made, flags, device);
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *made, CUctxCreateParams *how, unsigned flags, CUdevice device)
{
    (void)how;
    return cuCtxCreate_v2(made, flags, device);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext ctx)
{
    TRY(ready());
    CHECK(context_ok(ctx) && !ctx->primary, CUDA_ERROR_INVALID_CONTEXT);
    if (depth > 0 && stack[depth - 1] == ctx)
        depth--;
    context_end(ctx);
    return CUDA_SUCCESS;
}

ALIAS(cuCtxDestroy, cuCtxDestroy_v2)

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext ctx)
{
    TRY(ready());
    CHECK(context_ok(ctx), CUDA_ERROR_INVALID_CONTEXT);
    CHECK(depth < STACK, CUDA_ERROR_INVALID_VALUE);
    stack[depth++] = ctx;
    return CUDA_SUCCESS;
}

ALIAS(cuCtxPushCurrent, cuCtxPushCurrent_v2)

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *ctx)
{
    TRY(ready());
    CHECK(depth > 0, CUDA_ERROR_INVALID_CONTEXT);
    depth--;
    if (ctx != NULL)
        *ctx = stack[depth];
    return CUDA_SUCCESS;
}

ALIAS(cuCtxPopCurrent, cuCtxPopCurrent_v2)

EXPORT CUresult cuCtxSetCurrent(CUcontext ctx)
{
    TRY(ready());
    CHECK(ctx == NULL || context_ok(ctx), CUDA_ERROR_INVALID_CONTEXT);
    if (depth == 0)
        depth = 1;
    stack[depth - 1] = ctx;
    if (ctx == NULL)
        depth--;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *ctx)
{
    TRY(ready());
    CHECK(ctx != NULL, CUDA_ERROR_INVALID_VALUE);
    *ctx = depth > 0 ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    FAULT(cuCtxGetDevice, 0);
    CUcontext ctx;
    TRY(current_even_failed(&ctx));
    CHECK(device != NULL, CUDA_ERROR_INVALID_VALUE);
    *device = ctx->device;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext ctx)
{
    if (ctx == NULL)
        return cuCtxGetDevice(device);
    TRY(ready());
    CHECK(device != NULL, CUDA_ERROR_INVALID_VALUE);
    CHECK(context_ok(ctx), CUDA_ERROR_INVALID_CONTEXT);
    *device = ctx->device;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize_v2(CUcontext ctx)
{
    if (ctx == NULL)
        TRY(current(&ctx));
    TRY(ready());
    CHECK(context_ok(ctx), CUDA_ERROR_INVALID_CONTEXT);
    work_wait(ctx->device, atomic_load(&ctx->done_ns));
    pools_synchronized(ctx->device);
    return sticky(ctx->device);
}

EXPORT CUresult cuCtxSynchronize(void)
{
    FAULT(cuCtxSynchronize, 0);
    CUcontext ctx;
    TRY(current(&ctx));
    return cuCtxSynchronize_v2(ctx);
}

EXPORT CUresult cuCtxGetFlags(unsigned *flags)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(flags != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = ctx->flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetId(CUcontext ctx, unsigned long long *id)
{
    if (ctx == NULL)
        TRY(current(&ctx));
    CHECK(context_ok(ctx) && id != NULL, CUDA_ERROR_INVALID_VALUE);
    *id = ctx->id;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext ctx, unsigned *version)
{
    if (ctx == NULL)
        TRY(current(&ctx));
    CHECK(context_ok(ctx) && version != NULL, CUDA_ERROR_INVALID_VALUE);
    *version = 3020;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
    FAULT(cuCtxSetLimit, 0);
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK((unsigned)limit < 16, CUDA_ERROR_UNSUPPORTED_LIMIT);
    return losses_limit(ctx, limit, value);
}

EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(value != NULL, CUDA_ERROR_INVALID_VALUE);
    CHECK((unsigned)limit < 16, CUDA_ERROR_UNSUPPORTED_LIMIT);
    *value = ctx->limit[limit];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    CUcontext ctx;
    TRY(current(&ctx));
    if (least != NULL)
        *least = 0;
    if (greatest != NULL)
        *greatest = -5;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice device)
{
    FAULT(cuDevicePrimaryCtxRetain, 0);
    TRY(device_ok(device));
    CHECK(ctx != NULL, CUDA_ERROR_INVALID_VALUE);
    struct device *of = &cuda.device[device];
    CUresult rc = CUDA_SUCCESS;
    pthread_mutex_lock(&cuda.primaries);
    if (!context_ok(of->primary)) {
        rc = context_new(&of->primary, of->primary_flags, device);
        if (rc == CUDA_SUCCESS)
            of->primary->primary = true;
    }
    if (rc == CUDA_SUCCESS) {
        of->primary_refs++;
        *ctx = of->primary;
    }
    pthread_mutex_unlock(&cuda.primaries);
    return rc;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    TRY(device_ok(device));
    struct device *of = &cuda.device[device];
    pthread_mutex_lock(&cuda.primaries);
    const bool held = of->primary_refs > 0 && context_ok(of->primary);
    if (held && --of->primary_refs == 0)
        context_end(of->primary);
    pthread_mutex_unlock(&cuda.primaries);
    return held ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

ALIAS(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2)

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    TRY(device_ok(device));
    struct device *of = &cuda.device[device];
    pthread_mutex_lock(&cuda.primaries);
    if (context_ok(of->primary))
        context_end(of->primary);
    of->primary_refs = 0;
    pthread_mutex_unlock(&cuda.primaries);
    return CUDA_SUCCESS;
}

ALIAS(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2)

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
    TRY(device_ok(device));
    cuda.device[device].primary_flags = flags;
    return CUDA_SUCCESS;
}

ALIAS(cuDevicePrimaryCtxSetFlags, cuDevicePrimaryCtxSetFlags_v2)

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    TRY(device_ok(device));
    CHECK(flags != NULL && active != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = cuda.device[device].primary_flags;
    *active = context_ok(cuda.device[device].primary);
    return CUDA_SUCCESS;
}
