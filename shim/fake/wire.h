/* wire.h - what the fake driver's daemon and its libraries agree on.
 *
 * The daemon owns one shared page, the beginning of a sparse memfd. A library connects to the daemon's socket (SOCK_SEQPACKET)
 * and is sent its descriptor and the number of the library's slot, the only message beside single bytes (client_catch_up).
 * From then on memory is allocated, freed and shared, and kernels are queued, in the page itself, under its lock or with
 * atomics: no round trip, so that a call costs some tens of nanoseconds. `ctl` works on the page in the same way. The socket
 * stays open for the life of the process: its hang-up, also by SIGKILL, is how the daemon detects that the process is gone and
 * its memory is free.
 *
 * Behind the page, the memfd is the GPUs' memory: each process that allocates has a region of its own, which others map by offset.
 *
 * The page is writable by every client. A fake driver protects itself against that (every index and length is checked
 * where it is used), not its numbers.
 *
 * Units: a "unit" is what memory and time are counted on: a whole GPU, or a MIG GPU instance of a GPU.
 *     unit of GPU c          = c
 *     unit of c's instance i  = FAKE_GPUS + c * FAKE_INSTANCES + i, with i its GPU instance ID
 */
#ifndef TANGRAM_FAKE_WIRE_H
#define TANGRAM_FAKE_WIRE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define FAKE_GPUS 16u
#define FAKE_INSTANCES 15u /* GPU instance IDs are 0 to 14; at most 7 exist at a time */
#define FAKE_UNITS (FAKE_GPUS * (1u + FAKE_INSTANCES))
#define FAKE_SLOTS 1024u
#define FAKE_LINKS 18u    /* NVLinks of a Hopper GPU, the most of any GPU here */
#define FAKE_EVENTS 256u  /* ring; a reader that falls behind loses the oldest */
#define FAKE_PROFILES 12u
#define FAKE_NAME 64u
#define FAKE_SAMPLES 32u  /* ring: how much had run when; number n sits at n % FAKE_SAMPLES */

#define FAKE_MIB ((uint64_t)1 << 20)
#define FAKE_DEFAULT_SOCKET "/run/nvidia-persistenced/socket"
#define FAKE_SOCKET_ENV "TANGRAM_FAKE_DRIVER"

#define FAKE_PAGE_MAGIC 0x4b414654u /* "TFAK" */
#define FAKE_PAGE_VERSION 15u /* of the page and of the message */

/* A lock of all processes that none can keep: whoever waits for one turn longer than it may last takes the lock over. Its holder was
 * stopped (SIGSTOP) or killed: a kernel driver, which has these records on a real machine, is neither. page.c */
struct fake_lock {
    _Atomic uint32_t turn;    /* odd = taken; a futex */
    _Atomic uint32_t waiters; /* at least as many as wait */
};

/* One of NVIDIA's documented MIG profiles of a GPU model; daemon/models.def. */
struct fake_profile {
    char name[24];            /* as NVIDIA's device plugin writes it: "1g.18gb", "1g.18gb.me" */
    uint32_t id, nvml;        /* the ID that nvidia-smi mig -lgip prints, NVML_GPU_INSTANCE_PROFILE_* */
    uint32_t compute, memory; /* slices */
    uint32_t most;            /* instances of it that fit on one GPU */
    uint32_t last_start;      /* memory slice: an instance begins at 0 or a multiple of `memory` up to it */
    uint32_t sms, copy_engines, decoders, jpegs, ofas;
    uint64_t bytes;
};

/* What a GPU's sensors and counters show, as far as a command has set it. */
enum fake_reading {
#define READING(name) READING_##name,
#include "readings.def"
#undef READING
    FAKE_READINGS
};

/* Its memory: its own behind PCIe; a NUMA node of the kernel; its own and allocated by the driver alone (CDMM); the machine's (GB10). */
enum fake_coherent { COHERENT_no, COHERENT_numa, COHERENT_cdmm, COHERENT_unified };

struct fake_gpu {
    /* from its model, in the order of daemon/models.def */
    char model[16], name[64]; /* "h200" */
    uint32_t pci_id, pci_subsystem, cc_major, cc_minor, architecture, brand, pcie;
    uint32_t sms, clock_mhz, memory_clock_mhz, bus_bits, power_watts, l2_mib, links_wired;
    uint64_t total_bytes, reserved_bytes; /* what NVML calls total; of it, what no process can have */
    uint64_t context_bytes;               /* what one context costs */
    /* its own */
    char uuid[48], serial[32];
    uint8_t uuid_bytes[16];
    uint32_t minor, pci_domain, pci_bus, pci_device;
    uint32_t coherent;                   /* enum fake_coherent */
    int32_t numa, link_peer[FAKE_LINKS]; /* GPU at the other end, -1 = not connected, -2 = a switch */
    uint32_t mig_on, mig_pending;        /* pending: what it will be when it is next idle and set again */
    uint32_t profiles;                   /* without profiles it has no MIG */
    struct fake_profile profile[FAKE_PROFILES];
    _Atomic uint32_t xid, lost; /* the last fatal XID, 0 = well; fell off the bus (XID 79) */
    _Atomic uint32_t absent;    /* taken out of the machine */
    _Atomic uint32_t plugs;     /* how often it was taken out or put in: a session of NVML knows it only as it was when it began */
    _Atomic uint64_t reading[FAKE_READINGS];
};

struct fake_unit {
    uint32_t live, gpu;
    uint32_t profile, start; /* of a GPU instance: index in the GPU's profile[], first memory slice */
    uint32_t compute;        /* of a GPU instance: it has its compute instance, so it is a MIG device */
    char uuid[48];           /* the GPU's, or "MIG-..." */
    uint8_t uuid_bytes[16];
    /* memory, under the page's lock */
    uint64_t limit_bytes;                /* what processes can have */
    _Atomic uint64_t used_bytes[FAKE_SLOTS];     /* what each slot has */
    _Atomic uint64_t unlisted_bytes[FAKE_SLOTS]; /* of that, managed memory: NVML counts it as used, and lists it for no process */
    /* time, under time_lock; gpu_time.c */
    struct fake_lock time_lock;
    _Atomic uint32_t time_bell;                /* futex: changes when a process is suspended, resumed or ends */
    _Atomic uint64_t settled_ns;               /* CLOCK_MONOTONIC up to which the records are made */
    _Atomic uint64_t ran_ns;                   /* all kernel time that ever ran */
    _Atomic uint64_t sampled_ns[FAKE_SAMPLES]; /* ran_ns, then */
};

/* What a slot's clients own in the kernel driver; kernel/. */
#define FAKE_OBJECTS 512u
struct fake_kernel_object {
    uint32_t client, handle, parent, object_class; /* handle 0 = free */
    uint32_t unit, engine; /* of a device, of a channel group, and of what is under it */
    uint32_t disables;     /* of a channel: so many enables are owed */
};

enum fake_kind { FAKE_FREE, FAKE_CUDA, FAKE_NVML, FAKE_FOREIGN, FAKE_CTL }; /* a client sends its kind when it connects */

struct fake_slot {
    uint32_t kind;
    uint32_t region; /* of its memory, 0 = none yet */
    int32_t pid;     /* as the daemon's PID namespace has it */
    char name[FAKE_NAME];
    uint32_t contexts[FAKE_UNITS];
    _Atomic uint32_t error[FAKE_UNITS]; /* a kernel failed: the CUresult that its process is answered from then on; 0 = none */
    _Atomic uint64_t queued_ns[FAKE_UNITS], ran_ns[FAKE_UNITS];
    _Atomic uint32_t held[FAKE_UNITS];                    /* its kernels and fills do not run */
    _Atomic uint32_t copies_held[FAKE_UNITS];             /* its copies do not run */
    _Atomic uint32_t steps[FAKE_UNITS];                   /* threads that write to memory for its work now */
    _Atomic uint32_t suspends[FAKE_UNITS];                /* so far, of either kind */
    _Atomic uint64_t sampled_ns[FAKE_GPUS][FAKE_SAMPLES]; /* ran_ns of whole GPUs, then */
    struct fake_kernel_object object[FAKE_OBJECTS];
};

struct fake_event {
    uint32_t gpu, xid;
};

enum fake_fault_kind { FAULT_NONE, FAULT_FAIL, FAULT_HANG, FAULT_MISSING, FAULT_SUSPEND, FAULT_ALLOC_FORM };
#define FAKE_FAULTS 16u
#define FAKE_ALLOC_MORE 8u /* bytes at the end of an RM_ALLOC that no driver has: the fault alloc-form */
struct fake_fault { /* common/fault.h */
    enum fake_fault_kind kind;
    char function[60];
    uint64_t error, nth, bytes, seconds; /* 0 = any */
    _Atomic uint64_t calls;              /* that matched so far, of all processes */
};

/* Memory that several processes may reference. It is charged to one of them, the first that still has a reference. */
#define FAKE_SHARED 16384u
struct fake_object {
    uint64_t id;               /* its place in object[] + FAKE_SHARED x a number of its own; 0 = free */
    uint64_t offset, capacity; /* in the file */
    uint64_t bytes;            /* charged */
    uint32_t unit, owner;
    uint16_t references[FAKE_SLOTS]; /* by slot */
};

struct fake_page {
    uint32_t magic, version, gpus, cuda_version;
    char driver_version[32];
    uint64_t kernel_ns;                        /* duration of a kernel whose code sets none */
    _Atomic uint64_t kernel_misuses;           /* ioctls that a real kernel driver would have refused or regretted */
    char kernel_misuse[128];                   /* the last one, in words */
    char bus_folder[200];                      /* has a link for each GPU of the machine, as the folder of a PCI driver in sysfs; "" = none */
    char seed[64];                             /* mixed into the default UUIDs, so that two nodes' GPUs differ */
    union {
        pthread_mutex_t commands; /* serialises commands; robust, shared between processes */
        char commands_room[64];   /* its size is the machine's: a program that is emulated has the same page */
    };
    struct fake_lock lock;
    uint32_t slots;                            /* all that were ever used are below */
    uint32_t ended_client[FAKE_SLOTS];         /* in the kernel driver, of the last process of each slot that ended */
    _Atomic uint32_t events;                   /* raised so far, a futex; number n sits at n % FAKE_EVENTS. Under the lock */
    _Atomic uint64_t samples;                  /* taken so far */
    _Atomic uint64_t sampled_us[FAKE_SAMPLES]; /* when: CLOCK_REALTIME, as NVML reports it */
    _Atomic uint32_t faults;
    struct fake_fault fault[FAKE_FAULTS];
    struct fake_gpu gpu[FAKE_GPUS];
    struct fake_unit unit[FAKE_UNITS];
    struct fake_event event[FAKE_EVENTS];
    struct fake_slot slot[FAKE_SLOTS];
    _Atomic uint32_t regions; /* given so far; a region is never given again */
    uint32_t objects;         /* all that were ever used are below. Under the lock, as what follows */
    uint32_t objects_full;    /* below it none is free */
    uint64_t last_object;
    struct fake_object object[FAKE_SHARED];
};

#define FAKE_PAGE_BYTES ((sizeof(struct fake_page) + 4095u) & ~(size_t)4095u)
/* Region number n begins at n x FAKE_REGION_BYTES; number 0 has the page. Address space only: pages come when they are written. */
#define FAKE_REGION_BYTES ((uint64_t)16 << 40)
#define FAKE_REGIONS (1u << 18)
#define FAKE_FILE_BYTES (FAKE_REGIONS * FAKE_REGION_BYTES)

static inline uint32_t fake_unit_of_instance(uint32_t gpu, uint32_t instance) { return FAKE_GPUS + gpu * FAKE_INSTANCES + instance; }
static inline uint32_t fake_gi_of(uint32_t unit) { return (unit - FAKE_GPUS) % FAKE_INSTANCES; }
static inline const struct fake_profile *fake_profile_of(const struct fake_page *page, const struct fake_unit *instance)
{
    return &page->gpu[instance->gpu % FAKE_GPUS].profile[instance->profile % FAKE_PROFILES];
}

struct fake_message {
    uint32_t version, slot;
};

#endif
