/* library.c - in which contexts a library is, and which of its kernels were used where.
 *
 * The driver brings a library's variables into a context when a kernel of it is first used there, and the kernel's code with it (measured:
 * bench/granularity). What was charged when the library was loaded pays for the first context; each further one, of another GPU too, is
 * charged when it is first used. A process of one context needs no lookup: the kernel's entry records that it was used.
 */
#include <stdlib.h>

#include "memory/memory.h"

/* The pair as one number below the bits of the kind. */
static uint64_t pair(enum owned_kind kind, const void *one, CUcontext context)
{
    const uint64_t mixed = (uintptr_t)one * UINT64_C(0x9e3779b97f4a7c15) ^ (uintptr_t)context * UINT64_C(0xc2b2ae3d27d4eb4f);
    return OWNED_AS(kind, mixed >> 8);
}

CUcontext library_context(void)
{
    CUcontext context = NULL;
    if (!atomic_load_explicit(&tangram.hot.several_contexts, memory_order_acquire))
        return atomic_load(&tangram.contexts.first);
    return tangram.driver.cuCtxGetCurrent(&context) == CUDA_SUCCESS ? context : NULL;
}

void library_loaded(const void *library, uint64_t variables)
{
    if (variables > 0)
        table_own((struct owned){OWNED_AS(OWNED_VARIABLES, (uintptr_t)library), variables, NULL, NULL});
}

void library_unloaded(const void *library)
{
    struct owned was;
    if (!table_disown(OWNED_AS(OWNED_VARIABLES, (uintptr_t)library), &was))
        return;
    const size_t capacity = contexts_list(NULL, 0);
    CUcontext *context = malloc(capacity * sizeof *context + 1);
    const size_t count = context == NULL ? 0 : contexts_list(context, capacity);
    for (size_t i = 0; i < count && i < capacity; i++)
        if (table_disown(pair(OWNED_THERE, library, context[i]), &was))
            memory_gone(&was);
    free(context);
}

static bool is_there(const void *library, CUcontext context, struct owned *variables)
{
    struct owned found;
    return !table_find(OWNED_AS(OWNED_VARIABLES, (uintptr_t)library), variables) || variables->of == context ||
           table_find(pair(OWNED_THERE, library, context), &found);
}

/* Is this the first context that it is used in, on the GPU that was charged when it was loaded? */
static bool is_first(const void *library, CUcontext context, const struct gpu *gpu)
{
    struct owned variables, charged;
    if (!table_find(OWNED_AS(OWNED_LIBRARY, (uintptr_t)library), &charged) || charged.gpu != gpu)
        return false;
    pthread_mutex_lock(&tangram.stack_lock);
    bool first = table_find(OWNED_AS(OWNED_VARIABLES, (uintptr_t)library), &variables) && variables.of == NULL;
    if (first) {
        variables.of = context;
        table_own(variables);
    }
    pthread_mutex_unlock(&tangram.stack_lock);
    return first;
}

bool library_begin(const void *library, CUcontext context, struct placing *placing)
{
    struct owned variables;
    struct gpu *gpu;
    *placing = (struct placing){.gpu = NULL};
    if (is_there(library, context, &variables) || (gpu = current_gpu()) == NULL || is_first(library, context, gpu))
        return true;
    return placing_begin(placing, &tangram.module_pages, gpu, context, variables.bytes);
}

void library_end(const void *library, const struct placing *placing, CUresult rc)
{
    placing_end(placing, rc, pair(OWNED_THERE, library, placing->context));
}

bool kernel_is_used(const struct owned *kernel, CUcontext context)
{
    struct owned found;
    if (context == atomic_load(&tangram.contexts.first))
        return kernel->bytes == LATE_KERNEL_USED;
    return is_there(kernel->of, context, &found) && table_find(pair(OWNED_USED, (const void *)(uintptr_t)kernel->at, context), &found);
}

void kernel_gone(const struct owned *kernel)
{
    struct owned was;
    const size_t capacity = contexts_list(NULL, 0);
    CUcontext *context = malloc(capacity * sizeof *context + 1);
    const size_t count = context == NULL ? 0 : contexts_list(context, capacity);
    for (size_t i = 0; i < count && i < capacity; i++)
        table_disown(pair(OWNED_USED, (const void *)(uintptr_t)kernel->at, context[i]), &was);
    free(context);
}

void kernel_used(struct owned kernel, CUcontext context)
{
    if (context == atomic_load(&tangram.contexts.first)) {
        kernel.bytes = LATE_KERNEL_USED;
        table_own(kernel);
    } else
        table_own((struct owned){pair(OWNED_USED, (const void *)(uintptr_t)kernel.at, context), 0, NULL, context});
}
