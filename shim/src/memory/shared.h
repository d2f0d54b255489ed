/* shared.h - memory that this process shares with others of its container: what of it the arbiter is told. */
#ifndef TANGRAM_HOLDS_H
#define TANGRAM_HOLDS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "link/wire.h"

struct gpu;
struct owned;

struct hold {
    struct hold *next; /* newer */
    uint64_t at;       /* the key in the table of what it was made from, or opened as */
    struct gpu *gpu;
    bool ended; /* made, and freed while the arbiter was away: not told yet */
    struct wire_shared said;
};

struct holds { /* guarded by link.lock */
    struct hold *first;
    _Atomic unsigned count;
};

/* A name was given out for memory that the lease pays for. */
void hold_made(struct gpu *gpu, enum wire_space space, uint64_t at, uint64_t bytes, const void *key);

/* Somebody's memory was opened. False: it does not fit. It is paid by who made it, by the container once, or, while the arbiter is
 * away, by this process's lease. */
bool hold_opened(struct gpu *gpu, enum wire_space space, uint64_t at, uint64_t bytes, const void *key);

/* Memory is gone: its bytes go back to the lease, or to the arbiter where others may have it. */
void hold_or_give_back(const struct owned *was);
/* Its name is void; what paid for it goes on paying. */
void hold_end(uint64_t at);

bool holds_restate(struct gpu *gpu); /* locked: on a new connection, after use was stated */
void holds_forget_all(void);

#endif
