/* answering.h - for unit programs: an arbiter that is a thread of the program. */
#ifndef TANGRAM_TEST_ANSWERING_H
#define TANGRAM_TEST_ANSWERING_H

#include <assert.h>
#include <sys/socket.h>

#include "../src/memory/memory.h"

/* The process is connected to an arbiter: the thread `serve` has its end of the connection in `arbiter`. Returns the features of the arbiter's page. */
static inline _Atomic uint32_t *connect_arbiter(int *arbiter, void *(*serve)(void *))
{
    static _Alignas(8) char page[WIRE_PAGE_BYTES];
    pthread_condattr_t clock;
    pthread_t thread;
    int pair[2];
    process_check();
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&tangram.link.changed, &clock);
    assert(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0 && wire_own(&tangram.link.end, pair[0]));
    *arbiter = pair[1];
    atomic_store(&tangram.link.page, (_Atomic uint64_t *)(void *)page);
    tangram.link.stage = LINK_CONNECTED;
    tangram.link.clocked = tangram.link.threaded = tangram.link.reading = true;
    assert(pthread_create(&thread, NULL, serve, NULL) == 0 && pthread_detach(thread) == 0);
    return &((struct wire_gpu_time *)(void *)(page + WIRE_GPU_TIME_AT))->features;
}

#endif
