/* turn.h - the second connection to the arbiter, on which it is told of channels and of work. process.h includes this. */
#ifndef TANGRAM_TURN_H
#define TANGRAM_TURN_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gputime/capture.h"
#include "link/link.h"
#include "link/wire.h"

struct turn {
    pthread_mutex_t meeting; /* of threads that do what the helper would; taken before `lock` */
    pthread_mutex_t lock;    /* guards what follows, and every send */
    enum link_stage stage;
    struct wire_end end;
    struct wire_past past;
    _Atomic bool wanted;  /* there were channels: the connection is kept */
    uint64_t again_ms;    /* not before then is the arbiter tried again */
    unsigned pause_ms;    /* between tries */
    _Atomic bool urgent;  /* the container is latency-critical, as it was welcomed */
    bool blind; /* there was no descriptor for the page; who reads alone */
    uint32_t seq;
    uint64_t resumed_beat_ms;      /* the helper's: of the last silence in which we resumed ourselves, the beat before it */
    _Atomic uint64_t beat;         /* as the page showed it last */
    _Atomic uint64_t beat_seen_ms; /* when it had changed, by our clock; written before `beat` */
};

/* What became of a message about work. */
enum turn_said {
    TURN_AWAY, /* there is no arbiter: it is told how things stand when it is back */
    TURN_SAID,
    TURN_FULL /* it is there and does not keep up: to be said again */
};

#define TURN_NEVER_MET {.meeting = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .end = {.fd = -1}}

/* There are channels: keep the connection from here on. */
void turn_start(void);

/* For the helper: the descriptor to wait on, -1 = none; what came on it; and whether a suspend has lost its author. */
int turn_try(void);
void turn_read(void);
void turn_watch(void);
void turn_look_for_page(void); /* now and then: connects anew where there is a descriptor for the page by now */

/* Where there is no helper: one try to connect, and a look whether the connection has ended, by a thread that has something to tell. */
void turn_meet(void);

/* False when the arbiter is away. fd = -1: these channels are gone. */
bool turn_channels(const struct capture_channels *channels, int fd);
bool turn_understands(uint32_t feature); /* the arbiter, as its page says */
enum turn_said turn_activity(enum wire_activity what, uint64_t value);

/* Asks now and then whether nothing of the process is on the GPU. */
void turn_wait_for_gate(bool (*drained)(void));

/* Is the container latency-critical? */
bool turn_is_urgent(void);

void turn_forget(void); /* in a forked child */

#endif
