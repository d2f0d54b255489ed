/* capture.h - the channels that this process computes on, as its ioctls tell. process.h includes this. */
#ifndef TANGRAM_CAPTURE_H
#define TANGRAM_CAPTURE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gputime/objects.h"
#include "gputime/rm.h"

enum { CAPTURE_SEATS = 128 }; /* clients times devices; a process was always seen with one client that computes */

/* The channels that one of the process's clients has on one GPU. */
struct capture_channels {
    uint8_t uuid[16]; /* of the GPU */
    uint32_t client, subdevice;
    uint32_t computes, copies;
    bool unlisted; /* there are more than a list holds: this client cannot be suspended whole */
    bool fresh;    /* no arbiter was told of any channel before: so none has suspended these */
    uint32_t compute[RM_CHANNELS], copy[RM_CHANNELS];
};

struct capture_reported {
    uint8_t uuid[16];
    uint32_t client, subdevice;
};

struct capture {
    _Atomic(int (*)(int fd, unsigned long request, ...)) next; /* the ioctl behind ours */
    pthread_mutex_t lock; /* guards the book; never held over a call */
    struct objects book;
    _Atomic bool changed; /* since the arbiter was told */
    pthread_mutex_t reporting; /* guards what follows */
    struct capture_reported reported[CAPTURE_SEATS];
    size_t tolds;
    _Atomic bool ever; /* has an arbiter been told of any channel? */
};

/* Tell the arbiter what changed since it was told last; nothing when nothing did or it is away, and not while the first context is
 * being made: its channels come one by one, and nothing runs on them yet. Makes system calls. */
void capture_report(void);

/* The arbiter is new: it knows nothing yet. */
void capture_arbiter_is_new(void);

/* The arbiter is away: run, whatever it had suspended. Enabling what is enabled changes nothing. */
void capture_enable_own(void);

/* In a forked child: its parent's channels are not its own. */
void capture_forget_all(void);

#endif
