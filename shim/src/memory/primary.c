/* primary.c - primary contexts: one for each device, counted by the driver, and by us as one while it is active; and green contexts, which live
 * inside them. What takes memory of its own is the primary context: context.c.
 */
#include "hooks/hook.h"
#include "memory/memory.h"

static struct contexts *const contexts_ = &tangram.contexts;

CUcontext context_primary(CUdevice device)
{
    bool kept = device >= 0 && device < CONTEXT_DEVICES;
    return kept ? atomic_load_explicit(&contexts_->primary[device], memory_order_acquire) : CONTEXT_PENDING;
}

/* False = it does not fit the limit. *first: the context did not exist, as far as the library knows. */
static bool primary_begin(CUdevice device, struct gpu *gpu, bool *first)
{
    *first = false;
    if (context_primary(device) != NULL)
        return true;
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&contexts_->beginning);
    bool admitted = true;
    if (context_primary(device) == NULL) {
        admitted = context_begin(gpu);
        *first = admitted;
        if (admitted)
            atomic_store_explicit(&contexts_->primary[device], CONTEXT_PENDING, memory_order_release);
    }
    pthread_mutex_unlock(&contexts_->beginning);
    quiet_end(quiet);
    return admitted;
}

static void primary_settle(CUdevice device, struct gpu *gpu, CUresult rc, CUcontext context, bool first)
{
    if (first)
        context_tried();
    else if (rc != CUDA_SUCCESS || context_primary(device) != CONTEXT_PENDING)
        return;
    if (rc != CUDA_SUCCESS)
        atomic_store_explicit(&contexts_->primary[device], NULL, memory_order_release);
    else if (device >= 0 && device < CONTEXT_DEVICES && context != NULL)
        atomic_store_explicit(&contexts_->primary[device], context, memory_order_release);
    context_settle(gpu, rc, context);
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    NEEDS(cuDevicePrimaryCtxRetain);
    bool first;
    struct gpu *gpu = context_gpu(device);
    if (gpu == NULL) {
        contexts_are_several();
        return tangram.driver.cuDevicePrimaryCtxRetain(context, device);
    }
    if (!primary_begin(device, gpu, &first))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuDevicePrimaryCtxRetain(context, device);
    primary_settle(device, gpu, rc, rc == CUDA_SUCCESS ? *context : NULL, first);
    return rc;
}

static bool is_active(CUdevice device)
{
    unsigned int flags;
    int active = 1;
    return tangram.driver.cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS || active != 0;
}

/* After a call that may have ended the device's primary context. */
static void primary_look(CUdevice device, const struct table_moment *before)
{
    struct gpu *gpu = context_gpu(device);
    CUcontext context = context_primary(device);
    if (gpu == NULL || context == NULL || is_active(device))
        return;
    if (atomic_compare_exchange_strong(&contexts_->primary[device], &context, NULL))
        context_died(context, gpu, before);
}

#define MAY_END_PRIMARY(name)                                                                                                  \
    EXPORT CUresult name(CUdevice device)                                                                                      \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct table_moment before;                                                                                            \
        table_now(&before);                                                                                                    \
        CUresult rc = tangram.driver.name(device);                                                                             \
        if (rc == CUDA_SUCCESS)                                                                                                \
            primary_look(device, &before);                                                                                     \
        return rc;                                                                                                             \
    }

MAY_END_PRIMARY(cuDevicePrimaryCtxRelease)
MAY_END_PRIMARY(cuDevicePrimaryCtxRelease_v2)
MAY_END_PRIMARY(cuDevicePrimaryCtxReset)
MAY_END_PRIMARY(cuDevicePrimaryCtxReset_v2)

/* Of a device with a green context, which keeps the primary one alive: to retain it makes none. */
static CUcontext handle_under_green(CUdevice device)
{
    CUcontext context = NULL;
    if (!HAS(cuDevicePrimaryCtxRetain) || !HAS(cuDevicePrimaryCtxRelease_v2) ||
        tangram.driver.cuDevicePrimaryCtxRetain(&context, device) != CUDA_SUCCESS)
        return NULL;
    tangram.driver.cuDevicePrimaryCtxRelease_v2(device);
    return context;
}

/* A green context keeps the device's primary context alive and is part of it. Without that one's handle the library could not see whether work has
 * ended, or drop the records of what ended with it. */
EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *context, CUdevResourceDesc resources, CUdevice device, unsigned int flags)
{
    NEEDS(cuGreenCtxCreate);
    contexts_are_several();
    bool first;
    struct gpu *gpu = context_gpu(device);
    if (gpu == NULL)
        return tangram.driver.cuGreenCtxCreate(context, resources, device, flags);
    if (!primary_begin(device, gpu, &first))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuGreenCtxCreate(context, resources, device, flags);
    primary_settle(device, gpu, rc, rc == CUDA_SUCCESS && context_primary(device) == CONTEXT_PENDING ? handle_under_green(device) : NULL, first);
    return rc;
}

EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx context)
{
    NEEDS(cuGreenCtxDestroy);
    struct table_moment before;
    table_now(&before);
    CUresult rc = tangram.driver.cuGreenCtxDestroy(context);
    if (rc == CUDA_SUCCESS)
        atomic_fetch_add(&tangram.contexts_gone, 1); /* the handle of its context, too, may be reused */
    for (CUdevice device = 0; rc == CUDA_SUCCESS && device < CONTEXT_DEVICES; device++)
        if (atomic_load_explicit(&contexts_->primary[device], memory_order_relaxed) != NULL)
            primary_look(device, &before);
    return rc;
}
