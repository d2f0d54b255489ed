/* mig.c - MIG: mode, device handles, GPU and compute instances, profiles.
 *
 * A GPU instance has one compute instance (ID 0) as large as itself; the three handles of one instance are one address.
 */
#include "internal.h"

#include <stdio.h>

unsigned instances_of(uint32_t card, uint32_t units[FAKE_INSTANCES])
{
    unsigned count = 0;
    for (uint32_t gi = 0; gi < 15; gi++)
        for (uint32_t i = 0; i < FAKE_INSTANCES; i++) {
            const uint32_t unit = fake_unit_of_instance(card, i);
            const struct fake_unit *of = &nvml.client.page->unit[unit];
            if (of->live && of->gi == gi && count < FAKE_INSTANCES && client_sees_instance(&nvml.client, unit))
                units[count++] = unit;
        }
    return count;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *now, unsigned *pending)
{
    struct target to;
    TRY(whole_card(device, &to));
    CHECK(now != NULL && pending != NULL, NVML_ERROR_INVALID_ARGUMENT);
    CHECK(to.on->mig_capable, NVML_ERROR_NOT_SUPPORTED);
    *now = *pending = to.on->mig_on ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is)
{
    struct target to;
    TRY(target_of(device, &to));
    CHECK(is != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *is = to.mig;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count)
{
    struct target to;
    TRY(target_of(device, &to));
    CHECK(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *count = to.on->mig_on ? FAKE_INSTANCES : 0; /* 0 also on a capable card in plain mode: measured */
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig)
{
    struct target to;
    uint32_t units[FAKE_INSTANCES];
    TRY(whole_card(device, &to));
    CHECK(mig != NULL && index < FAKE_INSTANCES, NVML_ERROR_INVALID_ARGUMENT);
    CHECK(index < instances_of(to.card, units), NVML_ERROR_NOT_FOUND);
    *mig = handle_of(units[index]);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    struct target to;
    TRY(target_of(mig, &to));
    CHECK(device != NULL && to.mig, NVML_ERROR_INVALID_ARGUMENT);
    *device = handle_of(to.card);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id)
{
    struct target to;
    TRY(target_of(device, &to));
    CHECK(id != NULL, NVML_ERROR_INVALID_ARGUMENT);
    CHECK(to.mig, NVML_ERROR_NOT_SUPPORTED);
    *id = to.of->gi;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id)
{
    TRY(nvmlDeviceGetGpuInstanceId(device, id));
    *id = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    struct target to;
    TRY(target_of(device, &to));
    CHECK(attributes != NULL, NVML_ERROR_INVALID_ARGUMENT);
    CHECK(to.mig, NVML_ERROR_NOT_SUPPORTED);
    const struct fake_profile *profile = &to.on->profile[to.of->profile];
    *attributes = (nvmlDeviceAttributes_t){.multiprocessorCount = profile->sms,
                                           .sharedCopyEngineCount = profile->copy_engines,
                                           .sharedDecoderCount = profile->decoders,
                                           .sharedJpegCount = profile->jpegs,
                                           .sharedOfaCount = profile->ofas,
                                           .gpuInstanceSliceCount = profile->compute,
                                           .computeInstanceSliceCount = profile->compute,
                                           .memorySizeMB = profile->bytes / FAKE_MIB};
    return NVML_SUCCESS;
}

ALIAS(nvmlDeviceGetAttributes, nvmlDeviceGetAttributes_v2)

static const struct fake_profile *profile_by(const struct fake_card *card, unsigned nvml_number, unsigned id)
{
    for (uint32_t i = 0; i < card->profiles && i < FAKE_PROFILES; i++)
        if (card->profile[i].nvml == nvml_number || card->profile[i].id == id)
            return &card->profile[i];
    return NULL;
}
#define NO_NUMBER 0xffffffffu

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned number, nvmlGpuInstanceProfileInfo_t *info)
{
    struct target to;
    TRY(whole_card(device, &to));
    CHECK(info != NULL && number < NVML_GPU_INSTANCE_PROFILE_COUNT, NVML_ERROR_INVALID_ARGUMENT);
    const struct fake_profile *profile = profile_by(to.on, number, NO_NUMBER);
    CHECK(profile != NULL, NVML_ERROR_NOT_SUPPORTED);
    *info = (nvmlGpuInstanceProfileInfo_t){.id = profile->id,
                                           .sliceCount = profile->compute,
                                           .instanceCount = profile->most,
                                           .multiprocessorCount = profile->sms,
                                           .copyEngineCount = profile->copy_engines,
                                           .decoderCount = profile->decoders,
                                           .jpegCount = profile->jpegs,
                                           .ofaCount = profile->ofas,
                                           .memorySizeMB = profile->bytes / FAKE_MIB};
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned number, nvmlGpuInstanceProfileInfo_v2_t *info)
{
    nvmlGpuInstanceProfileInfo_t plain;
    struct target to;
    CHECK(info != NULL, NVML_ERROR_INVALID_ARGUMENT);
    TRY(ready());
    CHECK(info->version == (sizeof *info | 2u << 24), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    TRY(nvmlDeviceGetGpuInstanceProfileInfo(device, number, &plain));
    TRY(target_of(device, &to));
    memset(&info->id, 0, sizeof *info - offsetof(nvmlGpuInstanceProfileInfo_v2_t, id));
    info->id = plain.id;
    info->sliceCount = plain.sliceCount;
    info->instanceCount = plain.instanceCount;
    info->multiprocessorCount = plain.multiprocessorCount;
    info->copyEngineCount = plain.copyEngineCount;
    info->decoderCount = plain.decoderCount;
    info->jpegCount = plain.jpegCount;
    info->ofaCount = plain.ofaCount;
    info->memorySizeMB = plain.memorySizeMB;
    snprintf(info->name, sizeof info->name, "MIG %s", profile_by(to.on, number, NO_NUMBER)->name);
    char *media = strstr(info->name, ".me");
    if (media != NULL)
        *media = '+';
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned id, nvmlGpuInstancePlacement_t *places, unsigned *count)
{
    struct target to;
    TRY(whole_card(device, &to));
    CHECK(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    const struct fake_profile *profile = profile_by(to.on, NO_NUMBER, id);
    CHECK(profile != NULL, NVML_ERROR_NOT_SUPPORTED);
    unsigned have = 0;
    for (unsigned start = 0; start < 7 && start + profile->memory <= 8; start += profile->memory) {
        if (profile->compute == 4 && start > 0)
            break;
        if (profile->compute == 2 && start > 4)
            break;
        if (places != NULL && have < *count)
            places[have] = (nvmlGpuInstancePlacement_t){.start = start, .size = profile->memory};
        have++;
    }
    const unsigned room = *count;
    *count = have;
    return places == NULL || have <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

ALIAS(nvmlDeviceGetGpuInstancePossiblePlacements, nvmlDeviceGetGpuInstancePossiblePlacements_v2)

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *found, unsigned *count)
{
    struct target to;
    uint32_t units[FAKE_INSTANCES];
    TRY(whole_card(device, &to));
    CHECK(found != NULL && count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    CHECK(to.on->mig_on, NVML_ERROR_NOT_SUPPORTED);
    const unsigned have = instances_of(to.card, units);
    *count = 0;
    for (unsigned i = 0; i < have; i++)
        if (to.on->profile[nvml.client.page->unit[units[i]].profile].id == id)
            found[(*count)++] = (nvmlGpuInstance_t)handle_of(units[i]);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *found)
{
    struct target to;
    uint32_t units[FAKE_INSTANCES];
    TRY(whole_card(device, &to));
    CHECK(found != NULL, NVML_ERROR_INVALID_ARGUMENT);
    const unsigned have = instances_of(to.card, units);
    for (unsigned i = 0; i < have; i++)
        if (nvml.client.page->unit[units[i]].gi == id)
            return *found = (nvmlGpuInstance_t)handle_of(units[i]), NVML_SUCCESS;
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    struct target to;
    TRY(target_of((nvmlDevice_t)instance, &to));
    CHECK(info != NULL && to.mig, NVML_ERROR_INVALID_ARGUMENT);
    const struct fake_profile *profile = &to.on->profile[to.of->profile];
    *info = (nvmlGpuInstanceInfo_t){.device = handle_of(to.card),
                                    .id = to.of->gi,
                                    .profileId = profile->id,
                                    .placement = {.start = to.of->start, .size = profile->memory}};
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *found)
{
    struct target to;
    TRY(target_of((nvmlDevice_t)instance, &to));
    CHECK(found != NULL && to.mig, NVML_ERROR_INVALID_ARGUMENT);
    CHECK(id == 0, NVML_ERROR_NOT_FOUND);
    *found = (nvmlComputeInstance_t)instance;
    return NVML_SUCCESS;
}

/* NVML numbers compute profiles by slices: 1, 2, 3, 4, 7, 8, 6. */
static const unsigned compute_slices[NVML_COMPUTE_INSTANCE_PROFILE_COUNT] = {1, 2, 3, 4, 7, 8, 6}; /* 0 beyond: not on these cards */

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t instance, unsigned number, unsigned engine,
                                                                 nvmlComputeInstanceProfileInfo_t *info)
{
    struct target to;
    TRY(target_of((nvmlDevice_t)instance, &to));
    CHECK(info != NULL && to.mig && number < NVML_COMPUTE_INSTANCE_PROFILE_COUNT, NVML_ERROR_INVALID_ARGUMENT);
    CHECK(engine < NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT, NVML_ERROR_INVALID_ARGUMENT);
    const struct fake_profile *profile = &to.on->profile[to.of->profile];
    CHECK(compute_slices[number] == profile->compute, NVML_ERROR_NOT_SUPPORTED);
    *info = (nvmlComputeInstanceProfileInfo_t){.id = number,
                                               .sliceCount = profile->compute,
                                               .instanceCount = 1,
                                               .multiprocessorCount = profile->sms,
                                               .sharedCopyEngineCount = profile->copy_engines,
                                               .sharedDecoderCount = profile->decoders,
                                           .sharedJpegCount = profile->jpegs,
                                               .sharedOfaCount = profile->ofas};
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
    struct target to;
    TRY(target_of((nvmlDevice_t)instance, &to));
    CHECK(info != NULL && to.mig, NVML_ERROR_INVALID_ARGUMENT);
    const struct fake_profile *profile = &to.on->profile[to.of->profile];
    unsigned number = 0;
    while (compute_slices[number] != profile->compute && compute_slices[number] != 0)
        number++;
    *info = (nvmlComputeInstanceInfo_t){.device = handle_of(to.card),
                                        .gpuInstance = (nvmlGpuInstance_t)instance,
                                        .profileId = number,
                                        .placement = {.start = 0, .size = profile->compute}};
    return NVML_SUCCESS;
}

ALIAS(nvmlComputeInstanceGetInfo, nvmlComputeInstanceGetInfo_v2)

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned number, nvmlComputeInstance_t *found, unsigned *count)
{
    nvmlComputeInstanceInfo_t info;
    CHECK(found != NULL && count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    TRY(nvmlComputeInstanceGetInfo_v2((nvmlComputeInstance_t)instance, &info));
    *count = info.profileId == number;
    if (*count > 0)
        found[0] = (nvmlComputeInstance_t)instance;
    return NVML_SUCCESS;
}
