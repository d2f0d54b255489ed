/* reasons.c - whether this process gets elastic memory, and why it cannot be swapped.
 *
 * Something outside of CUDA, or of this library, may have the physical memory behind an address: a network card, another GPU. Then a
 * process must keep what it has. What it allocates from then on is plain, and the arbiter swaps nothing of it.
 */
#include "process.h"

#include <sys/stat.h>

static const char *const texts[ELASTIC_REASONS] = {
    [ELASTIC_ABLE] = "it can be swapped",
    [ELASTIC_NO_HELPER] = "the library's helper thread could not be started",
    [ELASTIC_OTHER_GPU] = "the process sees a GPU that its container's grant does not name",
    [ELASTIC_RDMA_DEVICE] = "the container has an RDMA device (/dev/infiniband)",
    [ELASTIC_ADDRESS_RANGE] = "the program requested a handle for an address range (cuMemGetHandleForAddressRange)",
    [ELASTIC_P2P_TOKENS] = "the program requested P2P tokens (CU_POINTER_ATTRIBUTE_P2P_TOKENS)",
    [ELASTIC_SYNC_MEMOPS] = "the program set CU_POINTER_ATTRIBUTE_SYNC_MEMOPS",
    [ELASTIC_DRIVER_REFUSED] = "the driver refused memory of cuMemCreate that can be exported",
    [ELASTIC_NO_ARBITER] = "the arbiter has not sent the container's limits within a second",
};

const char *elastic_reason_text(enum elastic_reason reason)
{
    return texts[reason];
}

static bool some_gpu_bursts(void)
{
    for (unsigned i = 0; i < tangram.grant.gpus; i++)
        if (atomic_load_explicit(&tangram.grant.gpu[i].bursts, memory_order_acquire))
            return true;
    return atomic_load(&tangram.elastic.any);
}

/* Without a burst there is nothing to lose, and nothing to say. */
void elastic_unable(enum elastic_reason reason)
{
    int none = ELASTIC_ABLE;
    if (some_gpu_bursts() && atomic_compare_exchange_strong(&tangram.elastic.reason, &none, (int)reason))
        warn(WARN_UNSWAPPABLE, "this process cannot be swapped: %s. It gets no memory beyond its guarantee from now on", texts[reason]);
}

enum elastic_reason elastic_reason(void)
{
    const enum elastic_reason kept = (enum elastic_reason)atomic_load_explicit(&tangram.elastic.reason, memory_order_acquire);
    return kept == ELASTIC_ABLE && !link_has_helper() ? ELASTIC_NO_HELPER : kept;
}

/* The device files of a container do not change while it runs. */
static void look_for_rdma(void)
{
    struct stat there;
    if (!atomic_exchange(&tangram.elastic.looked_for_rdma, true) && stat("/dev/infiniband", &there) == 0)
        elastic_unable(ELASTIC_RDMA_DEVICE);
}

enum gpus_seen { GPUS_UNKNOWN, GPUS_OURS, GPUS_OTHERS };

/* A kernel of any GPU that the process sees may use the memory of any other, and the arbiter suspends only those of the grant. Which GPUs a process sees does
 * not change once the driver is initialised. */
static enum gpus_seen look_at_gpus(void)
{
    int devices = 0;
    if (tangram.driver.cuDeviceGetCount(&devices) != CUDA_SUCCESS)
        return GPUS_UNKNOWN;
    enum gpus_seen seen = devices <= PEER_DEVICES ? GPUS_OURS : GPUS_OTHERS;
    for (CUdevice device = 0; device < devices && seen == GPUS_OURS; device++) {
        const struct gpu *gpu = gpu_of_device(device);
        seen = gpu == NULL ? GPUS_OTHERS : gpu->closed ? GPUS_UNKNOWN : GPUS_OURS;
    }
    if (devices > 1)
        atomic_store(&tangram.hot.several_gpus, true); /* before the first block */
    return seen;
}

static enum gpus_seen gpus_seen(struct gpu *gpu)
{
    const int known = atomic_load_explicit(&tangram.elastic.gpus_seen, memory_order_acquire);
    if (known != GPUS_UNKNOWN)
        return (enum gpus_seen)known;
    if (atomic_load_explicit(&tangram.only_gpu, memory_order_acquire) == gpu)
        return GPUS_OURS;
    const enum gpus_seen seen = look_at_gpus();
    atomic_store_explicit(&tangram.elastic.gpus_seen, (int)seen, memory_order_release);
    return seen;
}

/* The arbiter serves bursts: where the limits of a GPU are missing, it does not know that GPU's pool or memory yet, and sends them then. */
static bool some_limits_came(void)
{
    bool some = false;
    for (unsigned i = 0; i < tangram.grant.gpus && !some; i++)
        some = atomic_load(&tangram.grant.gpu[i].limits_came);
    return some;
}

bool elastic_able(struct gpu *gpu)
{
    struct quiet quiet = quiet_begin();
    const enum gpus_seen seen = gpus_seen(gpu);
    look_for_rdma();
    if (seen == GPUS_OTHERS)
        elastic_unable(ELASTIC_OTHER_GPU);
    const bool waits = elastic_reason() == ELASTIC_ABLE, came = waits && burst_limits_came(gpu);
    if (waits && !came && !some_limits_came())
        elastic_unable(ELASTIC_NO_ARBITER);
    quiet_end(quiet);
    return seen == GPUS_OURS && came && elastic_reason() == ELASTIC_ABLE && burst_is_allowed(gpu);
}
