/* context.c - contexts, which take memory of their own.
 *
 * Before the first context on a GPU the library requests what one takes there, and the arbiter reserves it; after it was made, and after the last is
 * gone, the arbiter measures. What is allocated in a context ends with it, and so do its records here. A further context of the same
 * process takes as much as the first (measured): that is reserved before it is made, and settled with the rest. The request is made with
 * `beginning` held, so that two threads do not both make the first; the driver is called without it, and a thread that only reads the list
 * does not wait for the arbiter. Primary and green contexts are in primary.c.
 */
#include "hooks/hook.h"
#include "memory/memory.h"

#include <stdlib.h>
#include <string.h>

static struct contexts *const contexts_ = &tangram.contexts;

EXPORT CUresult cuInit(unsigned int flags)
{
    NEEDS(cuInit);
    link_greet(); /* while the driver is busy the arbiter answers */
    CUresult rc = tangram.driver.cuInit(flags);
    if (rc == CUDA_SUCCESS)
        helper_watch_end();
    return rc;
}

/* Another one is about to be made. */
static void comes(void)
{
    pthread_mutex_lock(&contexts_->lock);
    atomic_fetch_add(&contexts_->making, 1);
    if (contexts_->ever++ > 0)
        atomic_store(&tangram.hot.several_contexts, true);
    pthread_mutex_unlock(&contexts_->lock);
}

/* The driver has answered. */
void context_tried(void)
{
    atomic_fetch_sub(&contexts_->making, 1);
}

/* It was made. If it is the first, its default stream was recorded without its handle: no other thread has the handle yet. */
static void came(CUcontext context)
{
    pthread_mutex_lock(&contexts_->lock);
    atomic_store(&contexts_->one_made, true);
    if (context != NULL && atomic_load(&contexts_->first) == NULL && !atomic_load(&tangram.hot.several_contexts))
        atomic_store(&contexts_->first, context);
    pthread_mutex_unlock(&contexts_->lock);
}

void contexts_are_several(void)
{
    pthread_mutex_lock(&contexts_->lock);
    atomic_store(&tangram.hot.several_contexts, true);
    pthread_mutex_unlock(&contexts_->lock);
}

/* Under `beginning`. False = a context does not fit the limit. */
bool context_begin(struct gpu *gpu)
{
    struct gpu_contexts *of = &contexts_->of[gpu->at];
    if (of->count > 0) {
        of->count++;
        comes();
        return true;
    }
    enum link_answer answer = link_context_begin(gpu, &of->estimated);
    if (answer == LINK_ABSENT)
        warn(WARN_AWAY, "the arbiter does not answer at %s: new GPU memory is refused until it does", tangram.grant.socket);
    if (answer != LINK_GRANTED)
        return false;
    of->open = true;
    of->count++;
    comes();
    return true;
}

/* It could not be made. */
static void failed(void)
{
    pthread_mutex_lock(&contexts_->lock);
    if (!atomic_load(&tangram.hot.several_contexts))
        contexts_->ever--;
    pthread_mutex_unlock(&contexts_->lock);
}

/* Under `beginning`. */
static void gone(struct gpu *gpu)
{
    struct gpu_contexts *of = &contexts_->of[gpu->at];
    if (of->count == 0 || --of->count > 0)
        return;
    of->open = false;
    atomic_store(&of->bytes, 0);
    atomic_store(&gpu->calls_heap, false);
    link_context_end(gpu, WIRE_GONE, false);
}

/* Under `beginning`. Only when the arbiter knew nothing is its measure waited for, before anything is allocated. */
static void made(struct gpu *gpu)
{
    struct gpu_contexts *of = &contexts_->of[gpu->at];
    if (!of->open)
        return;
    of->open = false;
    link_context_end(gpu, WIRE_DONE, !of->estimated);
}

void contexts_measure(struct gpu *gpu)
{
    pthread_mutex_lock(&contexts_->beginning);
    if (contexts_->of[gpu->at].count > 0)
        link_context_end(gpu, WIRE_DONE, true);
    pthread_mutex_unlock(&contexts_->beginning);
}

/* What there is no memory to remember counts until the process ends. */
static void remember(CUcontext context, struct gpu *gpu)
{
    pthread_mutex_lock(&contexts_->lock);
    struct context_made *more = contexts_->made;
    if (contexts_->count == contexts_->capacity) {
        size_t capacity = contexts_->capacity ? contexts_->capacity * 2 : 16;
        more = realloc(contexts_->made, capacity * sizeof *more);
        if (more != NULL) {
            contexts_->made = more;
            contexts_->capacity = capacity;
        }
    }
    if (more != NULL)
        contexts_->made[contexts_->count++] = (struct context_made){context, gpu};
    pthread_mutex_unlock(&contexts_->lock);
}

/* After the driver answered to making a context that `context_begin` let pass. */
void context_settle(struct gpu *gpu, CUresult rc, CUcontext context)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&contexts_->beginning);
    if (rc == CUDA_SUCCESS) {
        came(context);
        made(gpu);
    } else {
        failed();
        gone(gpu);
    }
    pthread_mutex_unlock(&contexts_->beginning);
    if (rc == CUDA_SUCCESS)
        time_link_start(); /* also where no channel was seen: then the arbiter delays launches, as it cannot suspend */
    quiet_end(quiet);
}

/* Locked. NULL: it is none that we saw being made. */
static struct gpu *forget(CUcontext context)
{
    for (size_t i = 0; i < contexts_->count; i++) {
        struct gpu *gpu = contexts_->made[i].gpu;
        if (contexts_->made[i].context == context) {
            contexts_->made[i] = contexts_->made[--contexts_->count];
            return gpu;
        }
    }
    return NULL;
}

static bool lock_and_begin(struct gpu *gpu)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&contexts_->beginning);
    bool admitted = context_begin(gpu);
    pthread_mutex_unlock(&contexts_->beginning);
    quiet_end(quiet);
    return admitted;
}

/* What one more context takes; 0 = it is the first, or not known yet. */
static uint64_t further_bytes(struct gpu *gpu)
{
    struct gpu_contexts *of = &contexts_->of[gpu->at];
    pthread_mutex_lock(&contexts_->beginning);
    uint64_t bytes = of->count > 0 ? atomic_load(&of->bytes) / of->count : 0;
    pthread_mutex_unlock(&contexts_->beginning);
    return bytes;
}

/* The GPU on which a context takes memory, or NULL. */
struct gpu *context_gpu(CUdevice device)
{
    struct gpu *gpu = gpu_of_device(device);
    return gpu == NULL || gpu->closed ? NULL : gpu;
}

#define CREATES(name, params, ...)                                                                                             \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct gpu *gpu = context_gpu(device);                                                                                 \
        if (gpu == NULL) {                                                                                                     \
            contexts_are_several();                                                                                            \
            return tangram.driver.name(__VA_ARGS__);                                                                           \
        }                                                                                                                      \
        if (!bound_begin(gpu, further_bytes(gpu)))                                                                             \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
        bool admitted = lock_and_begin(gpu);                                                                                   \
        CUresult rc = admitted ? tangram.driver.name(__VA_ARGS__) : CUDA_ERROR_OUT_OF_MEMORY;                                  \
        bound_end(gpu);                                                                                                        \
        if (!admitted)                                                                                                         \
            return rc;                                                                                                         \
        context_tried();                                                                                                       \
        if (rc == CUDA_SUCCESS)                                                                                                \
            remember(*context, gpu);                                                                                           \
        context_settle(gpu, rc, rc == CUDA_SUCCESS ? *context : NULL);                                                         \
        return rc;                                                                                                             \
    }

CREATES(cuCtxCreate, (CUcontext * context, unsigned int flags, CUdevice device), context, flags, device)
CREATES(cuCtxCreate_v2, (CUcontext * context, unsigned int flags, CUdevice device), context, flags, device)
CREATES(cuCtxCreate_v3,
        (CUcontext * context, CUexecAffinityParam *affinity, int count, unsigned int flags, CUdevice device), context,
        affinity, count, flags, device)
CREATES(cuCtxCreate_v4, (CUcontext * context, CUctxCreateParams *how, unsigned int flags, CUdevice device), context, how,
        flags, device)
/* The program has a context of OpenGL or VDPAU, too: what that takes is seen by its channels. */
CREATES(cuGLCtxCreate, (CUcontext * context, unsigned int flags, CUdevice device), context, flags, device)
CREATES(cuGLCtxCreate_v2, (CUcontext * context, unsigned int flags, CUdevice device), context, flags, device)
CREATES(cuVDPAUCtxCreate, (CUcontext * context, unsigned int flags, CUdevice device, uint32_t vdpau, void *functions), context,
        flags, device, vdpau, functions)
CREATES(cuVDPAUCtxCreate_v2, (CUcontext * context, unsigned int flags, CUdevice device, uint32_t vdpau, void *functions),
        context, flags, device, vdpau, functions)

static bool is_one_left(void)
{
    pthread_mutex_lock(&contexts_->lock);
    bool left = contexts_->count > 0;
    for (CUdevice device = 0; device < CONTEXT_DEVICES; device++)
        left = left || context_primary(device) != NULL;
    pthread_mutex_unlock(&contexts_->lock);
    return left;
}

void context_died(CUcontext context, struct gpu *gpu, const struct table_moment *before)
{
    activity_context_ended(context, !is_one_left());
    warm_context_ended(context);
    table_forget_context(context, gpu, before); /* none is named CONTEXT_PENDING: arrays stay of a primary context whose handle was never requested */
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&contexts_->beginning);
    if (gpu != NULL)
        gone(gpu);
    pthread_mutex_unlock(&contexts_->beginning);
    quiet_end(quiet);
}

#define DESTROYS(name)                                                                                                         \
    EXPORT CUresult name(CUcontext context)                                                                                    \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        pthread_mutex_lock(&contexts_->lock);                                                                                  \
        struct gpu *gpu = forget(context); /* first: the driver may reuse the handle at once */                                \
        pthread_mutex_unlock(&contexts_->lock);                                                                                \
        struct table_moment before;                                                                                            \
        table_now(&before);                                                                                                    \
        CUresult rc = tangram.driver.name(context);                                                                            \
        if (rc == CUDA_SUCCESS)                                                                                                \
            context_died(context, gpu, &before);                                                                               \
        else if (gpu != NULL)                                                                                                  \
            remember(context, gpu);                                                                                            \
        return rc;                                                                                                             \
    }

DESTROYS(cuCtxDestroy)
DESTROYS(cuCtxDestroy_v2)

/* The last detach ends a context. What was allocated in it stays counted: the driver does not report whether it was the last. */
EXPORT CUresult cuCtxDetach(CUcontext context)
{
    NEEDS(cuCtxDetach);
    CUresult rc = tangram.driver.cuCtxDetach(context);
    if (rc == CUDA_SUCCESS)
        atomic_fetch_add(&tangram.contexts_gone, 1);
    return rc;
}

size_t contexts_list(CUcontext *list, size_t capacity)
{
    size_t count = 0;
    pthread_mutex_lock(&contexts_->lock);
    for (size_t i = 0; i < contexts_->count; i++, count++)
        if (count < capacity)
            list[count] = contexts_->made[i].context;
    for (CUdevice device = 0; device < CONTEXT_DEVICES; device++) {
        CUcontext context = context_primary(device);
        if (context == NULL || context == CONTEXT_PENDING)
            continue;
        if (count < capacity)
            list[count] = context;
        count++;
    }
    pthread_mutex_unlock(&contexts_->lock);
    return count;
}

/* The list is left, not freed: a thread that is not here may have been changing it. */
void contexts_forget_all(void)
{
    atomic_store(&tangram.hot.several_contexts, false);
    memset(contexts_, 0, sizeof *contexts_);
    contexts_->beginning = contexts_->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
