/* server.h - requests to jobs, and jobs to answers: the thread of the connection. */
#ifndef TANGRAM_COPIER_SERVER_H
#define TANGRAM_COPIER_SERVER_H

#include <pthread.h>

#include "direction.h"
#include "socket.h"

struct server {
    int listener, peer; /* peer: -1 = none */
    int signals;        /* SIGTERM and SIGINT, by signalfd */
    int wake;           /* jobs have finished, or the pool is ready: eventfd */
    const struct pool *pool;
    atomic_bool ready;
    _Atomic uint32_t context_mib;
    struct direction out, in;

    pthread_mutex_t lock; /* guards `finished` */
    struct job_queue finished;

    /* of the thread alone */
    struct job job[COPIER_JOBS];
    unsigned jobs; /* in use */
    bool ending;
    uint64_t alive_ms; /* when it last stated that it is */
    uint64_t accept_ms; /* before that no connection is accepted: no descriptor was free */
    bool full; /* `unsent` waits until the peer reads */
    uint64_t full_ms; /* since when */
    struct packet unsent;
};

/* Until the first SIGTERM or SIGINT, and then until the jobs are answered. */
void server_run(struct server *server);

/* A direction's way to hand a finished job over. */
void server_finished(void *server, struct job *job);

/* The directions may be given jobs from now on. For another thread. */
void server_is_ready(struct server *server, uint32_t context_mib);

#endif
