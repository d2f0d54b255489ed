/* internal.h - the fake libnvidia-ml's own state. A handle is the address of a unit's entry in one fixed table; the handles of
 * a MIG device, of its GPU instance and of its compute instance are one address. */
#ifndef TANGRAM_FAKE_NVML_INTERNAL_H
#define TANGRAM_FAKE_NVML_INTERNAL_H

#ifdef FAKE_WITH_NVIDIA_HEADER
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
#else
#include "fake_nvml.h"
#endif
#include "check.h"
#include "client.h"
#include "page.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define SUPPORTED_EVENTS 0xff9full /* an H200's, driver 580 */

struct nvmlDevice_st {
    uint32_t place; /* only its address counts */
};

struct nvml {
    pthread_mutex_t lock;
    _Atomic unsigned users; /* nvmlInit less nvmlShutdown */
    int cuda_version;       /* of the driver that was there when the library was loaded */
    struct client client;
    uint32_t gpu[FAKE_GPUS]; /* visible ones, in NVML's order */
    unsigned gpus;
    uint32_t known;            /* GPUs that there were when NVML was opened: later ones are not found */
    uint32_t plugs[FAKE_GPUS]; /* of each, then */
    struct nvmlDevice_st device[FAKE_UNITS];
};
extern struct nvml nvml __attribute__((visibility("hidden")));

/* What a handle stands for. unit == GPU for a whole GPU. */
struct target {
    uint32_t unit, gpu;
    bool mig;
    const struct fake_unit *of;
    const struct fake_gpu *on;
    const struct fake_profile *profile; /* of a MIG device */
};

nvmlReturn_t ready(void);
/* Waits for the time of the function's scripted fault. */
void hang(const char *function);
/* Which handles a function takes; they are of any of NVML's types. */
enum accepted {
    ANY,      /* any device, also while the GPU is lost */
    LIVE,     /* any device, NVML_ERROR_GPU_IS_LOST while it is */
    GPU,      /* LIVE, and NVML_ERROR_NOT_SUPPORTED for a MIG device */
    MIG,      /* NVML_ERROR_NOT_SUPPORTED for a whole GPU */
    INSTANCE, /* NVML_ERROR_INVALID_ARGUMENT for a whole GPU */
};
nvmlReturn_t target_of(const void *handle, enum accepted accepted, struct target *target);

void *handle_of(uint32_t unit);

bool is_connected(const struct fake_gpu *gpu, unsigned link);

#endif
