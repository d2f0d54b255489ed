/* link.h - the connection to the arbiter: what is kept of it, and what its files offer each other and the rest.
 *
 * packet.c sends and receives one packet, link.c connects and reads, request.c requests, answers.c takes what comes. helper.c is the thread
 * that reads while no request waits, and nothing depends on it: a thread that waits for an answer reads itself where there is no helper.
 * process.h includes this.
 */
#ifndef TANGRAM_LINK_H
#define TANGRAM_LINK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>

#include "link/wire.h"

struct gpu;

/* The socket's file that one arbiter listens at: each makes its own. */
struct wire_file {
    dev_t device;
    ino_t inode; /* 0 = not known */
    struct timespec made;
};

/* Our end of a socket. The program may close its number and reuse it: device and inode show whether it is still ours. */
struct wire_end {
    int fd;    /* -1 = none */
    pid_t pid; /* that connected it */
    dev_t device;
    ino_t inode;
    struct wire_file file; /* that it was connected to */
};
#define WIRE_NO_END ((struct wire_end){.fd = -1})

/* A connection that ended, and where it led. */
struct wire_past {
    struct wire_file file;
    uint64_t ended_ms; /* 0 = there was none */
};

/* Sockets for when none can be made: one for each connection. The last is that for bursts, which most processes do not have. */
enum { RESERVE_SOCKETS = 3 };
struct spare_sockets {
    pthread_mutex_t lock; /* the innermost */
    struct wire_end spare[RESERVE_SOCKETS];
};
#define SPARE_SOCKETS_EMPTY {.lock = PTHREAD_MUTEX_INITIALIZER, .spare = {{.fd = -1}, {.fd = -1}, {.fd = -1}}}

/* A packet whose answer a thread waits for. */
struct awaited {
    uint32_t seq; /* 0 = none */
    bool answered;
    uint64_t pending_ms; /* when the arbiter last answered that it waits for memory of other containers; 0 = never */
    uint64_t since_ms;   /* since when the caller has waited for such memory, with earlier requests; 0 = since this one */
    bool overdue;        /* it reported that for longer than a request may wait: nothing is granted any more */
};

/* Descriptors that came with a packet. -1: it is taken. */
struct wire_passed {
    unsigned count;
    int fd[WIRE_PASSED_LIMIT];
};

enum link_stage {
    LINK_APART,     /* the arbiter is away, or was never connected */
    LINK_GREETED,   /* HELLO was sent */
    LINK_CONNECTED, /* WELCOME was read */
};

struct link {
    pthread_mutex_t listing, sharing; /* one query of a kind at a time; locked before `lock`, and during the wait */
    pthread_mutex_t lock;             /* guards what follows, and every send */
    pthread_cond_t changed;
    bool clocked;             /* `changed` is set up, and `wanted_ms` read */
    uint32_t wanted_ms;       /* how long the program wants to wait for an arbiter that is away; 0 = not set */
    bool threaded;            /* the helper thread was made */
    bool reading;             /* and reads from now on */
    bool pumping;             /* a thread that waits for an answer reads in its place */
    uint64_t thread_again_ms; /* after a thread could not be made, the next try is not before then */
    enum link_stage stage;
    uint32_t ended; /* connections that ended: a query on one is not answered on the next */
    struct wire_end end;
    struct wire_past past;
    uint64_t greeted_at_ms;     /* monotonic, as all that follow */
    bool ahead;                 /* HELLO was sent before a thread needed the answer, and none has waited for it yet */
    uint64_t lost_at_ms;        /* since when the arbiter is away; 0 = no request has found the loss yet */
    uint64_t again_ms;          /* not before then is it tried again */
    unsigned pause_ms;          /* between tries */
    bool rejected;              /* it answered HELLO with an ERROR: no request waits for it any more */
    _Atomic bool silent;        /* it is connected and has not answered in time: no thread waits until a packet comes */
    _Atomic bool measures_late; /* the same for a measure, which may take long: no thread waits for one until a packet comes */
    uint64_t promised_bytes;    /* what the arbiter reserves for a context on its first GPU; 0 = nothing */
    uint64_t promised_until_ms; /* the library relies on it until then */
    uint32_t seq;
    uint32_t states_reported;   /* as reported last; see state.c */
    _Atomic uint32_t given_seq; /* of the RETURN or DROP that was sent last; 0 = it is answered */
    _Atomic uint32_t gives;     /* RETURNs that were begun: a thread that counts free memory checks whether one came in between */
    struct awaited lease, context, measured, processes, hold, grow;
    struct wire_leased lease_answer, context_answer, shared_answer, grow_answer;
    struct wire_process *listed; /* where the process list goes that is waited for */
    uint32_t listed_capacity, listed_count;
    struct wire_packet packet;            /* of the thread that reads: one at a time */
    bool blind;                           /* there was no descriptor for the page: its contents are unknown */
    const _Atomic uint64_t *_Atomic page; /* bytes of the container's limit that no process leases, per wire GPU */
};

#define LINK_NEVER_MET                                                                                                         \
    {                                                                                                                          \
        .listing = PTHREAD_MUTEX_INITIALIZER, .sharing = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER,         \
        .end = {.fd = -1}                                                                                                      \
    }

/* Of the sequence numbers the library makes, those of CONTEXT, HOLD, GROW, and of RETURN and DROP: its answer is no lease, however late it comes.
 * The top bit is the arbiter's own. */
#define WIRE_SEQ_CONTEXT UINT32_C(0x40000000)
#define WIRE_SEQ_HOLD UINT32_C(0x20000000)
#define WIRE_SEQ_GIVEN UINT32_C(0x10000000)
#define WIRE_SEQ_GROW UINT32_C(0x08000000)
#define WIRE_SEQ_ELASTIC UINT32_C(0x04000000) /* of a LEASE of elastic memory: the answer does not state its kind */

/* spare_sockets.c */
void spare_sockets_fill(void);
bool spare_sockets_take(struct wire_end *end);
void spare_sockets_return(struct wire_end *end); /* one that could not be connected; closes what there is no place for */
void spare_sockets_forget(void);                    /* in a forked child */

/* packet.c */
bool wire_socket(struct wire_end *end); /* connected to nothing yet */
bool wire_has_descriptor(void);               /* is there a descriptor left? */
void *wire_map_page(void *at, int fd);  /* over the one before, if there is one; fd = -1: one that shows nothing. MAP_FAILED */
bool wire_connect(struct wire_end *end, const char *path, const struct wire_past *past); /* by a socket of spare_sockets.c, where none can be made */
struct wire_past wire_ended(struct wire_end *end); /* closes it */
bool wire_own(struct wire_end *end, int fd); /* a descriptor that was just made; false: there is none, and nothing is left open */
bool wire_is_there(const struct wire_end *end); /* in a forked child, too */
bool wire_is_ours(const struct wire_end *end);
void wire_close(struct wire_end *end); /* its number is closed only while it is this socket's */
void wire_hang_up(const struct wire_end *end); /* by any thread: the one that reads finds the connection ended */
bool wire_readable(const struct wire_end *end, uint64_t ms);
bool wire_send(const struct wire_end *end, enum wire_type type, uint32_t seq, const void *body, uint32_t body_bytes);
bool wire_send_fd(const struct wire_end *end, enum wire_type type, uint32_t seq, const void *body, uint32_t body_bytes, int passed_fd);
bool wire_send_fds(const struct wire_end *end, enum wire_type type, uint32_t seq, const void *body, uint32_t body_bytes, const int *passed_fd,
                   unsigned passed_fds); /* WIRE_BLOCKS_LIMIT at most */
bool wire_receive(const struct wire_end *end, struct wire_packet *packet, int *passed_fd);
bool wire_receive_all(const struct wire_end *end, struct wire_packet *packet, struct wire_passed *passed);
void wire_passed_close(struct wire_passed *passed); /* what is not taken */

/* root.c: for a program that changes its root */
bool root_keep(void);        /* by the helper: it keeps the root that it has. false: the kernel does not let it */
void root_keep_folder(void); /* of the socket, where no thread keeps the root; by the thread that connects */
bool root_connect(int fd);   /* to the arbiter's socket in the folder that is kept, where that is out of reach */
bool root_stat(struct stat *there); /* the same of its file */

/* link.c */
void link_greet(void);          /* sends HELLO and waits for nothing */
bool link_wait(void);           /* until connected, as long as an arbiter that is there may take */
void link_forget(void);         /* in a forked child */
void link_look_for_page(void);  /* by the thread that reads, now and then: connects anew where there is a descriptor for the page by now */
bool link_has_helper(void);     /* false: what is not needed is returned at once, for no thread would answer a recall */

/* request.c */
enum link_answer { LINK_GRANTED, LINK_REFUSED, LINK_ABSENT };
enum link_answer link_request(struct gpu *gpu, enum wire_lease_kind kind, uint64_t need_bytes, uint64_t want_bytes,
                              uint64_t *since_ms); /* by `now_ms`: since when the allocation has waited for memory of others; later by the time without an arbiter */
void link_return(struct gpu *gpu, enum wire_lease_kind kind, uint64_t most_bytes); /* of the unused lease, to the arbiter */
void link_return_used(struct gpu *gpu, enum wire_lease_kind kind, uint64_t bytes); /* of the lease in use: it is never unused here */
void link_return_all(struct gpu *gpu);                                            /* the unused lease of both kinds */
void link_settle(struct gpu *gpu); /* waits for a lease that was requested ahead, and until the page shows what was given back */
enum link_answer link_context_begin(struct gpu *gpu, bool *estimated);
void link_context_end(struct gpu *gpu, enum wire_step step, bool wait);
bool link_processes(struct gpu *gpu, struct wire_process *out, uint32_t capacity, uint32_t *count);
enum link_answer link_grow(struct gpu *gpu, uint64_t bytes, uint64_t spare_bytes); /* spare: of these, for calls to come */
void link_grown(struct gpu *gpu, uint64_t unneeded_bytes); /* locked */
enum link_answer link_shared(struct gpu *gpu, struct wire_shared *message); /* locked afterwards when it is granted */

/* Between link.c, request.c and helper.c. "Locked" = called with link.lock held. */
uint32_t link_next_seq(void);         /* locked */
bool link_send(enum wire_type type, const void *body, uint32_t body_bytes); /* locked, connected */
bool link_send_context(struct gpu *gpu, enum wire_step step, uint32_t seq); /* locked, connected */
bool link_give(enum wire_type type, const void *body, uint32_t body_bytes); /* locked, connected: what becomes free once it is answered */
bool link_drop(const struct wire_shared *message); /* locked, connected */
bool link_connected_in_time(void);    /* locked */
bool link_is_silent(void);            /* locked, connected */
void link_have_helper(void);          /* locked */
void link_wait_until(uint64_t deadline_ms); /* locked */
void link_pump(uint64_t deadline_ms); /* locked */
/* Locked on entry and exit: until a packet, a change or the deadline, for a slice at most. They return how much later than due this thread ran again. */
uint64_t link_wait_for_packet(uint64_t deadline_ms);
uint64_t link_wait_slice(uint64_t deadline_ms, void (*wait)(uint64_t until_ms));
bool link_try(void);                  /* locked, by the thread that reads; false: the arbiter is away */
void link_read(void);                 /* not locked, by the thread that reads, when there is something */
bool link_state_use(struct gpu *gpu); /* locked */

/* page.c */
uint32_t link_page_word(size_t at); /* of the 32-bit words of the arbiter's page; 0 before the first WELCOME */
bool link_unleased(struct gpu *gpu, uint64_t *bytes); /* what no process of the container leases. false: it is not known, as none has connected here */
uint64_t link_limit_bytes(struct gpu *gpu); /* of the container in all, also of a process that has no connection for bursts */

/* answers.c */
bool link_handle(const struct wire_packet *packet); /* not locked; false: the connection is over */
bool link_once_a_second(void); /* not locked; false: the connection is over */

bool helper_start(void);              /* helper.c; locked */

#endif
