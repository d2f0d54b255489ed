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

CUresult context_get(CUcontext given, CUcontext *ctx)
{
    if (given == NULL)
        return current(ctx);
    TRY(ready());
    CHECK(context_ok(given), CUDA_ERROR_INVALID_CONTEXT);
    *ctx = given;
    return CUDA_SUCCESS;
}

static void count_context(CUcontext ctx, int more)
{
    page_lock(cuda.client.page);
    cuda.client.page->slot[cuda.client.slot].contexts[cuda.device[ctx->device].unit] += (uint32_t)more;
    page_unlock(cuda.client.page);
}

static CUresult context_new(CUcontext *made, unsigned flags, CUdevice device)
{
    CHECK(atomic_load(&card_of(device)->lost) == 0, CUDA_ERROR_DEVICE_UNAVAILABLE);
    TRY(sticky(device));
    CUcontext ctx;
    TRY(handle_new(&ctx, HANDLE_CONTEXT, sizeof *ctx));
    ctx->device = device;
    if (!losses_stack(ctx, STACK_DEFAULT)) {
        handle_free(ctx);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    ctx->flags = flags;
    ctx->live = true;
    ctx->id = ++cuda.ids;
    for (unsigned i = 0; i < 2; i++)
        ctx->stream[i] = (struct CUstream_st){.handle.kind = HANDLE_STREAM, .ctx = ctx};
    ctx->limit[CU_LIMIT_PRINTF_FIFO_SIZE] = 1 << 20;
    ctx->limit[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20;
    count_context(ctx, 1);
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
    count_context(ctx, -1);
    losses_end(ctx);
    spans_of_context_gone(ctx);
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
    depth -= depth > 0;
    if (ctx != NULL)
        stack[depth++] = ctx;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *ctx)
{
    TRY(ready());
    CHECK(ctx != NULL, CUDA_ERROR_INVALID_VALUE);
    *ctx = depth > 0 ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice device)
{
    FAULT(cuDevicePrimaryCtxRetain, 0);
    TRY(device_ok(device));
    CHECK(ctx != NULL, CUDA_ERROR_INVALID_VALUE);
    struct device *of = &cuda.device[device];
    SCOPED primaries = hold(&cuda.primaries);
    if (!context_ok(of->primary)) {
        TRY(context_new(&of->primary, of->primary_flags, device));
        of->primary->primary = true;
    }
    of->primary_refs++;
    *ctx = of->primary;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    TRY(device_ok(device));
    struct device *of = &cuda.device[device];
    SCOPED primaries = hold(&cuda.primaries);
    CHECK(of->primary_refs > 0 && context_ok(of->primary), CUDA_ERROR_INVALID_CONTEXT);
    if (--of->primary_refs == 0)
        context_end(of->primary);
    return CUDA_SUCCESS;
}

ALIAS(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2)

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    TRY(device_ok(device));
    struct device *of = &cuda.device[device];
    SCOPED primaries = hold(&cuda.primaries);
    if (context_ok(of->primary))
        context_end(of->primary);
    of->primary_refs = 0;
    return CUDA_SUCCESS;
}

ALIAS(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2)
