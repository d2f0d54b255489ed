/* protocol.h - between the arbiter and the copier, version 1, as docs/reference/copier.md describes it. vgpu/protocol/copier.py is the other side.
 *
 * SOCK_SEQPACKET: one packet is one message, a header and a body whose size its type fixes. Little-endian, no padding that is not named.
 */
#ifndef TANGRAM_COPIER_PROTOCOL_H
#define TANGRAM_COPIER_PROTOCOL_H

#include <stdint.h>

enum {
    COPIER_MAGIC = 0x43474e54, /* "TNGC" */
    COPIER_VERSION = 1,
    COPIER_JOBS = 128,        /* that are not answered, of both directions together. Guessed: 5 ms of copying in blocks of 2 MiB */
    COPIER_GRAIN = 0x200000,  /* slots and blocks are multiples of it: the GPU's page, and the huge page of the host */
    COPIER_LIMIT_SHIFT = 44,  /* a block has at most 16 TiB */
    COPIER_PACKET_LIMIT = 256 /* no packet is longer */
};

enum copier_type {
    COPIER_SAVE = 1,
    COPIER_RESTORE = 2,
    COPIER_FORGET = 3,
    COPIER_STATUS = 4,
    COPIER_DONE = 5,
    COPIER_STATE = 6,
    COPIER_ERROR = 7
};

/* How a job ended, in DONE. All but COPIER_COPIED, COPIER_FORGOTTEN and COPIER_DRIVER_FAILED: nothing was begun, and nothing changed. */
enum copier_result {
    COPIER_COPIED = 0,
    COPIER_BAD_SLOT = 1,      /* not inside the pool, or no multiple of COPIER_GRAIN */
    COPIER_BAD_SIZE = 2,      /* 0, above 16 TiB, or no multiple of COPIER_GRAIN */
    COPIER_NO_DESCRIPTOR = 3, /* there must be exactly one */
    COPIER_TOO_MANY_JOBS = 4, /* COPIER_JOBS are not answered yet */
    COPIER_NOT_READY = 5,     /* the pool is not registered yet */
    COPIER_SLOT_IN_USE = 6,   /* a job that is not answered has part of that slot, also one of an earlier connection */
    COPIER_FORGOTTEN = 7,     /* by FORGET: what it was to fill has old or new content, or some of both */
    COPIER_DRIVER_FAILED = 8, /* likewise; cuda_error says how */
    COPIER_ENDING = 9         /* the copier ends after the jobs that it has */
};

/* Why a packet or a connection is rejected, in ERROR. */
enum copier_reason {
    COPIER_BAD_PACKET = 1, /* the packet changed nothing, and the connection stays */
    COPIER_OCCUPIED = 2,   /* another connection is served; this one ends */
    COPIER_NOT_ALLOWED = 3 /* the peer is neither root nor the copier's own user; the connection ends */
};

/* What the pool consists of. */
enum copier_pages { COPIER_NO_PAGES = 0, COPIER_PLAIN_PAGES = 1, COPIER_TRANSPARENT_PAGES = 2, COPIER_HUGETLB_PAGES = 3 };

struct copier_header {
    uint32_t magic;
    uint16_t version, type;
    uint32_t body_bytes, pad;
};

struct copier_job { /* SAVE and RESTORE, each with the descriptor of its block */
    uint64_t job, slot_offset, bytes;
};

struct copier_forget {
    uint64_t job;
};

struct copier_done {
    uint64_t job;
    uint32_t result, cuda_error;
    uint64_t copied_bytes, microseconds; /* from its import to its release */
};

struct copier_state {
    uint64_t pool_bytes, allocated_bytes, registered_bytes;
    uint32_t context_mib; /* of the copier's own on the GPU; 0 = not known */
    uint32_t ready, pages, jobs;
    /* which file the pool is: another one has none of what was saved. 0 = none yet, or (born_ns) not known */
    uint64_t file_system, inode, born_ns;
};

struct copier_error {
    uint32_t reason;
    char text[124];
};

_Static_assert(sizeof(struct copier_header) == 16 && sizeof(struct copier_job) == 24 && sizeof(struct copier_forget) == 8, "requests");
_Static_assert(sizeof(struct copier_done) == 32 && sizeof(struct copier_state) == 64 && sizeof(struct copier_error) == 128, "answers");

#endif
