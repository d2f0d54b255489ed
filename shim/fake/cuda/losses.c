/* losses.c - what a context loses on the GPU beside what is allocated in it, as measured on an H200 (bench/granularity).
 *
 * The context itself, with a stack for each thread that the GPU can have at once: the limit, rounded up to 16 bytes, in whole
 * pages. What it costs is what it costs with STACK_DEFAULT. A kernel with more local memory than the stack has makes it grow at
 * its launch, for good. The heap beyond its first size is lost at the first launch of a kernel that uses it; what printf and
 * malloc of kernels need, when their module is loaded. Of the streams every fourth takes a block, which stays.
 */
#include "internal.h"

enum { STACK_MOST = 327680 /* guessed: 300,000-odd were taken, 524,288 refused */, HEAP_FIRST = 8 << 20, RUNTIME_STACK = 512 };

static bool lose(CUcontext ctx, enum loss what, uint64_t bytes)
{
    SCOPED tables = hold(&cuda.lock);
    uint64_t *lost = &ctx->lost[what];
    CHECK(bytes <= *lost || take(ctx->device, bytes - *lost), false);
    if (bytes < *lost)
        give(ctx->device, *lost - bytes);
    *lost = bytes;
    return true;
}

static uint64_t stacks(int device, uint64_t limit)
{
    return rounded(limit, 16) * processors_of(device) * THREADS_OF_PROCESSOR;
}

bool losses_stack(CUcontext ctx, uint64_t limit)
{
    const uint64_t whole = card_of(ctx->device)->context_bytes + rounded(stacks(ctx->device, limit), BLOCK_BYTES);
    const uint64_t usual = rounded(stacks(ctx->device, STACK_DEFAULT), BLOCK_BYTES);
    CHECK(lose(ctx, LOSS_CONTEXT, whole > usual ? whole - usual : 0), false);
    ctx->limit[CU_LIMIT_STACK_SIZE] = limit;
    return true;
}

void losses_end(CUcontext ctx)
{
    for (enum loss what = 0; what < LOSSES; what++)
        lose(ctx, what, 0);
}

CUresult losses_limit(CUcontext ctx, CUlimit limit, size_t value)
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

/* A card whose contexts cost nothing has streams that cost nothing. */
bool losses_stream(CUcontext ctx)
{
    SCOPED tables = hold(&cuda.lock);
    const uint64_t bytes = card_of(ctx->device)->context_bytes == 0 ? 0 : (ctx->streams + 3) / 4 * BLOCK_BYTES;
    CHECK(bytes <= ctx->lost[LOSS_STREAMS] || lose(ctx, LOSS_STREAMS, bytes), false);
    ctx->streams++;
    return true;
}

void losses_stream_end(CUcontext ctx)
{
    SCOPED tables = hold(&cuda.lock);
    ctx->streams -= ctx->streams > 0;
}
