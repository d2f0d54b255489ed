/* context.c - contexts, and the thread's stack of current ones.
 *
 * A context loses memory while it lives, and counts on the process's slot.
 */
#include "internal.h"
#include "calls.h"

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

static CUresult current_even_failed(CUcontext *ctx)
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

static CUresult context_get(CUcontext given, CUcontext *ctx)
{
    if (given == NULL)
        return current(ctx);
    TRY(ready());
    CHECK(context_ok(given), CUDA_ERROR_INVALID_CONTEXT);
    *ctx = given;
    return CUDA_SUCCESS;
}

/* What a context loses on the GPU beside what is allocated in it, as measured on an H200 (bench/granularity).
 *
 * The context itself, with a stack for each thread that the GPU can have at once: the limit, rounded up to 16 bytes, in whole
 * pages. What it costs is what it costs with STACK_DEFAULT. A kernel with more local memory than the stack has makes it grow at
 * its launch, for good. The heap beyond its first size is lost at the first launch of a kernel that uses it; what printf and
 * malloc of kernels need, when their module is loaded. Of the streams every fourth takes a block, which stays.
 */
enum { STACK_MOST = 327680 /* guessed: 300,000-odd were taken, 524,288 refused */, HEAP_FIRST = 8 << 20, RUNTIME_STACK = 512, STACK_DEFAULT = 1024 };

static bool lose(CUcontext ctx, enum loss what, uint64_t bytes)
{
    SCOPED tables = locked(&cuda.lock);
    uint64_t *lost = &ctx->lost[what];
    CHECK(bytes <= *lost || take(ctx->device, bytes - *lost, false), false);
    give(ctx->device, bytes < *lost ? *lost - bytes : 0, false);
    *lost = bytes;
    return true;
}

static uint64_t stacks(int device, uint64_t limit)
{
    return rounded(limit, 16) * processors_of(device) * THREADS_OF_PROCESSOR;
}

static bool losses_stack(CUcontext ctx, uint64_t limit)
{
    const uint64_t whole = gpu_of(ctx->device)->context_bytes + rounded(stacks(ctx->device, limit), BLOCK_BYTES);
    const uint64_t usual = rounded(stacks(ctx->device, STACK_DEFAULT), BLOCK_BYTES);
    CHECK(lose(ctx, LOSS_CONTEXT, whole > usual ? whole - usual : 0), false);
    ctx->limit[CU_LIMIT_STACK_SIZE] = limit;
    return true;
}

static void losses_end(CUcontext ctx)
{
    for (enum loss what = 0; what < LOSSES; what++)
        lose(ctx, what, 0);
}

static CUresult losses_limit(CUcontext ctx, CUlimit limit, size_t value)
{
    CHECK((unsigned)limit < LIMITS, CUDA_ERROR_UNSUPPORTED_LIMIT);
    CHECK(limit != CU_LIMIT_STACK_SIZE || value <= STACK_MOST, CUDA_ERROR_INVALID_VALUE);
    return limit != CU_LIMIT_STACK_SIZE || losses_stack(ctx, value) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult losses_launch(CUcontext ctx, uint64_t local, bool heap)
{
    const uint64_t size = ctx->limit[CU_LIMIT_MALLOC_HEAP_SIZE];
    CHECK(local <= ctx->limit[CU_LIMIT_STACK_SIZE] || losses_stack(ctx, local), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(!heap || size <= HEAP_FIRST || lose(ctx, LOSS_HEAP, rounded(size, BLOCK_BYTES) + BLOCK_BYTES), CUDA_ERROR_OUT_OF_MEMORY);
    return CUDA_SUCCESS;
}

bool losses_runtime(CUcontext ctx)
{
    return lose(ctx, LOSS_RUNTIME, rounded(stacks(ctx->device, RUNTIME_STACK) + HEAP_FIRST, BLOCK_BYTES));
}

/* A GPU whose contexts cost nothing has streams that cost nothing. */
bool losses_stream(CUcontext ctx)
{
    SCOPED tables = locked(&cuda.lock);
    const uint64_t bytes = gpu_of(ctx->device)->context_bytes == 0 ? 0 : (ctx->streams + 3) / 4 * BLOCK_BYTES;
    CHECK(bytes <= ctx->lost[LOSS_STREAMS] || lose(ctx, LOSS_STREAMS, bytes), false);
    ctx->streams++;
    return true;
}

CUresult losses_stream_end(CUcontext ctx)
{
    SCOPED tables = locked(&cuda.lock);
    ctx->streams -= ctx->streams > 0;
    return CUDA_SUCCESS;
}

/* Contexts themselves. */

static void count_context(CUcontext ctx, int more)
{
    page_lock(cuda.client.page);
    cuda.client.page->slot[cuda.client.slot].contexts[cuda.device[ctx->device].unit] += (uint32_t)more;
    page_unlock(cuda.client.page);
}

static CUresult context_new(CUcontext *made, unsigned flags, CUdevice device)
{
    CUcontext ctx;
    CHECK(atomic_load(&gpu_of(device)->lost) == 0, CUDA_ERROR_DEVICE_UNAVAILABLE);
    TRY(sticky(device));
    TRY(MAKE(&ctx, HANDLE_CONTEXT, CUctx_st, .device = device, .flags = flags, .id = ++cuda.ids,
             .limit = {[CU_LIMIT_PRINTF_FIFO_SIZE] = 1 << 20, [CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20}));
    if (!losses_stack(ctx, STACK_DEFAULT)) {
        handle_free(ctx);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    ctx->live = true;
    for (unsigned i = 0; i < 2; i++)
        ctx->stream[i] = (struct CUstream_st){.handle.kind = HANDLE_STREAM, .ctx = ctx};
    count_context(ctx, 1);
    ctx->channels = channels_new(device);
    take_a_while();
    *made = ctx;
    return CUDA_SUCCESS;
}

static CUresult context_end(CUcontext ctx)
{
    depth -= depth > 0 && stack[depth - 1] == ctx && !ctx->primary;
    context_idle(ctx);
    ctx->live = false;
    channels_free(ctx->device, ctx->channels);
    count_context(ctx, -1);
    losses_end(ctx);
    spans_of_context_gone(ctx);
    return CUDA_SUCCESS;
}

CUresult context_idle(CUcontext ctx)
{
    jobs_wait(ctx, NULL);
    work_wait(ctx->device, atomic_load(&ctx->done_ns));
    return sticky(ctx->device);
}

CUresult legacy_idle(CUcontext ctx)
{
    jobs_wait(ctx, ctx->stream);
    work_wait(ctx->device, atomic_load(&ctx->done_ns));
    return sticky(ctx->device);
}

static CUresult push(CUcontext ctx)
{
    CHECK(depth < STACK, CUDA_ERROR_INVALID_VALUE);
    stack[depth++] = ctx;
    return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *ctx)
{
    depth--;
    PUT(ctx, stack[depth]);
    return CUDA_SUCCESS;
}

static CUresult put_on_top(CUcontext ctx)
{
    depth -= depth > 0;
    return ctx != NULL ? push(ctx) : CUDA_SUCCESS;
}

static CUresult primary_retain(CUcontext *ctx, CUdevice device)
{
    struct device *of = &cuda.device[device];
    SCOPED primaries = locked(&cuda.primaries);
    if (!context_ok(of->primary)) {
        TRY(context_new(&of->primary, of->primary_flags, device));
        of->primary->primary = true;
    }
    of->primary_refs++;
    *ctx = of->primary;
    return CUDA_SUCCESS;
}

static CUresult primary_release(CUdevice device, bool all)
{
    struct device *of = &cuda.device[device];
    SCOPED primaries = locked(&cuda.primaries);
    CHECK(all || (of->primary_refs > 0 && context_ok(of->primary)), CUDA_ERROR_INVALID_CONTEXT);
    of->primary_refs = all ? 0 : of->primary_refs - 1;
    return of->primary_refs == 0 && context_ok(of->primary) ? context_end(of->primary) : CUDA_SUCCESS;
}

#include "context.def"
