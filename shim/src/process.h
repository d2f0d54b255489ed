/* process.h - everything the library keeps in a process: one struct, `tangram`.
 *
 * When the library is loaded it notes what the program may change before it is first needed, and sets nothing up. The driver's functions
 * are found at the first call of a hook, the grant is read when a hook first looks up which GPU is meant, and the connection to the arbiter
 * begins when memory is first requested.
 *
 * Locks are held for short steps of our own and never while the driver is called, but for that of memory of cuMemCreate (elastic/created.h).
 * While several are held they are taken in the order of lock_rank (order.c), which a library built with -DTANGRAM_LOCK_ORDER checks at every
 * step: the sanitizers' builds are.
 */
#ifndef TANGRAM_PROCESS_H
#define TANGRAM_PROCESS_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "order.h"
#include "gputime/activity.h"
#include "gputime/capture.h"
#include "memory/bound.h"
#include "memory/context.h"
#include "elastic/elastic.h"
#include "memory/shared.h"
#include "link/link.h"
#include "link/burst_link.h"
#include "link/passing.h"
#include "views/management.h"
#include "memory/pages.h"
#include "gputime/time_link.h"
#include "gputime/warm.h"
#include "link/wire.h"

#define EXPORT __attribute__((visibility("default")))
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)

enum { GPUS_LIMIT = WIRE_GPUS, DEVICES_LIMIT = 64, SHARDS = 64 };

#define MIB ((uint64_t)1 << 20)

/* Kinds of trouble; each is written to stderr by itself. */
enum warning {
    WARN_GRANT,
    WARN_AWAY,
    WARN_SHARED_AWAY,
    WARN_REJECTED,
    WARN_NO_THREAD,
    WARN_NEWER_FUNCTION,
    WARN_LACKS_FUNCTION,
    WARN_NO_UUID,
    WARN_NO_CHANNELS,
    WARN_GRAPHICS,
    WARN_BURST,
    WARN_UNSWAPPABLE,
    WARN_POOL_STAYS,
    WARN_ELASTIC_IPC,
    WARN_CREATED_STAYS,
    WARN_NOT_OPENED,
    WARN_CEILING,
    WARNINGS
};

/* A GPU that the grant names. `closed` is the one that stands for every GPU when the grant cannot be read. */
struct gpu {
    uint8_t uuid[16];
    bool closed;
    unsigned at;                     /* index in tangram.grant.gpu */
    uint64_t guarantee_bytes;        /* as the grant states it */
    _Atomic uint64_t limit_bytes;    /* of the container, in all */
    _Atomic uint64_t resident_limit_bytes; /* of it memory that stays on the GPU: the guarantee, as the arbiter stated it last */
    _Atomic bool bursts;             /* the file `burst` names it: burst.c */
    _Atomic bool limits_came;        /* BURST: the limits above are the arbiter's. burst_link.c */
    _Atomic uint64_t unused_bytes;   /* resident memory: leased by this process, not allocated */
    _Atomic uint64_t leased_bytes;   /* leased by this process */
    _Atomic uint64_t discarding_bytes; /* elastic memory that was freed while it was away: leased until the arbiter has answered. elastic/discard.c */
    _Atomic uint64_t elastic_unused_bytes, elastic_leased_bytes; /* the same of elastic memory, whose lease no resident memory uses */
    _Atomic int wire;                /* the arbiter's index of this GPU; -1 before WELCOME or when it has none */
    _Atomic uint64_t managed_bytes;  /* of what is charged to it: managed memory, which NVML lists for no process */
    _Atomic uint64_t stated_bytes;   /* use as last reported to the arbiter */
    _Atomic uint32_t stated_managed_mib;
    _Atomic uint64_t elastic_bytes;  /* of blocks; of them: */
    _Atomic uint64_t kept_bytes;     /* in regions without a live request */
    _Atomic uint64_t kept_least_bytes; /* the least that was kept since it was last looked at */
    _Atomic uint64_t away_bytes;     /* whose content is in the host pool */
    _Atomic uint64_t ceiling_bytes;  /* the host pool's size, or the GPU's, if the last lease was refused because that can never give so much */
    _Atomic uint32_t ceiling_by;     /* enum wire_refused */
    _Atomic bool calls_heap;         /* a module that calls printf or malloc was loaded: what that takes is taken. module.c */
};

/* Specified: docs/reference/protocol.md. */
enum { GRANT_MIB_LIMIT = 16777215, GRANT_PERCENT_LIMIT = 100 };

enum grant_state { GRANT_UNREAD, GRANT_NONE, GRANT_GOOD, GRANT_BAD };

struct grant {
    _Atomic int state; /* enum grant_state */
    bool clear;        /* zero memory before the program has it */
    unsigned gpus;
    struct gpu gpu[GPUS_LIMIT];
    struct gpu closed;
    char socket[256]; /* path of the arbiter's socket */
    _Atomic uint32_t pending_most_ms; /* so long a request waits for other containers; 0 = no file `burst` was read. burst.c */
};

/* Something that owns device memory. Plain memory is known by its pointer, other things by OWNED_AS of their handle. */
struct owned {
    uint64_t at;
    uint64_t bytes; /* charged; of linear memory that shares a page, its size, | OWNED_MANAGED; of an array that does, its place | PLACED */
    struct gpu *gpu;
    void *of; /* plain memory: NULL; stream-ordered memory: its pool, which pays; others: see the file that owns them */
};
enum owned_kind {
    OWNED_ARRAY = 1, OWNED_MIPMAP, OWNED_EXTERNAL, OWNED_IPC, OWNED_GRAPH, OWNED_TILES, OWNED_STACK, OWNED_HEAP, OWNED_FUNCTION, OWNED_MODULE,
    OWNED_LIBRARY, OWNED_CODE, OWNED_LATE, OWNED_VARIABLES, OWNED_THERE, OWNED_USED,
    OWNED_ELASTIC /* freed in a stream's order: late.c */
};
#define OWNED_AS(kind, handle) ((uint64_t)(handle) ^ (uint64_t)(kind) << 59) /* above the 57 bits of any address */

#define OWNED_HANDLE(at) ((at) & (((uint64_t)1 << 59) - 1))

struct owned_list { /* of the table */
    struct owned *entry;
    size_t count, capacity;
};

#define PLACED ((uint64_t)1)
#define OWNED_MANAGED ((uint64_t)1 << 63) /* beside the size of linear memory: above any size */

struct slot {
    struct owned owned; /* .at 0: empty */
    uint64_t buffer;    /* the driver's number of this memory, which it uses once; 0 = it was not queried */
    uint64_t serial;    /* within the shard: of two entries under one key the later one's is higher */
};

struct shard {
    struct lock lock;
    struct slot *slot;
    size_t slots, used;
    bool unnumbered;         /* there may be entries whose number was not queried */
    _Atomic uint64_t serial; /* of the entry that was made last */
} __attribute__((aligned(64)));

struct block; /* vmm.c */
struct mapping {
    uint64_t at, bytes;
    struct block *block;
};
struct handle {
    uint64_t handle, count;
    struct block *block;
};
struct vmm {
    pthread_mutex_t lock;
    struct handle *handle;
    size_t handles, handles_capacity;
    struct mapping *mapping; /* sorted by address */
    size_t mappings, mappings_capacity;
};

struct pool; /* pool.h */
struct late; /* late.c */

struct driver {
#define HOOK(name, base, since, ptds, params) CUresult(*name) params;
#define REAL(name, params) CUresult(*name) params;
#include "hooks/hooks.def"
};

struct management {
#define NVML(name, params) nvmlReturn_t(*name) params;
#define REAL_NVML(name, params) nvmlReturn_t(*name) params;
#include "hooks/hooks.def"
};

/* What a launch reads. A program of many small kernels has done other things since its last one: every cache line that is
 * no longer in the nearest cache costs tens of nanoseconds. So a launch reads nothing else, and nothing else here is written often. */
struct hot {
    _Atomic bool driver_found;
    _Atomic bool watched;             /* this process has channels: its work is counted from now on, also while the arbiter is away */
    _Atomic bool work_reported;       /* the last state that reached the arbiter is WORK */
    _Atomic bool noted;               /* a function needs more local memory than a new context provides, or a kernel is not loaded yet: code.c */
    _Atomic bool swapped;             /* memory is chosen to be swapped out, or away: calls wait. Written by the helper: burst_orders.c */
    _Atomic bool several_gpus;        /* this process may have elastic memory, and sees several GPUs: reasons.c */
    _Atomic bool several_contexts;    /* there was, or may be, another than the first; raised before that is made */
    _Atomic(struct wire_gpu_time *) page; /* the arbiter's state of this container; NULL before the first WELCOME */
};

struct tangram {
    struct hot hot;
    struct driver driver; /* begins with the launches, in the line of `hot` */
    pthread_mutex_t setup;
    _Atomic bool management_found, forks_watched;
    _Atomic pid_t pid;                    /* whose memory this is; 0 = not noted yet */
    _Atomic(_Atomic uint32_t *) unforked; /* a word that the kernel clears in the copy that a fork makes; NULL where it cannot */
    _Atomic uint32_t states;              /* a bit a reason: what cannot be enforced here. state.c */
    _Atomic uint64_t warned_ms[WARNINGS]; /* when each kind was written last; 0 = never. warn.c */
    const char *mount;                    /* where the grant was when the program started; NULL: nowhere */
    struct management management;
    struct grant grant;
    _Atomic(struct gpu *) device_gpu[DEVICES_LIMIT];   /* by the process's device number; NULL = not looked up yet */
    struct gpu unshared;                               /* marks a device that the grant does not name */
    struct shard shard[SHARDS];
    struct pages pages, array_pages, module_pages;
    struct link link;
    struct contexts contexts;
    pthread_mutex_t requesting;        /* one thread at a time requests a lease */
    pthread_mutex_t bounding;          /* or a bound on what a context may grow by */
    struct bound bounds[CONTEXT_GPUS]; /* by GPU->at */
    struct vmm vmm;
    struct elastic elastic;
    _Atomic(struct gpu *) only_gpu;   /* the GPU of the process's one device; NULL = not known, or several devices */
    _Atomic unsigned contexts_gone;   /* counts, so that threads drop their cached contexts */
    pthread_mutex_t pools_lock;
    _Atomic(struct pool *) pools; /* every pool that was seen; a list that only grows */
    _Atomic bool unsettled;       /* a pool or a late free may give something back at the next synchronisation */
    pthread_mutex_t late_lock;
    struct late *late;
    pthread_mutex_t stack_lock;
    _Atomic bool late_code;  /* an image is loaded whose code comes later: code.c */
    _Atomic unsigned graphs; /* executable graphs that allocate */
    struct shared_blocks shared;
    struct spare_sockets spare_sockets;
    struct wire_end socket_folder; /* root.c */
    struct capture capture;
    struct time_link time_link;
    struct burst_link burst_link;
    struct passing passing;
    struct activity activity;
    struct warm warm;
} __attribute__((aligned(64)));

extern struct tangram tangram;

#include "hooks/missing.h"

/* real.c: the driver's own functions. False when the driver cannot be found at all. */
bool driver_find(void);
static inline bool driver_ready(void)
{
    return !UNLIKELY(!atomic_load_explicit(&tangram.hot.driver_found, memory_order_acquire)) || driver_find();
}
bool management_ready(void);
void *real_dlsym(void *handle, const char *name);
bool is_driver_symbol(void *at, const char *library);

/* elf.c: the definition that follows ours, or the first of another object. */
void *next_definition(const char *name);
/* The loaded object in which an address lies; NULL on musl. */
struct link_map;
struct link_map *object_of(const void *at);
/* Is this the library of that name, in any version and any folder? Its DT_SONAME counts, too: the file may be a link or a copy. */
bool object_is(const struct link_map *object, const char *library);

/* hook.c: name or address of a real function -> our hook. The address is what the driver gave out for `symbol`. */
void *hook_for_name(const char *name);
void *hook_for_address(const char *symbol, void *at);
bool hook_has_base(const char *base);
bool hook_is_newer_form(const char *name); /* of a function that is hooked in other forms, by its own name */
void newer_form(const char *symbol);       /* reports one. procaddr.c */

/* grant.c */
enum grant_state grant_ready(void);
bool grant_read(const char *text, size_t length, struct grant *grant, char *why, size_t why_bytes);
bool uuid_parse(const char *text, size_t length, uint8_t uuid[16]);

/* gpu.c: the GPU that is meant, or NULL when the process's allocation there is none of our business. */
struct gpu *current_gpu(void);
struct gpu *gpu_of_device(CUdevice device);
void gpu_note_only(void); /* fills only_gpu, before the first allocation in a context */
struct gpu *gpu_of_location(const CUmemLocation *location);
struct gpu *gpu_of_uuid(const uint8_t uuid[16]);
bool device_of_location(const CUmemLocation *location, CUdevice *device); /* false: it is on none */
CUresult device_of_stream(CUstream stream, CUdevice *device);
bool is_drivers_answer(CUresult rc); /* to a query of the library: the program's own call fails with it, too */

/* lease.c */
static inline _Atomic uint64_t *unused_of(struct gpu *gpu, enum wire_lease_kind kind)
{
    return kind == WIRE_ELASTIC ? &gpu->elastic_unused_bytes : &gpu->unused_bytes;
}
static inline _Atomic uint64_t *leased_of(struct gpu *gpu, enum wire_lease_kind kind)
{
    return kind == WIRE_ELASTIC ? &gpu->elastic_leased_bytes : &gpu->leased_bytes;
}
uint64_t lease_unused_bytes(struct gpu *gpu); /* of both kinds */
uint64_t lease_leased_bytes(struct gpu *gpu);
uint64_t lease_limit_bytes(struct gpu *gpu, enum wire_lease_kind kind);
bool lease_reserve(struct gpu *gpu, uint64_t bytes); /* resident memory, as all that names no kind */
bool lease_reserve_as(struct gpu *gpu, enum wire_lease_kind kind, uint64_t bytes);
void lease_allocation_begin(void); /* what is requested until its end is for one allocation: it waits for others once in all. May be nested */
void lease_allocation_end(void);
/* convert.c. So many bytes of the elastic lease that are in use become resident. Waits for the arbiter, and perhaps until other memory was swapped out: call it
 * without locks. False: the guarantee has no room for them, or the arbiter does not answer; nothing is changed. */
bool lease_convert(struct gpu *gpu, uint64_t bytes);
bool lease_take(struct gpu *gpu, uint64_t bytes); /* without a request to the arbiter */
void lease_give_back(struct gpu *gpu, uint64_t bytes);
void lease_give_back_as(struct gpu *gpu, enum wire_lease_kind kind, uint64_t bytes);
uint64_t lease_take_unused(struct gpu *gpu, enum wire_lease_kind kind, uint64_t most_bytes);
uint64_t lease_surplus_bytes(struct gpu *gpu, enum wire_lease_kind kind);
uint64_t lease_surplus_of(struct gpu *gpu, uint64_t idle_bytes); /* how much of so much that is idle will not be needed soon */
uint64_t lease_free_bytes(struct gpu *gpu);
uint64_t lease_free_of(struct gpu *gpu, uint64_t limit_bytes); /* the same, of another limit in all */
uint64_t lease_chunk_bytes(struct gpu *gpu);
uint32_t lease_managed_mib(struct gpu *gpu); /* as USAGE states it */

/* table.c: what this process owns. An entry under a key that is taken replaces the old one: the driver gave the address out
 * anew, so what was there is gone. */
bool table_own(struct owned entry);
bool table_disown(uint64_t at, struct owned *was);
bool table_find(uint64_t at, struct owned *found);
/* Removes the entries that `is_its` selects and adds them to the list, as far as there is memory for it. */
void table_take(bool (*is_its)(const struct owned *entry, const void *what), const void *what, struct owned_list *list);
/* The same, and leaves it there. false: there was no memory for all of it. */
bool table_list(bool (*is_its)(const struct owned *entry, const void *what), const void *what, struct owned_list *list);
bool owned_list_add(struct owned_list *list, const struct owned *entry);
void table_forget_all(void);
/* After the driver destroyed a context of that GPU (NULL: of any GPU), or reset it: whatever died with it is not counted any
 * more. `before` is the moment before the driver was called: what is known by the context's handle and is younger is another context's, to
 * which the driver gave that handle. Call both without locks, the second after the driver's success. */
struct table_moment {
    uint64_t serial[SHARDS];
    uint64_t elastic; /* number of the last elastic allocation */
};
void table_now(struct table_moment *moment);
void table_forget_context(CUcontext context, struct gpu *gpu, const struct table_moment *before);

/* pool.c, late.c: in a forked child */
void pools_forget_all(void);
void late_forget_all(void);

/* vmm.c: a block that something beside handles and mappings keeps; NULL when the handle is none of ours. */
struct block *vmm_retain(CUmemGenericAllocationHandle handle);
void vmm_let_go(struct block *block);
void vmm_let_go_at_once(struct block *block); /* the same, and its lease is the arbiter's at once */
void vmm_hold(struct block *block);     /* one more such holder */
void vmm_exported(struct block *block); /* another process may keep it */
void vmm_converted(struct block *block); /* its lease is resident now */
void vmm_forget_all(void);

/* sparse.c */
void sparse_forget(const void *array);

/* helper.c: after cuInit; the helper calls nothing of the driver's once the program ends. */
void helper_watch_end(void);
bool helper_ended(void); /* the program ends: the helper calls the driver no more */

/* state.c */
void state_set(enum wire_reason reason, bool active); /* anywhere, with or without locks */
void state_announce(void); /* so that a state reaches an arbiter that this process has no other reason to connect to */
bool state_report(void); /* link.lock is held and the arbiter connected; false: the connection is over */

/* Around whatever may wait or call the kernel: the program's errno stays, and its thread is not cancelled in the middle, which
 * would leave a lock taken for ever. */
struct quiet {
    int saved_errno, cancelling;
};
static inline struct quiet quiet_begin(void)
{
    struct quiet quiet = {.saved_errno = errno};
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &quiet.cancelling);
    return quiet;
}
static inline void quiet_end(struct quiet quiet)
{
    pthread_setcancelstate(quiet.cancelling, NULL);
    errno = quiet.saved_errno;
}

/* graphics.c: this process draws. Callable anywhere, without locks. */
void graphics_seen(void);

/* process.c, warn.c */
void process_check(void); /* watches forks, and notices one that passed the watch by */
bool process_owns(pid_t pid); /* is this still the memory that process had, and no copy? */
bool process_is_guest(void); /* another process, which shares this memory */
bool thread_start(void *(*run)(void *));
void warn(enum warning kind, const char *format, ...) __attribute__((format(printf, 2, 3)));
void debug(const char *format, ...) __attribute__((format(printf, 1, 2)));
uint64_t now_us(void);
uint64_t now_ms(void);

#endif
