/* late.c - plain memory freed in the order of a stream, and what our own calls need around a capture.
 *
 * cuMemFreeAsync frees memory of cuMemAlloc, too. The driver frees it when the stream reaches that point, so it is counted until
 * an event recorded behind the free has passed.
 */
#include <stdlib.h>

#include "memory/memory.h"
#include "memory/pool.h"

struct late {
    struct late *next;
    CUevent event;
    struct owned was;
};

/* False when no event could be recorded: then the program's next full synchronisation is not seen either, and the
 * memory is returned to the lease at once. */
bool late_free(const struct owned *was, CUstream stream, bool per_thread)
{
    struct late *late = malloc(sizeof *late);
    CUresult rc = CUDA_ERROR_NOT_SUPPORTED;
    if (late != NULL)
        rc = tangram.driver.cuEventCreate(&late->event, CU_EVENT_DISABLE_TIMING);
    if (rc != CUDA_SUCCESS) {
        free(late);
        return false;
    }
    rc = per_thread && HAS(cuEventRecord_ptsz) ? tangram.driver.cuEventRecord_ptsz(late->event, stream)
                                               : tangram.driver.cuEventRecord(late->event, stream);
    if (rc != CUDA_SUCCESS) {
        tangram.driver.cuEventDestroy_v2(late->event);
        free(late);
        return false;
    }
    late->was = *was;
    pthread_mutex_lock(&tangram.late_lock);
    late->next = tangram.late;
    tangram.late = late;
    pthread_mutex_unlock(&tangram.late_lock);
    atomic_store(&tangram.unsettled, true);
    return true;
}

/* The stream is there, or the event went with its context, and the memory with it. An error that the context has keeps its memory. */
static bool is_over(CUresult rc)
{
    return rc == CUDA_SUCCESS || is_drivers_answer(rc);
}

/* The list is taken whole, so that no lock of ours is held while the driver is queried. */
bool late_settle(bool *left)
{
    pthread_mutex_lock(&tangram.late_lock);
    struct late *list = tangram.late, *kept = NULL, **last = &kept;
    tangram.late = NULL;
    pthread_mutex_unlock(&tangram.late_lock);
    *left = false;
    if (list == NULL)
        return false;
    bool came = false;
    CUstreamCaptureMode mode = relax();
    for (struct late *late = list, *next; late != NULL; late = next) {
        next = late->next;
        if (!is_over(tangram.driver.cuEventQuery(late->event))) {
            *last = late;
            last = &late->next;
            continue;
        }
        tangram.driver.cuEventDestroy_v2(late->event);
        memory_gone(&late->was);
        came = true;
        free(late);
    }
    relax_end(mode);
    if (kept == NULL)
        return came;
    pthread_mutex_lock(&tangram.late_lock);
    *last = tangram.late;
    tangram.late = kept;
    pthread_mutex_unlock(&tangram.late_lock);
    *left = true;
    return came;
}

void late_forget_all(void)
{
    tangram.late = NULL;
}

/* Does what goes to this stream now become part of a graph, instead of being done? */
bool capturing(CUstream stream, bool per_thread)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (per_thread && HAS(cuStreamIsCapturing_ptsz))
        return tangram.driver.cuStreamIsCapturing_ptsz(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
    return tangram.driver.cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

CUstreamCaptureMode relax(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    tangram.driver.cuThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

void relax_end(CUstreamCaptureMode before)
{
    tangram.driver.cuThreadExchangeStreamCaptureMode(&before);
}
