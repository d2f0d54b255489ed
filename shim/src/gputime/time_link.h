/* time_link.h - the second connection to the arbiter: it carries channels and activity. process.h includes this. */
#ifndef TANGRAM_TIME_LINK_H
#define TANGRAM_TIME_LINK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gputime/capture.h"
#include "link/link.h"
#include "link/wire.h"

struct time_link {
    pthread_mutex_t meeting; /* of threads that do what the helper would; taken before `lock` */
    pthread_mutex_t lock;    /* guards what follows, and every send */
    enum link_stage stage;
    struct wire_end end;
    struct wire_past past;
    _Atomic bool wanted; /* there were channels: the connection is kept */
    uint64_t again_ms;   /* not before then is the arbiter tried again */
    unsigned pause_ms;   /* between tries */
    _Atomic bool urgent; /* the container is latency-critical, as it was welcomed */
    bool owed;           /* the helper's: channels that were not enabled, as memory was away */
    bool blind;          /* there was no descriptor for the page; only the thread that reads uses this */
    uint32_t seq;
    uint64_t resumed_beat_ms;      /* the helper's: of the last silence in which we resumed ourselves, the beat before it */
    _Atomic uint64_t beat;         /* as the page showed it last */
    _Atomic uint64_t beat_seen_ms; /* when it had changed, by our clock; written before `beat` */
};

/* What became of a message. */
enum time_link_sent {
    TIME_LINK_AWAY, /* there is no arbiter: it gets the state when it is back */
    TIME_LINK_SENT,
    TIME_LINK_FULL /* it is there and does not keep up: to be sent again */
};

#define TIME_LINK_NEVER_MET {.meeting = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .end = {.fd = -1}}

/* There are channels: keep the connection from here on. */
void time_link_start(void);

/* For the helper: the descriptor to wait on, -1 = none; what came on it; and whether the arbiter that suspended us is gone. */
int time_link_try(void);
void time_link_read(void);
void time_link_watch(void);
bool time_link_is_there(void); /* no channels, or an arbiter that knows them; by the helper */
void time_link_look_for_page(void); /* now and then: connects anew where there is a descriptor for the page by now */

/* Where there is no helper: one try to connect, and a look whether the connection has ended, by a thread that has something to report. */
void time_link_meet(void);

/* False when the arbiter is away. fd = -1: these channels are gone. */
bool time_link_channels(const struct capture_channels *channels, int fd);
bool time_link_understands(uint32_t feature); /* the arbiter, according to its page */
enum time_link_sent time_link_activity(enum wire_activity what, uint64_t value);

/* `drained` is called now and then: is nothing of the process on the GPU? */
void time_link_wait_for_gate(bool (*drained)(void));

/* Is the container latency-critical? */
bool time_link_is_urgent(void);

void time_link_forget(void); /* in a forked child */

#endif
