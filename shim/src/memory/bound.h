/* bound.h - calls that make a context grow by an amount that is unknown before they are made. process.h includes this. */
#ifndef TANGRAM_BOUND_H
#define TANGRAM_BOUND_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct gpu;

struct bound { /* of one GPU */
    _Atomic uint64_t left;     /* reserved by the arbiter for calls to come */
    _Atomic unsigned inside;   /* calls that were begun and have not returned */
    _Atomic bool open;         /* the arbiter has reserved something, and GROWN is due when the calls are made */
    _Atomic unsigned periods;  /* how often that ended */
    _Atomic uint64_t borrowed; /* from the lease, as no arbiter answered */
    _Atomic bool unseen;       /* reserved in this period for variables that an image does not show */
};

/* A call may make the GPU's contexts grow by so many bytes at most. False: they do not fit, refuse the call. A NULL GPU is not shared. */
bool bound_begin(struct gpu *gpu, uint64_t bytes);
void bound_end(struct gpu *gpu); /* the call has returned, if it was begun */
unsigned bound_period(const struct gpu *gpu);
bool bound_unseen(struct gpu *gpu); /* is it to be reserved for variables that are not seen? Once a period, for all such images together */

/* Once a second, and when memory is needed: those calls are made, if none is under way. The arbiter settles them by NVML's next figure. What was
 * reserved and not needed is free at once; true: there was some. */
bool bound_settle(struct gpu *gpu);

bool bounds_inside(void); /* is such a call under way, on any GPU? */
/* With link.lock held. The arbiter reserved something, of it so much for calls to come; the next one has welcomed this process, and has reserved nothing. */
void bound_granted(struct gpu *gpu, uint64_t spare_bytes);
void bound_lost(struct gpu *gpu);
void bounds_forget_all(void);       /* in a forked child */

#endif
