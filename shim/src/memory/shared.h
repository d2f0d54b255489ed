/* shared.h - memory that this process shares with others of its container: what of it is reported to the arbiter. */
#ifndef TANGRAM_SHARED_H
#define TANGRAM_SHARED_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "link/wire.h"

struct gpu;
struct owned;

struct shared_block {
    struct shared_block *next; /* newer */
    uint64_t at;               /* the key in the table of what it was made from, or opened as */
    struct gpu *gpu;
    bool ended; /* made, and freed while the arbiter was away: not reported yet */
    struct wire_shared message;
};

struct shared_blocks { /* guarded by link.lock */
    struct shared_block *first;
    _Atomic unsigned count;
};

/* A name was exported for memory that is charged to the lease. */
void shared_made(struct gpu *gpu, enum wire_space space, uint64_t at, uint64_t bytes, const void *key);

/* Memory of another process was opened. False: it does not fit. It is charged to the process that made it, to the container once, or, while the arbiter is
 * away, to this process's lease. */
bool shared_opened(struct gpu *gpu, enum wire_space space, uint64_t at, uint64_t bytes, const void *key);

/* Memory is gone: its bytes return to the lease, or to the arbiter where others may have it. */
void shared_end_or_give_back(const struct owned *was);
/* Its name is void; the memory stays charged where it was. */
void shared_end(uint64_t at);

bool shared_restate(struct gpu *gpu); /* locked: on a new connection, after use was stated */
void shared_forget_all(void);

#endif
