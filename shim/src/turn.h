/* turn.h - the second connection to the arbiter, on which it hears of channels and of work. process.h includes this. */
#ifndef TANGRAM_TURN_H
#define TANGRAM_TURN_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "capture.h"
#include "wire.h"

struct turn {
    pthread_mutex_t lock; /* guards what follows, and every send */
    pthread_cond_t changed;
    bool threaded; /* the thread was made */
    bool wanted;   /* there were channels: it keeps the connection, and is parked before */
    int fd;        /* welcomed; -1 = the arbiter is away */
    _Atomic bool urgent; /* the container is latency-critical, as it was welcomed */
    uint32_t seq;
};

/* There may be channels soon: make the thread, which takes a while, from another than the program's own. */
void turn_ready(void);
/* There are channels: keep the connection from here on. */
void turn_start(void);

/* False when the arbiter is away. fd = -1: these channels are gone. */
bool turn_channels(const struct capture_channels *channels, int fd);
bool turn_activity(enum wire_activity what, uint64_t value);

void turn_wait_for_gate(void);

/* Is the container latency-critical? */
bool turn_is_urgent(void);

void turn_forget(void); /* in a forked child */

#endif
