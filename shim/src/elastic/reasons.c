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
    [ELASTIC_SEVERAL_GPUS] = "the process sees several GPUs",
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

bool elastic_able(struct gpu *gpu)
{
    struct quiet quiet = quiet_begin();
    look_for_rdma();
    if (atomic_load_explicit(&tangram.only_gpu, memory_order_acquire) != gpu)
        elastic_unable(ELASTIC_SEVERAL_GPUS);
    if (elastic_reason() == ELASTIC_ABLE && !burst_limits_came(gpu))
        elastic_unable(ELASTIC_NO_ARBITER);
    quiet_end(quiet);
    return elastic_reason() == ELASTIC_ABLE && burst_is_allowed(gpu);
}
