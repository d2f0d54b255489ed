/* wire.h - the arbiter's protocol, version 1, as docs/reference/protocol.md describes it. vgpu/protocol/wire.py is the other side.
 *
 * SOCK_SEQPACKET: one packet is one message. Little-endian, no padding that is not named.
 */
#ifndef TANGRAM_WIRE_H
#define TANGRAM_WIRE_H

#include <stdatomic.h>
#include <stdint.h>

enum { WIRE_MAGIC = 0x52474e54, WIRE_VERSION = 1, WIRE_GPUS = 64, WIRE_PAGE_BYTES = 4096, WIRE_PROCESSES_LIMIT = 1024 };

enum wire_type {
    WIRE_HELLO = 1,
    WIRE_WELCOME = 2,
    WIRE_LEASE = 3,
    WIRE_LEASED = 4,
    WIRE_RETURN = 5,
    WIRE_RECALL = 6,
    WIRE_USAGE = 7,
    WIRE_ERROR = 8,
    WIRE_CONTEXT = 9,
    WIRE_MEASURED = 10,
    WIRE_PROCESSES = 11,
    WIRE_PROCESS_LIST = 12,
    WIRE_CHANNELS = 13,
    WIRE_ACTIVITY = 14,
    WIRE_HOLD = 15,
    WIRE_DROP = 16,
    WIRE_REPORT = 17,
    WIRE_BURST = 18,
    WIRE_SWAPPABLE = 19,
    WIRE_SWAP_OUT = 20,
    WIRE_BLOCKS = 21,
    WIRE_UNMAP = 22,
    WIRE_UNMAPPED = 23,
    WIRE_SWAP_IN = 24,
    WIRE_FILLED = 25,
    WIRE_CANCEL = 26,
    WIRE_UNABLE = 27,
    WIRE_PENDING = 28,
    WIRE_CONVERT = 29,
    WIRE_OPEN = 30,
    WIRE_EXPORT = 31,
    WIRE_EXPORTED = 32,
    WIRE_DISCARD = 33,
    WIRE_DISCARDED = 34
};

enum wire_hello_flags { WIRE_FOR_GPU_TIME = 1, WIRE_FOR_CONTEXT = 2, WIRE_FOR_BURST = 4 };

enum wire_lease_kind { WIRE_RESIDENT = 0, WIRE_ELASTIC = 1 }; /* elastic: memory in blocks that can be swapped out */

enum wire_activity {
    WIRE_WORK = 1,
    WIRE_IDLE = 2,
    WIRE_HINT = 3,
    WIRE_BEGIN_SECTION = 4,
    WIRE_END_SECTION = 5,
    WIRE_YIELD = 6,
    WIRE_END_YIELD = 7,
    WIRE_STILL = 8,
    WIRE_DRAINED = 9,
    WIRE_RESUMED = 10
};

enum {
    WIRE_KERNELS_ONLY = 1, /* bit of the value of WORK and STILL */
    WIRE_ABOUT_TO = 1,     /* of that of RESUMED */
    WIRE_LATE_SHIFT = 32   /* above it, of that of WORK: the microseconds by which it is late */
};

enum wire_held { WIRE_MADE = 1, WIRE_OPENED = 2, WIRE_STILL_OPEN = 3 };
enum wire_space { WIRE_IPC = 1, WIRE_POOL = 2 };

enum { WIRE_UNLISTED = 1, WIRE_FRESH = 2, WIRE_AWAY = 4, WIRE_CHANNELS_LIMIT = 64 };

enum { WIRE_BLOCKS_LIMIT = 64 };             /* of one packet */
#define WIRE_MORE_BLOCKS UINT32_C(0x80000000) /* bit of the count of BLOCKS: another packet follows */

/* Why the library cannot do what the arbiter ordered, in UNABLE. */
enum wire_unable_reason {
    WIRE_NO_ELASTIC_MEMORY = 1,
    WIRE_UNKNOWN_BLOCK = 2, /* the process has no such block in the state that the order needs */
    WIRE_NO_DESCRIPTOR = 3,
    WIRE_DRIVER = 4 /* the driver refused */
};

/* Elastic memory that another process opens: vgpu/protocol/passing_wire.py. */
enum { WIRE_HANDLE_BYTES = 64, WIRE_KEY_BYTES = 32, WIRE_PASSED_LIMIT = 64, WIRE_OPEN_BLOCKS_LIMIT = 1024 };
#define WIRE_HANDLE_MAGIC "TNGRIPC\1"

/* Why an emulated handle is not opened, in EXPORTED. */
enum wire_unopened_reason {
    WIRE_UNKNOWN = 1, /* no process of the pod has such memory */
    WIRE_NO_ANSWER = 2,
    WIRE_OUT_OF_DESCRIPTORS = 3,
    WIRE_DRIVER_REFUSED = 4,
    WIRE_BUSY = 5,
    WIRE_NO_GPU = 6 /* it is on a GPU that this container does not have */
};

/* What a process cannot enforce, in REPORT. */
enum wire_reason {
    WIRE_NO_THREAD = 1,        /* no helper thread: its GPU work cannot be suspended, for it could not resume itself */
    WIRE_NO_CHANNELS = 2,      /* the kernel driver's requests are not understood */
    WIRE_GRAPHICS = 3,         /* memory of a graphics API is on the GPU */
    WIRE_UNKNOWN_FUNCTION = 4, /* the driver has a newer form of a function that allocates memory or launches, or lacks one that reports memory */
    WIRE_UNLISTED_CHANNELS = 5,
    WIRE_NO_UUID = 6,         /* a channel whose GPU the driver does not name */
    WIRE_NO_PAGE = 7,         /* no descriptor was left for the arbiter's page: launches do not wait at its gate */
    WIRE_REASONS = 8
};

enum wire_step { WIRE_BEGIN = 1, WIRE_DONE = 2, WIRE_GONE = 3, WIRE_GROW = 4, WIRE_GROWN = 5 };

struct wire_header {
    uint32_t magic;
    uint16_t version, type;
    uint32_t seq, body_bytes;
};

struct wire_hello {
    uint32_t pid, flags;
    char library_version[32];
};

struct wire_gpu {
    uint8_t uuid[16];
    uint64_t limit_bytes;
    uint32_t core_percent, service_class;
};

struct wire_welcome {
    uint32_t gpus, promised_mib; /* for a context on the first GPU */
    struct wire_gpu gpu[WIRE_GPUS];
};

enum { WIRE_WAITED_SHIFT = 8, WIRE_WAITED_MOST_MS = 16777215 };

struct wire_lease {
    uint32_t gpu, kind; /* with the time that the allocation has waited before, in ms, above WIRE_WAITED_SHIFT */
    uint64_t need_bytes, want_bytes;
};

enum wire_refused { WIRE_GRANTED = 0, WIRE_BY_LIMIT = 1, WIRE_BY_POOL = 2, WIRE_BY_GPU = 3 /* the last two can never be granted */ };

struct wire_leased {
    uint32_t gpu, refused; /* enum wire_refused */
    uint64_t granted_bytes /* refused by pool or GPU: the size of that */, unleased_bytes;
};

struct wire_amount { /* RETURN, RECALL, SWAP_OUT and PENDING */
    uint32_t gpu, kind; /* of RETURN: enum wire_lease_kind; else 0 */
    uint64_t bytes;
};

struct wire_usage {
    uint32_t gpu, managed_mib; /* of what is used, memory that NVML lists for no process, rounded up; 0 from a library that does not count it */
    uint64_t used_bytes, leased_bytes;
};

struct wire_error {
    uint32_t code;
    char text[124];
};

struct wire_context {
    uint32_t gpu, step;
    uint64_t estimate_bytes;
};

struct wire_measured {
    uint32_t gpu, known;
    uint64_t context_bytes, unleased_bytes;
};

struct wire_gpu_only { /* PROCESSES and CANCEL */
    uint32_t gpu, pad;
};

struct wire_shared { /* HOLD and DROP */
    uint32_t gpu, held, space, pad;
    uint64_t bytes;
    uint8_t key[64];
};

struct wire_process {
    uint32_t pid, pad;
    uint64_t used_bytes;
};

struct wire_process_list {
    uint32_t gpu, count;
    struct wire_process process[WIRE_PROCESSES_LIMIT];
};

struct wire_channels { /* of one client of the kernel driver on one GPU; its descriptor comes along while there are any */
    uint32_t gpu, client, subdevice, computes, copies, flags;
    uint32_t compute[WIRE_CHANNELS_LIMIT], copy[WIRE_CHANNELS_LIMIT];
};

struct wire_work {
    uint32_t what, pad;
    uint64_t value;
};

struct wire_report {
    uint32_t reason, active; /* enum wire_reason; 1 = it began, 0 = it ended */
};

struct wire_burst {
    uint32_t gpu, pad;
    uint64_t guarantee_bytes, limit_bytes; /* in all; limit = guarantee: no burst */
};

struct wire_swappable {
    uint32_t gpu, reason; /* 0 = its elastic memory can be swapped */
    uint64_t elastic_bytes, away_bytes;
};

struct wire_block {
    uint64_t id, bytes;
};

struct wire_blocks { /* a descriptor of each comes along, in this order */
    uint32_t gpu, count;
    struct wire_block block[WIRE_BLOCKS_LIMIT]; /* only `count` of them are sent */
};

struct wire_ids { /* UNMAP, UNMAPPED, SWAP_IN, FILLED, DISCARD, DISCARDED */
    uint32_t gpu, count;
    uint64_t id[WIRE_BLOCKS_LIMIT];
};

struct wire_handle { /* OPEN, EXPORT */
    uint8_t bytes[WIRE_HANDLE_BYTES];
};

struct wire_exported { /* a descriptor of each block comes along, in this order */
    uint32_t gpu, count;
    uint32_t reason; /* enum wire_unopened_reason, where count is 0 */
    uint32_t first, total, pad; /* blocks that came before, and in all */
    uint64_t bytes;             /* of all blocks together */
    uint64_t block_bytes[WIRE_PASSED_LIMIT];
};

struct wire_unable { /* UNABLE */
    uint32_t gpu, reason;  /* enum wire_unable */
};

/* The arbiter's state of a container's GPU time, and its own, in the page, WIRE_GPU_TIME_AT bytes from its start. */
enum {
    WIRE_GPU_TIME_AT = 1024,
    WIRE_UNDERSTANDS_REPORT = 1,
    WIRE_UNDERSTANDS_GROW = 2,
    WIRE_UNDERSTANDS_STILL = 4,
    WIRE_UNDERSTANDS_DRAINED = 8,
    WIRE_UNDERSTANDS_RESUMED = 16,
    WIRE_UNDERSTANDS_BURST = 32,
    WIRE_UNDERSTANDS_OPEN = 64,
    WIRE_SHOWS_LIMITS = 128, /* WIRE_LIMITS_AT is filled in */
    WIRE_UNDERSTANDS_DISCARD = 256,
    WIRE_UNDERSTANDS_WAITED = 512
};

/* Of each GPU the limit that is in effect for the container in all: what BURST states, also for a process without that connection. */
enum { WIRE_LIMITS_AT = 2048 };
struct wire_gpu_time {
    _Atomic uint64_t beat_ms;  /* changes while the arbiter runs: CLOCK_MONOTONIC, of its time namespace; 0 = no beat yet */
    _Atomic uint32_t off;      /* the container is suspended */
    _Atomic uint32_t gate;     /* new work is to wait */
    _Atomic uint32_t features; /* of this arbiter; 0 from one that is older than this field */
    _Atomic uint32_t wait_ms;  /* how long a process waits for an arbiter that is away; 0 = the library decides */
};

struct wire_packet {
    struct wire_header header;
    union {
        struct wire_hello hello;
        struct wire_welcome welcome;
        struct wire_lease lease;
        struct wire_leased leased;
        struct wire_amount amount;
        struct wire_usage usage;
        struct wire_error error;
        struct wire_context context;
        struct wire_measured measured;
        struct wire_gpu_only gpu_only;
        struct wire_process_list process_list;
        struct wire_burst burst;
        struct wire_ids ids;
        struct wire_handle handle;
        struct wire_exported exported;
    } body;
};

_Static_assert(sizeof(struct wire_header) == 16, "header");
_Static_assert(sizeof(struct wire_hello) == 40, "HELLO");
_Static_assert(sizeof(struct wire_gpu) == 32, "GPU of WELCOME");
_Static_assert(sizeof(struct wire_lease) == 24, "LEASE");
_Static_assert(sizeof(struct wire_leased) == 24, "LEASED");
_Static_assert(sizeof(struct wire_amount) == 16, "RETURN, RECALL");
_Static_assert(sizeof(struct wire_usage) == 24, "USAGE");
_Static_assert(sizeof(struct wire_error) == 128, "ERROR");
_Static_assert(sizeof(struct wire_context) == 16, "CONTEXT");
_Static_assert(sizeof(struct wire_measured) == 24, "MEASURED");
_Static_assert(sizeof(struct wire_gpu_only) == 8, "PROCESSES");
_Static_assert(sizeof(struct wire_shared) == 88, "HOLD, DROP");
_Static_assert(sizeof(struct wire_channels) == 536 && sizeof(struct wire_work) == 16, "CHANNELS, ACTIVITY");
_Static_assert(sizeof(struct wire_gpu_time) == 24 && sizeof(struct wire_report) == 8, "GPU time of the page, REPORT");
_Static_assert(sizeof(struct wire_process) == 16, "process of PROCESS_LIST");
_Static_assert(sizeof(struct wire_burst) == 24 && sizeof(struct wire_swappable) == 24, "BURST, SWAPPABLE");
_Static_assert(sizeof(struct wire_blocks) == 1032 && sizeof(struct wire_ids) == 520, "BLOCKS, UNMAP");
_Static_assert(sizeof(struct wire_unable) == 8, "UNABLE");
_Static_assert(sizeof(struct wire_handle) == 64 && sizeof(struct wire_exported) == 544, "OPEN, EXPORT, EXPORTED");

#endif
