/* queues.c - see queues.h. A part of unit_time. */
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "../src/gputime/launching.h"
#include "double.h"
#include "queues.h"

bool queued[CONTEXTS][QUEUES];
int current;

CUcontext handle_of(int context)
{
    return (CUcontext)(uintptr_t)((context + 1) << 12);
}

CUstream stream_of(int context, int made)
{
    return (CUstream)(uintptr_t)(((context + 1) << 12) + 16 * (made + 1));
}

bool *queue_of(CUstream stream)
{
    uintptr_t handle = (uintptr_t)stream;
    if (handle <= 2)
        return &queued[current][handle == 2];
    return &queued[(handle >> 12) - 1][2 + (handle & 0xfff) / 16 - 1];
}

static CUresult query(CUstream stream)
{
    return *queue_of(stream) ? (CUresult)600 : CUDA_SUCCESS;
}

CUresult get_current(CUcontext *context)
{
    *context = handle_of(current);
    return CUDA_SUCCESS;
}

static CUresult get_context(CUstream stream, CUcontext *context)
{
    *context = handle_of((int)((uintptr_t)stream >> 12) - 1);
    return CUDA_SUCCESS;
}

static int pushed_from;

static CUresult push(CUcontext context)
{
    pushed_from = current;
    current = (int)((uintptr_t)context >> 12) - 1;
    return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *context)
{
    *context = handle_of(current);
    current = pushed_from;
    return CUDA_SUCCESS;
}

CUresult not_capturing(CUstream stream, CUstreamCaptureStatus *status)
{
    (void)stream;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

void read_all_that_was_reported(void)
{
    char packet[4096];
    while (recv(peer, packet, sizeof packet, MSG_DONTWAIT) > 0)
        continue;
}

/* The first is made before there are several. */
void another_comes(int context)
{
    atomic_store(&tangram.hot.several_contexts, true);
    atomic_store(&tangram.contexts.primary[context], handle_of(context));
}

void queues_begin(int contexts)
{
    fresh();
    activity_forget();
    activity_watch();
    atomic_store(&tangram.time_link.urgent, true);
    tangram.time_link.stage = LINK_APART; /* no thread reads here, and unit_work.c tests a socket that is full */
    tangram.driver.cuStreamQuery = query;
    tangram.driver.cuStreamGetCtx = get_context;
    tangram.driver.cuStreamIsCapturing = not_capturing;
    tangram.driver.cuCtxGetCurrent = get_current;
    tangram.driver.cuCtxPushCurrent_v2 = push;
    tangram.driver.cuCtxPopCurrent_v2 = pop;
    memset(queued, 0, sizeof queued);
    atomic_store(&tangram.hot.several_contexts, false);
    atomic_store(&tangram.contexts.first, handle_of(0));
    for (int c = 0; c < contexts; c++)
        atomic_store(&tangram.contexts.primary[c], handle_of(c));
    atomic_store(&tangram.hot.several_contexts, contexts > 1);
}

void queues_end(void)
{
    tangram.time_link.stage = LINK_CONNECTED;
    for (int c = 0; c < CONTEXTS; c++)
        atomic_store(&tangram.contexts.primary[c], NULL);
    atomic_store(&tangram.hot.several_contexts, false);
    atomic_store(&tangram.contexts.first, NULL);
    forget_driver();
    for (unsigned table = 0; table < ACTIVITY_TABLES; table++)
        free(atomic_load(&tangram.activity.more[table]));
    for (struct activity_context *of = atomic_load(&tangram.activity.context.next), *next; of != NULL; of = next) {
        next = atomic_load(&of->next);
        free(of);
    }
    activity_forget();
    read_all_that_was_reported();
}

void launch(int context, CUstream stream, int ptds)
{
    current = context;
    activity_launch(stream, ptds);
    *queue_of(ptds && stream == NULL ? (CUstream)2 : stream) = true;
}

void wait_for(int context, CUstream stream, int ptds)
{
    current = context;
    struct activity_before before = activity_sync_begins(stream, ptds);
    *queue_of(ptds && stream == NULL ? (CUstream)2 : stream) = false;
    activity_synced(before);
}

void wait_for_context(int context)
{
    current = context;
    struct activity_before before = activity_context_sync_begins(NULL);
    memset(queued[context], 0, sizeof queued[context]);
    activity_synced(before);
}

void look(void)
{
    activity_look(); /* it is quiet only the second time */
    activity_look();
}
