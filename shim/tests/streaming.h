/* streaming.h - for unit_pooled.c: a driver with streams whose work ends when the test says so, events that stand behind it, pools without memory, and
 * blocks. */
#ifndef TANGRAM_TEST_STREAMING_H
#define TANGRAM_TEST_STREAMING_H

#include <pthread.h>

#include "../src/hooks/hook.h"
#include "../src/memory/memory.h"
#include "../src/memory/pool.h"

enum { STREAMS = 5, REFUSED = 999 };
#define POOL ((CUmemoryPool)0x1000)
#define OTHER_POOL ((CUmemoryPool)0x2000)
#define CONTEXT ((CUcontext)0x7000)

struct work { /* of one stream */
    unsigned long long id;
    uint64_t queued, ended;      /* so many launches */
    uint64_t after[STREAMS + 1]; /* by id's place: what of other streams came before all that is queued from now on */
};
struct recorded {
    unsigned stream;
    uint64_t queued;
};

struct streaming {
    pthread_mutex_t lock;
    struct work stream[STREAMS + 1]; /* the last one is the per-thread default stream */
    struct recorded event[100000];
    unsigned events;
    uint64_t next, pages; /* addresses and blocks that there are */
    unsigned fails;       /* one call in so many; 0 = none */
    unsigned seed;
    cuuint64_t threshold;
    int opportunistic, internal;
    unsigned waited, served, refused;
};
extern struct streaming fake;

unsigned draw(unsigned below);
CUstream stream_at(unsigned place);
void ends(unsigned place, uint64_t ended); /* so much of the stream's work has ended, and what it waited for before that */
CUresult all_end(void);
void streaming_begin(void); /* the library's driver is this one */

#endif
