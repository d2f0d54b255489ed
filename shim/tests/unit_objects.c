/* unit_objects.c - the list of channels against a slow one, among threads, and what the hook costs. A part of unit_time. */
#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "double.h"

#undef NDEBUG

/* Against a slow version: parents in an array; what has lost an ancestor is gone. Handles and parents are garbage often. */
enum { HANDLES = 40, CLIENTS = 3 };
static uint32_t parent_of[CLIENTS][HANDLES]; /* 0 = not there */

static void slow_remove(unsigned client, uint32_t handle)
{
    parent_of[client][handle] = 0;
    for (uint32_t i = 1; i < HANDLES; i++)
        if (parent_of[client][i] == handle)
            slow_remove(client, i);
}

void the_list_of_objects_agrees_with_a_slow_one_also_on_garbage(void)
{
    static const uint32_t object_class[] = {RM_DEVICE, RM_SUBDEVICE, RM_GROUP, CHANNEL, 0xc56f};
    struct objects objects = {0};
    unsigned seed = 7;
    for (unsigned step = 0; step < 200000; step++) {
        unsigned client = (unsigned)rand_r(&seed) % CLIENTS;
        uint32_t handle = 1 + (uint32_t)rand_r(&seed) % (HANDLES - 1), name = 0xc1000000 + client;
        if (rand_r(&seed) % 3 != 0) {
            uint32_t parent = 1 + (uint32_t)rand_r(&seed) % (HANDLES - 1); /* also itself, a later one, or none there is */
            assert(objects_add(&objects, (struct object){name, handle, parent, object_class[rand_r(&seed) % 5], (uint32_t)rand_r(&seed) % 14, 3}));
            parent_of[client][handle] = parent;
        } else if (rand_r(&seed) % 50 == 0) {
            objects_remove(&objects, name, name);
            memset(parent_of[client], 0, sizeof parent_of[client]);
        } else {
            objects_remove(&objects, name, handle);
            slow_remove(client, handle);
        }
        size_t there = 0;
        for (client = 0; client < CLIENTS; client++)
            for (handle = 1; handle < HANDLES; handle++) {
                bool is = objects_find(&objects, 0xc1000000 + client, handle) != NULL;
                assert(is == (parent_of[client][handle] != 0));
                there += is;
            }
        assert(there == objects.count);
        uint32_t channel[RM_CHANNELS];
        objects_channels(&objects, name, handle, ENGINE_COMPUTE, channel);
    }
    objects_clear(&objects);
}

static void *make_and_drop(void *number)
{
    uint32_t client = CLIENT + 0x100 + (uint32_t)(uintptr_t)number;
    for (unsigned round = 0; round < 300; round++) {
        make(client, client, client, RM_CLIENT, 0);
        make_device(client, DEVICE);
        make_group(client, DEVICE, CONTEXT, COMPUTE, 4);
        capture_report();
        if (round % 3 == 0)
            capture_enable_own();
        drop(client, round % 2 ? client : DEVICE);
        if (round % 2 == 0)
            drop(client, client);
    }
    return NULL;
}

static void *read_all(void *stop)
{
    while (!atomic_load((_Atomic bool *)stop)) {
        struct reported reported = next_reported();
        if (reported.fd >= 0)
            close(reported.fd);
    }
    return NULL;
}

void threads_do_not_disturb_each_other(void)
{
    fresh();
    enum { THREADS = 4 };
    pthread_t thread[THREADS], reader;
    _Atomic bool stop = false;
    assert(pthread_create(&reader, NULL, read_all, &stop) == 0);
    for (uintptr_t i = 0; i < THREADS; i++)
        assert(pthread_create(&thread[i], NULL, make_and_drop, (void *)i) == 0);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    atomic_store(&stop, true);
    pthread_join(reader, NULL);
    assert(tangram.capture.objects.count == 0);
}

static double ns_each(int (*call)(int, unsigned long, ...), unsigned long request, void *argument)
{
    enum { CALLS = 200000 };
    struct timespec began, ended;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &began);
    for (unsigned i = 0; i < CALLS; i++)
        call(device_fd, request, argument);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ended);
    return ((double)(ended.tv_sec - began.tv_sec) * 1e9 + (double)(ended.tv_nsec - began.tv_nsec)) / (double)CALLS;
}

/* The least of several: whatever else runs on the machine only adds. */
void an_ordinary_call_costs_less_than_100_ns(void)
{
    fresh();
    kernel.rc = 1; /* at once */
    struct rm_control control = {.client = CLIENT};
    const unsigned long request[2] = {RM_REQUEST(RM_ESCAPE_CONTROL, struct rm_control), 0x5401 /* TCGETS */};
    for (unsigned r = 0; r < 2; r++) {
        double least = 1e9;
        for (unsigned i = 0; i < 7; i++) {
            double with = ns_each(ioctl, request[r], &control), without = ns_each(kernel_ioctl, request[r], &control);
            least = with - without < least ? with - without : least;
        }
        printf("ioctl %#lx: %.1f ns more\n", request[r], least);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
        assert(least < 100);
#endif
    }
}
