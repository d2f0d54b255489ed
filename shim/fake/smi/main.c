/* main.c - nvidia-smi's most used faces: -L, a table, --query-gpu=... --format=csv[,noheader][,nounits].
 *
 * All it prints comes from NVML, so that whatever stands in front of NVML in a container shows here.
 */
#define _GNU_SOURCE
#include "fake_nvml.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define MIB (1ull << 20)
#define GPUS 64u
#define INSTANCES 7u
#define PROCESSES 1024u
#define WIDTH 78

struct gpu {
    unsigned index;
    nvmlDevice_t device;
    char name[96], uuid[96], driver[64];
    nvmlPciInfo_t pci;
    nvmlMemory_t memory;
    nvmlReturn_t memory_rc;
    nvmlUtilization_t rates;
    unsigned mig, pending;
    bool has_rates, has_mig;
};

static void read_gpu(struct gpu *gpu, unsigned index)
{
    *gpu = (struct gpu){.index = index};
    nvmlDeviceGetHandleByIndex_v2(index, &gpu->device);
    nvmlDeviceGetName(gpu->device, gpu->name, sizeof gpu->name);
    nvmlDeviceGetUUID(gpu->device, gpu->uuid, sizeof gpu->uuid);
    nvmlSystemGetDriverVersion(gpu->driver, sizeof gpu->driver);
    nvmlDeviceGetPciInfo_v3(gpu->device, &gpu->pci);
    gpu->memory_rc = nvmlDeviceGetMemoryInfo(gpu->device, &gpu->memory);
    gpu->has_rates = nvmlDeviceGetUtilizationRates(gpu->device, &gpu->rates) == NVML_SUCCESS;
    gpu->has_mig = nvmlDeviceGetMigMode(gpu->device, &gpu->mig, &gpu->pending) == NVML_SUCCESS;
}

static int list(const struct gpu *gpus, unsigned count)
{
    for (const struct gpu *gpu = gpus; gpu < gpus + count; gpu++) {
        printf("GPU %u: %s (UUID: %s)\n", gpu->index, gpu->name, gpu->uuid);
        for (unsigned i = 0; i < INSTANCES; i++) {
            char name[96] = "", uuid[96] = "";
            nvmlDevice_t mig;
            if (nvmlDeviceGetMigDeviceHandleByIndex(gpu->device, i, &mig) != NVML_SUCCESS)
                continue;
            nvmlDeviceGetName(mig, name, sizeof name);
            nvmlDeviceGetUUID(mig, uuid, sizeof uuid);
            const char *profile = strstr(name, "MIG ");
            printf("  %-15s Device  %u: (UUID: %s)\n", profile != NULL ? profile : name, i, uuid);
        }
    }
    return 0;
}

/* One line of the table, as wide as the box whatever stands in it. */
static void __attribute__((format(printf, 1, 2))) boxed(const char *format, ...)
{
    char text[256];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    printf("| %-*.*s |\n", WIDTH, WIDTH, text);
}

static void rule(void)
{
    printf("+-%.*s-+\n", WIDTH, "------------------------------------------------------------------------------------------");
}

static void card_row(const struct gpu *gpu)
{
    char load[16] = "N/A", memory[64];
    if (gpu->has_rates)
        snprintf(load, sizeof load, "%u%%", gpu->rates.gpu);
    if (gpu->memory_rc == NVML_SUCCESS)
        snprintf(memory, sizeof memory, "%7lluMiB / %7lluMiB", gpu->memory.used / MIB, gpu->memory.total / MIB);
    else
        snprintf(memory, sizeof memory, "%s", nvmlErrorString(gpu->memory_rc));
    boxed("%3u  %-22.22s %-16s %23s %9s", gpu->index, gpu->name, gpu->pci.busId, memory, load);
}

/* Returns how many processes. */
static unsigned process_rows(const struct gpu *gpu)
{
    static nvmlProcessInfo_t infos[PROCESSES];
    unsigned count = PROCESSES;
    if (nvmlDeviceGetComputeRunningProcesses_v3(gpu->device, &count, infos) != NVML_SUCCESS)
        return 0;
    for (unsigned i = 0; i < count; i++) {
        char name[64] = "[Not Found]";
        nvmlSystemGetProcessName(infos[i].pid, name, sizeof name);
        boxed("%3u  %10u  %-48.48s %9lluMiB", gpu->index, infos[i].pid, name, infos[i].usedGpuMemory / MIB);
    }
    return count;
}

static int table(const struct gpu *gpus, unsigned count)
{
    char driver[64] = "";
    int cuda = 0;
    unsigned processes = 0;
    nvmlSystemGetDriverVersion(driver, sizeof driver);
    nvmlSystemGetCudaDriverVersion(&cuda);
    rule();
    boxed("NVIDIA-SMI %-14s Driver Version: %-14s CUDA Version: %d.%d", driver, driver, cuda / 1000, cuda % 1000 / 10);
    rule();
    boxed("GPU  %-22s %-16s %23s %9s", "Name", "Bus-Id", "Memory-Usage", "GPU-Util");
    rule();
    for (unsigned i = 0; i < count; i++)
        card_row(&gpus[i]);
    rule();
    boxed("GPU  %10s  %-48s %12s", "PID", "Process name", "GPU Memory");
    rule();
    for (unsigned i = 0; i < count; i++)
        processes += process_rows(&gpus[i]);
    if (processes == 0)
        boxed("No running processes found");
    rule();
    return 0;
}

/* One field of a GPU, or its heading (NULL). False: there is no such field. */
static bool print_field(const char *name, const struct gpu *gpu, bool units)
{
#define FIELD(its_name, unit, known, otherwise, format, value)                                                                 \
    if (strcmp(name, its_name) == 0) {                                                                                         \
        if (gpu == NULL)                                                                                                       \
            return printf("%s%s", name, units && unit[0] != '\0' ? " [" unit "]" : "") >= 0;                                   \
        if (!(known))                                                                                                          \
            return printf("%s", otherwise) >= 0;                                                                               \
        return printf(format "%s", value, units && unit[0] != '\0' ? " " unit : "") >= 0;                                      \
    }
#include "fields.def"
    return false;
}

static bool print_line(const char *fields, const struct gpu *gpu, bool units)
{
    char copy[512], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", fields);
    const char *between = "";
    for (const char *name = strtok_r(copy, ", ", &rest); name != NULL; name = strtok_r(NULL, ", ", &rest), between = ", ") {
        printf("%s", between);
        if (!print_field(name, gpu, units)) {
            fprintf(stderr, "Field \"%s\" is not a valid field to query.\n", name);
            return false;
        }
    }
    printf("\n");
    return true;
}

static int query(const struct gpu *gpus, unsigned count, const char *fields, const char *format)
{
    const bool units = strstr(format, "nounits") == NULL;
    bool known = strstr(format, "noheader") != NULL || print_line(fields, NULL, units);
    for (unsigned i = 0; known && i < count; i++)
        known = print_line(fields, &gpus[i], units);
    return known ? 0 : 2;
}

int main(int argc, char **argv)
{
    const char *fields = NULL, *format = "csv";
    bool listed = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-L") == 0 || strcmp(argv[i], "--list-gpus") == 0)
            listed = true;
        else if (strncmp(argv[i], "--query-gpu=", 12) == 0)
            fields = argv[i] + 12;
        else if (strncmp(argv[i], "--format=", 9) == 0)
            format = argv[i] + 9;
        else
            return fprintf(stderr, "nvidia-smi: \"%s\" is not one of -L, --query-gpu=FIELDS, --format=csv[,noheader][,nounits]\n", argv[i]), 2;
    }
    unsigned count = 0;
    nvmlReturn_t rc = nvmlInit_v2();
    if (rc == NVML_SUCCESS)
        rc = nvmlDeviceGetCount_v2(&count);
    if (rc != NVML_SUCCESS) {
        fprintf(stderr, "nvidia-smi: cannot talk to the driver: %s\n", nvmlErrorString(rc));
        return rc == NVML_ERROR_DRIVER_NOT_LOADED ? 9 : 1;
    }
    static struct gpu gpus[GPUS];
    count = count < GPUS ? count : GPUS;
    for (unsigned i = 0; i < count; i++)
        read_gpu(&gpus[i], i);
    if (fields != NULL)
        return query(gpus, count, fields, format);
    return listed ? list(gpus, count) : table(gpus, count);
}
