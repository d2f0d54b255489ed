/* bursting.h - for unit_created.c and unit_pooled.c: a process that sees one GPU, whose memory is elastic, and that has no arbiter. */
#ifndef TANGRAM_TEST_BURSTING_H
#define TANGRAM_TEST_BURSTING_H

#include <stdlib.h>

#include "../src/memory/memory.h"

/* Leases of both kinds, of which the first is the guarantee, too. The test has set up the driver before. */
static inline struct gpu *bursting_gpu(uint64_t lease_bytes, uint64_t elastic_lease_bytes)
{
    struct gpu *gpu = &tangram.grant.gpu[0];
    setenv("TANGRAM_WAIT_MS", "1", 1);
    atomic_store(&tangram.hot.driver_found, true);
    atomic_store(&tangram.grant.state, GRANT_GOOD);
    tangram.grant.gpus = 1;
    atomic_store(&tangram.device_gpu[0], gpu);
    atomic_store(&tangram.only_gpu, gpu);
    atomic_store(&tangram.elastic.looked_for_rdma, true);
    atomic_store(&gpu->bursts, true);
    atomic_store(&gpu->limits_came, true);
    atomic_store(&gpu->limit_bytes, 1); /* it may burst, and there is no arbiter from which more could be leased */
    atomic_store(&gpu->unused_bytes, lease_bytes);
    atomic_store(&gpu->elastic_unused_bytes, elastic_lease_bytes);
    return gpu;
}

#endif
