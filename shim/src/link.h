/* link.h - the connection to the arbiter: what is kept of it, and what its files offer each other and the rest.
 *
 * link.c connects, ask.c asks; reader.c is the thread that reads from then on. process.h includes this.
 */
#ifndef TANGRAM_LINK_H
#define TANGRAM_LINK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "wire.h"

struct card;

/* A packet whose answer a thread waits for. */
struct awaited {
    uint32_t seq; /* 0 = none */
    bool answered;
};

struct link {
    pthread_mutex_t listing, holding; /* one question of a kind at a time; taken before `lock`, and held while one waits */
    pthread_mutex_t lock;             /* guards what follows, and every send */
    pthread_cond_t changed;
    bool clocked;   /* `changed` is set up */
    bool begun;     /* somebody met the arbiter, or tries to */
    bool meeting;   /* a thread that asks is doing so */
    bool threaded;  /* the reader thread was made */
    bool reading;   /* and reads from now on */
    bool pumping;   /* a thread that waits for an answer reads in its place */
    bool connected; /* WELCOME was read */
    int fd;
    int greeted;         /* a connection on which HELLO was said and WELCOME not read; -1 = none */
    uint64_t promised_bytes;    /* what the arbiter keeps for a context on its first card; 0 = nothing */
    uint64_t promised_until_ms; /* so long we rely on it; monotonic */
    uint64_t lost_at_ms; /* since when the arbiter is away; monotonic */
    uint32_t seq;
    _Atomic uint32_t given_seq; /* of the RETURN or DROP that was said last; 0 = it is answered */
    _Atomic uint32_t gives;     /* RETURNs that were begun: who counts what is free looks whether one came between */
    struct awaited lease, context, measured, processes, hold;
    struct wire_leased lease_answer, context_answer, hold_answer;
    struct wire_process *listed; /* where the process list goes that is waited for */
    uint32_t listed_room, listed_count;
    struct wire_packet packet;              /* of whoever reads: one at a time */
    const _Atomic uint64_t *_Atomic page; /* bytes of the container's limit that no process holds, per wire card */
};

#define LINK_NEVER_MET                                                                                                         \
    {                                                                                                                          \
        .listing = PTHREAD_MUTEX_INITIALIZER, .holding = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1, \
        .greeted = -1                                                                                                          \
    }

/* Of the sequence numbers the library makes, those of CONTEXT, HOLD, and of RETURN and DROP: its answer is no lease, however late it comes.
 * The top bit is the arbiter's own. */
#define WIRE_SEQ_CONTEXT UINT32_C(0x40000000)
#define WIRE_SEQ_HOLD UINT32_C(0x20000000)
#define WIRE_SEQ_GIVEN UINT32_C(0x10000000)

/* link.c */
void link_greet(void); /* says HELLO and waits for nothing */
bool link_wait(void);  /* until connected, for a bounded time */
void link_forget(void); /* in a forked child */

/* ask.c */
enum link_answer { LINK_GRANTED, LINK_REFUSED, LINK_ABSENT };
enum link_answer link_ask(struct card *card, uint64_t need_bytes, uint64_t want_bytes);
void link_return(struct card *card, uint64_t most_bytes); /* of the unused lease, to the arbiter */
void link_settle(struct card *card); /* waits for a lease that was asked for ahead, and until the page shows what was given back */
bool link_unleased(struct card *card, uint64_t *bytes);
enum link_answer link_context_begin(struct card *card, bool *estimated);
void link_context_end(struct card *card, enum wire_step step, bool wait);
bool link_processes(struct card *card, struct wire_process *out, uint32_t room, uint32_t *count);
enum link_answer link_hold(struct card *card, struct wire_shared *said); /* locked afterwards when it is granted */

/* Between link.c, ask.c and reader.c. "Locked" = the caller holds link.lock. */
uint32_t link_next_seq(void);         /* locked */
bool link_say(enum wire_type type, const void *body, uint32_t body_bytes); /* locked, connected */
bool link_say_context(struct card *card, enum wire_step step, uint32_t seq); /* locked, connected */
bool link_drop(const struct wire_shared *said); /* locked, connected */
bool link_connected_in_time(void);    /* locked */
bool link_reader_needed(void);        /* locked */
void link_wait_until(uint64_t deadline_ms); /* locked */
void link_pump(uint64_t deadline_ms); /* locked */
bool link_meet(int patience_ms);      /* not locked */
bool link_readable(int fd, int ms);   /* not locked */
bool link_handle(const struct wire_packet *packet); /* not locked; false: the connection is over */
void link_lost(void);                 /* locked */
bool link_state_use(struct card *card); /* locked */
bool reader_start(void);              /* locked */

#endif
