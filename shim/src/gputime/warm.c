/* warm.c - one empty kernel, launched when work is announced.
 *
 * It queues until the arbiter has suspended the other container, and then brings this process's context back onto the engine, so that the
 * request that follows does not pay for that (80 us, measured on an H200). Each context has a module and a stream of its own for
 * it, and no thread waits for it. The first announcement in a context loads the module, which takes a few milliseconds.
 */
#include "gputime/warm.h"

#include "memory/memory.h"

static struct warm *const warm_ = &tangram.warm;
static const char empty_kernel[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry tangram_empty() { ret; }\n";
enum { STREAM_NON_BLOCKING = 1 };

static bool make(struct warm_kernel *kernel)
{
    const struct driver *driver = &tangram.driver;
    CUmodule module;
    return driver->cuModuleLoadData(&module, empty_kernel) == CUDA_SUCCESS &&
           driver->cuModuleGetFunction(&kernel->function, module, "tangram_empty") == CUDA_SUCCESS &&
           driver->cuStreamCreate(&kernel->stream, STREAM_NON_BLOCKING) == CUDA_SUCCESS;
}

/* Of the current context, made now if need be. False: there is none. One that could not be made is not tried again. */
static bool find(struct warm_kernel *found)
{
    CUcontext context = NULL;
    if (!driver_ready() || tangram.driver.cuCtxGetCurrent(&context) != CUDA_SUCCESS || context == NULL)
        return false;
    pthread_mutex_lock(&warm_->lock);
    unsigned at = 0;
    while (at < warm_->count && warm_->of[at].context != context)
        at++;
    bool here = at < warm_->count;
    *found = here ? warm_->of[at] : (struct warm_kernel){.context = context};
    pthread_mutex_unlock(&warm_->lock);
    if (here)
        return found->stream != NULL;
    bool good = make(found); /* two threads at once make two: one of them is kept, the other one's stays unused */
    if (!good)
        found->stream = NULL;
    pthread_mutex_lock(&warm_->lock);
    if (warm_->count < WARM_CONTEXTS)
        warm_->of[warm_->count++] = *found;
    pthread_mutex_unlock(&warm_->lock);
    return good;
}

void warm_up(void)
{
    struct warm_kernel kernel;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    struct quiet quiet = quiet_begin();
    bool exchanged = driver_ready() && tangram.driver.cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS;
    if (find(&kernel))
        tangram.driver.cuLaunchKernel(kernel.function, 1, 1, 1, 1, 1, 1, 0, kernel.stream, NULL, NULL);
    if (exchanged)
        tangram.driver.cuThreadExchangeStreamCaptureMode(&mode);
    quiet_end(quiet);
}

void warm_context_ended(CUcontext context)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&warm_->lock);
    for (unsigned at = 0; at < warm_->count;)
        if (warm_->of[at].context == context)
            warm_->of[at] = warm_->of[--warm_->count];
        else
            at++;
    pthread_mutex_unlock(&warm_->lock);
    quiet_end(quiet);
}

void warm_forget(void)
{
    warm_->count = 0;
    warm_->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
