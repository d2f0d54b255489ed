/* capture.h - the channels that this process computes on, read from its ioctls. process.h includes this. */
#ifndef TANGRAM_CAPTURE_H
#define TANGRAM_CAPTURE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gputime/objects.h"
#include "gputime/rm.h"

enum { CAPTURE_GROUPS = 128 }; /* clients times GPUs; every process measured had one client that computes */

/* The channels that one of the process's clients has on one GPU. */
struct capture_channels {
    uint8_t uuid[16]; /* of the GPU */
    uint32_t client, subdevice;
    uint32_t computes, copies;
    bool unlisted; /* there are more than fit into a list: this client cannot be suspended whole */
    bool fresh;    /* no channel was reported before: so no arbiter has suspended these */
    uint32_t compute[RM_CHANNELS], copy[RM_CHANNELS];
};

struct capture_reported {
    uint8_t uuid[16];
    uint32_t client, subdevice;
};

struct capture {
    _Atomic(int (*)(int fd, unsigned long request, ...)) next; /* the ioctl behind ours */
    pthread_mutex_t lock;                                      /* guards `objects`; never held over a call */
    struct objects objects;
    _Atomic bool changed;      /* since the last report */
    pthread_mutex_t reporting; /* guards what follows */
    struct capture_reported reported[CAPTURE_GROUPS];
    size_t reported_count;
    _Atomic bool ever; /* has any channel been reported to any arbiter? */
};

/* Report what changed since the last report; nothing when nothing did or the arbiter is away, and not while the first context is
 * being made: its channels come one by one, and nothing runs on them yet. Makes system calls. */
void capture_report(void);

/* The arbiter is new: it knows nothing yet. */
void capture_arbiter_is_new(void);

/* The arbiter is away: run, whatever it had suspended. Enabling what is enabled changes nothing. */
void capture_enable_own(void);

/* In a forked child: its parent's channels are not its own. */
void capture_forget_all(void);

#endif
