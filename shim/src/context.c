/* context.c - contexts, which take memory of their own.
 *
 * Before the first context on a card the arbiter is asked to hold what one takes there; after it was made, and after the last is
 * gone, the arbiter measures. What is allocated in a context dies with it, and so do our books of it. A further context of the
 * same process takes as much as the first (measured): that is held before it is made, and settled with the rest. The arbiter is asked with `beginning` held, so that two threads do not both make the first;
 * the driver is called without it, and nobody who only looks at the list waits for the arbiter.
 */
#include "hook.h"
#include "memory.h"

#include <stdlib.h>
#include <string.h>

static struct contexts *const contexts_ = &tangram.contexts;
#define PENDING ((CUcontext)(uintptr_t)1) /* a primary context that is being made, or whose handle is not known */

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
static void tried(void)
{
    atomic_fetch_sub(&contexts_->making, 1);
}

/* It was made. Its default stream was booked without its handle, if it is the first: so nobody has the handle yet. */
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

/* Under `beginning`. False = there is no room for a context. */
static bool begin(struct card *card)
{
    struct card_contexts *of = &contexts_->of[card->at];
    if (of->count > 0) {
        of->count++;
        comes();
        return true;
    }
    enum link_answer answer = link_context_begin(card, &of->estimated);
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
static void gone(struct card *card)
{
    struct card_contexts *of = &contexts_->of[card->at];
    if (of->count == 0 || --of->count > 0)
        return;
    of->open = false;
    atomic_store(&of->bytes, 0);
    atomic_store(&card->calls_heap, false);
    link_context_end(card, WIRE_GONE, false);
}

/* Under `beginning`. Only when the arbiter knew nothing is its measure waited for, before anything is allocated. */
static void made(struct card *card)
{
    struct card_contexts *of = &contexts_->of[card->at];
    if (!of->open)
        return;
    of->open = false;
    link_context_end(card, WIRE_DONE, !of->estimated);
}

void contexts_measure(struct card *card)
{
    pthread_mutex_lock(&contexts_->beginning);
    if (contexts_->of[card->at].count > 0)
        link_context_end(card, WIRE_DONE, true);
    pthread_mutex_unlock(&contexts_->beginning);
}

/* What there is no memory to remember counts until the process ends. */
static void remember(CUcontext context, struct card *card)
{
    pthread_mutex_lock(&contexts_->lock);
    struct context_made *more = contexts_->made;
    if (contexts_->count == contexts_->room) {
        size_t room = contexts_->room ? contexts_->room * 2 : 16;
        more = realloc(contexts_->made, room * sizeof *more);
        if (more != NULL) {
            contexts_->made = more;
            contexts_->room = room;
        }
    }
    if (more != NULL)
        contexts_->made[contexts_->count++] = (struct context_made){context, card};
    pthread_mutex_unlock(&contexts_->lock);
}

/* After the driver answered to making a context that `begin` let pass. */
static void settle_first(struct card *card, CUresult rc, CUcontext context)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&contexts_->beginning);
    if (rc == CUDA_SUCCESS) {
        came(context);
        made(card);
    } else {
        failed();
        gone(card);
    }
    pthread_mutex_unlock(&contexts_->beginning);
    if (rc == CUDA_SUCCESS)
        turn_start(); /* also where no channel was seen: then the arbiter delays launches, as it cannot suspend */
    quiet_end(quiet);
}

/* Locked. NULL: it is none that we saw being made. */
static struct card *forget(CUcontext context)
{
    for (size_t i = 0; i < contexts_->count; i++) {
        struct card *card = contexts_->made[i].card;
        if (contexts_->made[i].context == context) {
            contexts_->made[i] = contexts_->made[--contexts_->count];
            return card;
        }
    }
    return NULL;
}

static bool lock_and_begin(struct card *card)
{
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&contexts_->beginning);
    bool room = begin(card);
    pthread_mutex_unlock(&contexts_->beginning);
    quiet_end(quiet);
    return room;
}

/* What one more context takes; 0 = it is the first, or nobody knows yet. */
static uint64_t further_bytes(struct card *card)
{
    struct card_contexts *of = &contexts_->of[card->at];
    pthread_mutex_lock(&contexts_->beginning);
    uint64_t bytes = of->count > 0 ? atomic_load(&of->bytes) / of->count : 0;
    pthread_mutex_unlock(&contexts_->beginning);
    return bytes;
}

/* The card on which a context needs room, or NULL. */
static struct card *charged_card(CUdevice device)
{
    struct card *card = card_of_device(device);
    return card == NULL || card->closed ? NULL : card;
}

#define CREATES(name, params, ...)                                                                                             \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct card *card = charged_card(device);                                                                              \
        if (card == NULL) {                                                                                                    \
            contexts_are_several();                                                                                            \
            return tangram.driver.name(__VA_ARGS__);                                                                           \
        }                                                                                                                      \
        if (!bound_begin(card, further_bytes(card)))                                                                           \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
        bool room = lock_and_begin(card);                                                                                      \
        CUresult rc = room ? tangram.driver.name(__VA_ARGS__) : CUDA_ERROR_OUT_OF_MEMORY;                                      \
        bound_end(card);                                                                                                       \
        if (!room)                                                                                                             \
            return rc;                                                                                                         \
        tried();                                                                                                               \
        if (rc == CUDA_SUCCESS)                                                                                                \
            remember(*context, card);                                                                                          \
        settle_first(card, rc, rc == CUDA_SUCCESS ? *context : NULL);                                                          \
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

static CUcontext primary_of(CUdevice device)
{
    bool kept = device >= 0 && device < CONTEXT_DEVICES;
    return kept ? atomic_load_explicit(&contexts_->primary[device], memory_order_acquire) : PENDING;
}

static bool is_one_left(void)
{
    pthread_mutex_lock(&contexts_->lock);
    bool left = contexts_->count > 0;
    for (CUdevice device = 0; device < CONTEXT_DEVICES; device++)
        left = left || primary_of(device) != NULL;
    pthread_mutex_unlock(&contexts_->lock);
    return left;
}

static void context_died(CUcontext context, struct card *card, const struct table_moment *before)
{
    activity_context_ended(context, !is_one_left());
    warm_context_ended(context);
    table_forget_context(context, card, before); /* none is named PENDING: of a primary context whose handle nobody asked for, arrays stay */
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&contexts_->beginning);
    if (card != NULL)
        gone(card);
    pthread_mutex_unlock(&contexts_->beginning);
    quiet_end(quiet);
}

#define DESTROYS(name)                                                                                                         \
    EXPORT CUresult name(CUcontext context)                                                                                    \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        pthread_mutex_lock(&contexts_->lock);                                                                                  \
        struct card *card = forget(context); /* first: the driver may give the handle out again at once */                    \
        pthread_mutex_unlock(&contexts_->lock);                                                                                \
        struct table_moment before;                                                                                            \
        table_now(&before);                                                                                                    \
        CUresult rc = tangram.driver.name(context);                                                                            \
        if (rc == CUDA_SUCCESS)                                                                                                \
            context_died(context, card, &before);                                                                              \
        else if (card != NULL)                                                                                                 \
            remember(context, card);                                                                                           \
        return rc;                                                                                                             \
    }

DESTROYS(cuCtxDestroy)
DESTROYS(cuCtxDestroy_v2)

/* Primary contexts: one for each device, counted by the driver, and by us as one while it is active. */

/* False = no room. *first: it was not there, as far as we know. */
static bool primary_begin(CUdevice device, struct card *card, bool *first)
{
    *first = false;
    if (primary_of(device) != NULL)
        return true;
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&contexts_->beginning);
    bool room = true;
    if (primary_of(device) == NULL) {
        room = begin(card);
        *first = room;
        if (room)
            atomic_store_explicit(&contexts_->primary[device], PENDING, memory_order_release);
    }
    pthread_mutex_unlock(&contexts_->beginning);
    quiet_end(quiet);
    return room;
}

static void primary_settle(CUdevice device, struct card *card, CUresult rc, CUcontext context, bool first)
{
    if (first)
        tried();
    else if (rc != CUDA_SUCCESS || primary_of(device) != PENDING)
        return;
    if (rc != CUDA_SUCCESS)
        atomic_store_explicit(&contexts_->primary[device], NULL, memory_order_release);
    else if (device >= 0 && device < CONTEXT_DEVICES && context != NULL)
        atomic_store_explicit(&contexts_->primary[device], context, memory_order_release);
    settle_first(card, rc, context);
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    NEEDS(cuDevicePrimaryCtxRetain);
    bool first;
    struct card *card = charged_card(device);
    if (card == NULL) {
        contexts_are_several();
        return tangram.driver.cuDevicePrimaryCtxRetain(context, device);
    }
    if (!primary_begin(device, card, &first))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuDevicePrimaryCtxRetain(context, device);
    primary_settle(device, card, rc, rc == CUDA_SUCCESS ? *context : NULL, first);
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
    struct card *card = charged_card(device);
    CUcontext context = primary_of(device);
    if (card == NULL || context == NULL || is_active(device))
        return;
    if (atomic_compare_exchange_strong(&contexts_->primary[device], &context, NULL))
        context_died(context, card, before);
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

/* A green context keeps the device's primary context alive and lives inside it. Without the handle of that nobody could ask whether work has
 * ended, or forget what died with it. */
EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *context, CUdevResourceDesc resources, CUdevice device, unsigned int flags)
{
    NEEDS(cuGreenCtxCreate);
    contexts_are_several();
    bool first;
    struct card *card = charged_card(device);
    if (card == NULL)
        return tangram.driver.cuGreenCtxCreate(context, resources, device, flags);
    if (!primary_begin(device, card, &first))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuGreenCtxCreate(context, resources, device, flags);
    primary_settle(device, card, rc, rc == CUDA_SUCCESS && primary_of(device) == PENDING ? handle_under_green(device) : NULL, first);
    return rc;
}

/* The last detach ends a context. What was allocated in it stays counted: whether it was the last the driver does not say. */
EXPORT CUresult cuCtxDetach(CUcontext context)
{
    NEEDS(cuCtxDetach);
    CUresult rc = tangram.driver.cuCtxDetach(context);
    if (rc == CUDA_SUCCESS)
        atomic_fetch_add(&tangram.contexts_gone, 1);
    return rc;
}

EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx context)
{
    NEEDS(cuGreenCtxDestroy);
    struct table_moment before;
    table_now(&before);
    CUresult rc = tangram.driver.cuGreenCtxDestroy(context);
    if (rc == CUDA_SUCCESS)
        atomic_fetch_add(&tangram.contexts_gone, 1); /* the handle of its context, too, may be given out again */
    for (CUdevice device = 0; rc == CUDA_SUCCESS && device < CONTEXT_DEVICES; device++)
        if (atomic_load_explicit(&contexts_->primary[device], memory_order_relaxed) != NULL)
            primary_look(device, &before);
    return rc;
}

size_t contexts_list(CUcontext *list, size_t room)
{
    size_t count = 0;
    pthread_mutex_lock(&contexts_->lock);
    for (size_t i = 0; i < contexts_->count; i++, count++)
        if (count < room)
            list[count] = contexts_->made[i].context;
    for (CUdevice device = 0; device < CONTEXT_DEVICES; device++) {
        CUcontext context = primary_of(device);
        if (context == NULL || context == PENDING)
            continue;
        if (count < room)
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
