/* nvml_fields.c - functions that answer for many things at once: fields, samples, events, GPM.
 *
 * Each kind is judged by itself, and one that this version does not know is refused. Power, temperature and clocks pass, as
 * their own functions do; so does the health of the hardware. What counts work or traffic of all containers does not.
 */
#include "hooks/hook.h"
#include "process.h"

#include <string.h>

/* NVML_FI_*, by number, that pass. */
static const struct {
    unsigned int first, last;
} fields_that_pass[] = {
    {1, 59},    /* ECC, retired pages, errors of NVLink */
    {74, 119},  /* what lowers the clocks, energy, speed and number of links, PCIe replays, errors of NVLink */
    {132, 137}, /* speed of links */
    {142, 196}, /* remapped rows, errors of NVLink and PCIe, power, limits of power and temperature */
    {199, 200}, /* abilities */
    {205, 271}, /* errors of NVLink, recovery, settings of power smoothing, what lowers the clocks */
    {274, 293}, /* settings of power, raw errors of NVLink */
    {296, 296}, /* data rate of a link */
    {298, 309}, /* clock switching, remapped rows and banks, temperature, time limited by power smoothing */
};

static bool field_passes(unsigned int field)
{
    for (size_t i = 0; i < sizeof fields_that_pass / sizeof *fields_that_pass; i++)
        if (field >= fields_that_pass[i].first && field <= fields_that_pass[i].last)
            return true;
    return false;
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    NEEDS_NVML(nvmlDeviceGetFieldValues);
    struct gpu *gpu;
    nvmlReturn_t rc = shared_gpu(device, &gpu);
    if (rc != NVML_SUCCESS)
        return rc;
    rc = tangram.management.nvmlDeviceGetFieldValues(device, count, values);
    for (int i = 0; gpu != NULL && values != NULL && i < count; i++) {
        if (field_passes(values[i].fieldId))
            continue;
        values[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
        values[i].value = 0;
    }
    return rc;
}

/* nvmlSamplingType_t */
enum { SAMPLES_POWER = 0, SAMPLES_CLOCK = 5, SAMPLES_MEMORY_CLOCK = 6, SAMPLES_MODULE_POWER = 7 };

EXPORT nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, int type, unsigned long long since_us, int *value_type,
                                         unsigned int *count, void *samples)
{
    NEEDS_NVML(nvmlDeviceGetSamples);
    struct gpu *gpu;
    nvmlReturn_t rc = shared_gpu(device, &gpu);
    if (rc != NVML_SUCCESS)
        return rc;
    bool passes = type == SAMPLES_POWER || type == SAMPLES_CLOCK || type == SAMPLES_MEMORY_CLOCK || type == SAMPLES_MODULE_POWER;
    if (gpu != NULL && !passes)
        return NVML_ERROR_NOT_SUPPORTED;
    return tangram.management.nvmlDeviceGetSamples(device, type, since_us, value_type, count, samples);
}

/* An XID reports a fault on the GPU, most often one that a program caused, but not that program's container. A container's
 * own fault is reported by CUDA; errors of the hardware have events and counters of their own, which pass. */
#define EVENT_XID 0x8ull /* nvmlEventTypeXidCriticalError */

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    NEEDS_NVML(nvmlDeviceGetSupportedEventTypes);
    struct gpu *gpu;
    nvmlReturn_t rc = shared_gpu(device, &gpu);
    if (rc == NVML_SUCCESS)
        rc = tangram.management.nvmlDeviceGetSupportedEventTypes(device, types);
    if (rc == NVML_SUCCESS && gpu != NULL)
        *types &= ~EVENT_XID;
    return rc;
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, void *set)
{
    NEEDS_NVML(nvmlDeviceRegisterEvents);
    struct gpu *gpu;
    nvmlReturn_t rc = shared_gpu(device, &gpu);
    if (rc != NVML_SUCCESS)
        return rc;
    if (gpu != NULL && (types & EVENT_XID) != 0)
        return NVML_ERROR_NOT_SUPPORTED;
    return tangram.management.nvmlDeviceRegisterEvents(device, types, set);
}

/* The structured form of XIDs. Its configuration begins with the GPU's UUID. */
EXPORT nvmlReturn_t nvmlEventSetRegisterGpuOperationalEvents_v1(void *set, const void *config)
{
    NEEDS_NVML(nvmlEventSetRegisterGpuOperationalEvents_v1);
    uint8_t uuid[16];
    bool parsed = config != NULL && uuid_parse(config, strnlen(config, NVML_UUID_BYTES), uuid);
    if (grant_ready() != GRANT_NONE && (!parsed || gpu_of_uuid(uuid) != NULL))
        return NVML_ERROR_NOT_SUPPORTED;
    return tangram.management.nvmlEventSetRegisterGpuOperationalEvents_v1(set, config);
}

EXPORT nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
    NEEDS_NVML(nvmlGpmQueryDeviceSupport);
    struct gpu *gpu;
    nvmlReturn_t rc = shared_gpu(device, &gpu);
    if (rc == NVML_SUCCESS)
        rc = tangram.management.nvmlGpmQueryDeviceSupport(device, support);
    if (rc == NVML_SUCCESS && gpu != NULL)
        support->isSupportedDevice = 0;
    return rc;
}
