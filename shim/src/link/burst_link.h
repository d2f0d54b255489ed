/* burst_link.h - the third connection to the arbiter: the limits of a container that may burst, and the orders to swap. process.h includes this. */
#ifndef TANGRAM_BURST_LINK_H
#define TANGRAM_BURST_LINK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "link/link.h"
#include "link/wire.h"

/* The helper's alone, but for what is atomic. */
struct burst_link {
    enum link_stage stage;
    struct wire_end end;
    struct wire_past past;
    uint64_t again_ms; /* not before then is the arbiter tried again */
    unsigned pause_ms; /* between tries */
    uint32_t seq;
    unsigned gpus;                             /* as its WELCOME numbers them */
    struct gpu *gpu[WIRE_GPUS];                /* NULL: the grant does not name it */
    struct wire_swappable stated[WIRE_GPUS];   /* as SWAPPABLE stated it last */
    bool is_stated[WIRE_GPUS];
    uint64_t stated_ms;
    bool discards; /* its arbiter understands DISCARD */
    _Atomic bool wanted;        /* the connection is kept, and a spare socket for it */
    uint64_t until_ms;          /* so long BURST is waited for, with link.lock; 0 = the program has not needed elastic memory yet */
};

#define BURST_LINK_NEVER_MET {.end = {.fd = -1}}

struct gpu;

/* burst_link.c, for the helper: the descriptor to wait on, -1 = none; what came on it, between driver_enter and driver_leave; and what has
 * changed since it was stated. */
int burst_link_try(void);
void burst_link_read(void);
void burst_link_state(void);
void burst_link_discard(void); /* once a second: what the program freed while it is away */
bool burst_link_send(enum wire_type type, uint32_t seq, const void *body, uint32_t body_bytes, const int *fd, unsigned fds);
void burst_link_forget(void); /* in a forked child */

/* Any thread, without locks. Have the limits of that GPU come? Waits until a second after elastic memory was first needed in this process. */
bool burst_limits_came(struct gpu *gpu);
bool burst_is_allowed(struct gpu *gpu);                       /* the container may have more than its guarantee */
void burst_guaranteed(struct gpu *gpu, uint64_t limit_bytes); /* WELCOME of the memory connection */

/* burst_orders.c, for the helper: carries one order out, and answers it. False: the connection is over. */
bool burst_order(const struct wire_packet *packet, struct gpu *gpu);
void burst_orders_end(void); /* whatever was chosen stays: the arbiter is gone, or this process runs again */

#endif
