/* passing.h - memory that another process of the pod has: its descriptors come through the arbiter, and those of this process's memory leave
 * through it. process.h includes this. */
#ifndef TANGRAM_PASSING_H
#define TANGRAM_PASSING_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "link/link.h"
#include "link/wire.h"

struct gpu;

/* What OPEN brought. */
struct passed_blocks {
    struct gpu *gpu;
    uint64_t bytes; /* of all blocks */
    uint32_t total, came;
    int *fd;               /* of each that came; -1 = closed */
    uint64_t *block_bytes;
    enum wire_unopened_reason reason; /* 0: it came */
};

struct passing {
    pthread_mutex_t opening, exporting; /* one OPEN, one export that is prepared at a time; locked before link.lock, and during the wait */
    struct awaited open;                /* under link.lock, and what follows */
    struct passed_blocks *into;
};
#define PASSING_NEVER_MET {.opening = PTHREAD_MUTEX_INITIALIZER, .exporting = PTHREAD_MUTEX_INITIALIZER}

bool passing_is_understood(void); /* by the arbiter; connects to it, if need be */
/* The blocks of an emulated handle. False: `reason` says why. They are to be freed either way. Waits for two seconds at most. */
bool passing_open(const void *handle, struct passed_blocks *out);
void passed_blocks_free(struct passed_blocks *blocks); /* closes what is open */
/* So many bytes of the elastic lease become resident. */
enum link_answer passing_convert(struct gpu *gpu, uint64_t bytes);
const char *passing_reason_text(enum wire_unopened_reason reason);

/* Not locked, by the thread that reads. */
void passing_came(uint32_t seq, const struct wire_exported *exported, struct wire_passed *passed);
void passing_answer(uint32_t seq, const struct wire_exported *exported, const int *fd); /* to EXPORT */
void passing_forget(void); /* in a forked child */

#endif
