/* owner.h - the owner of the memory: its blocks, and what it does with them on a second thread, with a deadline. */
#ifndef OWNER_H
#define OWNER_H

#include <cuda.h>
#include <errno.h>
#include <pthread.h>

#include "channels.h"
#include "figures.h"

enum { DEADLINE_S = 8 };

static bool with_copies; // channels of copies are suspended, too

static void figure(const char *name, double value)
{
    printf("%s %.6f\n", name, value);
    fflush(stdout);
}

static void suspend_all(void)
{
    double t = now();
    uint32_t status = switch_channels(true, false);
    figure("suspend_compute_s", now() - t);
    if (with_copies) {
        t = now();
        status |= switch_channels(true, true);
        figure("suspend_copies_s", now() - t);
    }
    if (status)
        printf("suspend_status %u\n", status);
}

static void resume_all(void)
{
    if (with_copies)
        switch_channels(false, true);
    switch_channels(false, false);
}

// ---------------------------------------------------------------- operations on a thread beside the one that launches

static CUcontext context;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static void (*operation)(void);
static bool hung;

static void *worker(void *)
{
    CHECK(cuCtxSetCurrent(context));
    pthread_mutex_lock(&turn);
    for (;;) {
        while (operation == NULL)
            pthread_cond_wait(&changed, &turn);
        pthread_mutex_unlock(&turn);
        operation();
        pthread_mutex_lock(&turn);
        operation = NULL;
        pthread_cond_broadcast(&changed);
    }
}

static bool wait_for_worker(double seconds)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += (time_t)seconds;
    while (operation != NULL)
        if (pthread_cond_timedwait(&changed, &turn, &end) == ETIMEDOUT)
            return operation == NULL;
    return true;
}

// The time the operation took. One that hangs is let go by enabling the channels; the run is over then.
static double timed(const char *name, void (*what)(void))
{
    if (hung)
        return -1;
    double t = now();
    pthread_mutex_lock(&turn);
    operation = what;
    pthread_cond_broadcast(&changed);
    bool done = wait_for_worker(DEADLINE_S);
    pthread_mutex_unlock(&turn);
    if (!done) {
        hung = true;
        printf("hang %s\n", name);
        resume_all();
        pthread_mutex_lock(&turn);
        done = wait_for_worker(DEADLINE_S);
        pthread_mutex_unlock(&turn);
        printf("ends_after_resume %d\n", done);
        fflush(stdout);
        if (!done)
            _exit(2);
        return -1;
    }
    figure(name, now() - t);
    return now() - t;
}

// ---------------------------------------------------------------- blocks

static size_t total, block_bytes, blocks;
static CUdeviceptr base;
static CUmemGenericAllocationHandle *handle;
static int *descriptor;
static CUmemAllocationProp properties;
static const CUmemAccessDesc access_here = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

static void create_all(void)
{
    for (size_t i = 0; i < blocks; i++)
        CHECK(cuMemCreate(&handle[i], block_bytes, &properties, 0));
}

static void map_all(void)
{
    for (size_t i = 0; i < blocks; i++)
        CHECK(cuMemMap(base + i * block_bytes, block_bytes, 0, handle[i], 0));
}

static void access_all(void)
{
    CHECK(cuMemSetAccess(base, total, &access_here, 1));
}

static void export_all(void)
{
    for (size_t i = 0; i < blocks; i++)
        CHECK(cuMemExportToShareableHandle(&descriptor[i], handle[i], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
}

static void unmap_all(void)
{
    CHECK(cuMemUnmap(base, total));
}

static void release_all(void)
{
    for (size_t i = 0; i < blocks; i++)
        CHECK(cuMemRelease(handle[i]));
}

#endif
