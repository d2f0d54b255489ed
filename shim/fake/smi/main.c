/* main.c - nvidia-smi's most used faces: -L, a table, --query-gpu=... --format=csv[,noheader][,nounits].
 *
 * All it prints comes from NVML, so that whatever stands in front of NVML in a container shows here.
 */
#define _GNU_SOURCE
#include "fake_nvml.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB (1ull << 20)
#define INSTANCES 7u
#define PROCESSES 1024u
#define WIDTH 78

static int quit(const char *what, nvmlReturn_t rc)
{
    fprintf(stderr, "nvidia-smi: %s: %s\n", what, nvmlErrorString(rc));
    return rc == NVML_ERROR_DRIVER_NOT_LOADED ? 9 : 1;
}

static void list_card(unsigned index, nvmlDevice_t device)
{
    char name[96] = "", uuid[96] = "";
    nvmlDevice_t mig;
    nvmlDeviceGetName(device, name, sizeof name);
    nvmlDeviceGetUUID(device, uuid, sizeof uuid);
    printf("GPU %u: %s (UUID: %s)\n", index, name, uuid);
    for (unsigned i = 0; i < INSTANCES; i++) {
        if (nvmlDeviceGetMigDeviceHandleByIndex(device, i, &mig) != NVML_SUCCESS)
            continue;
        nvmlDeviceGetName(mig, name, sizeof name);
        nvmlDeviceGetUUID(mig, uuid, sizeof uuid);
        const char *profile = strstr(name, "MIG ");
        printf("  %-15s Device  %u: (UUID: %s)\n", profile != NULL ? profile : name, i, uuid);
    }
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

static void row(unsigned index, nvmlDevice_t device)
{
    char name[96] = "", load[16] = "N/A";
    nvmlMemory_t memory = {0};
    nvmlPciInfo_t pci = {.busId = ""};
    nvmlUtilization_t rates;
    nvmlDeviceGetName(device, name, sizeof name);
    nvmlDeviceGetPciInfo_v3(device, &pci);
    const nvmlReturn_t rc = nvmlDeviceGetMemoryInfo(device, &memory);
    if (nvmlDeviceGetUtilizationRates(device, &rates) == NVML_SUCCESS)
        snprintf(load, sizeof load, "%u%%", rates.gpu);
    if (rc != NVML_SUCCESS)
        boxed("%3u  %-22.22s %-16s %23s %9s", index, name, pci.busId, nvmlErrorString(rc), load);
    else
        boxed("%3u  %-22.22s %-16s %7lluMiB / %7lluMiB %9s", index, name, pci.busId, memory.used / MIB, memory.total / MIB, load);
}

static void process_rows(unsigned index, nvmlDevice_t device, unsigned *printed)
{
    static nvmlProcessInfo_t infos[PROCESSES];
    unsigned count = PROCESSES;
    if (nvmlDeviceGetComputeRunningProcesses_v3(device, &count, infos) != NVML_SUCCESS)
        return;
    for (unsigned i = 0; i < count; i++, (*printed)++) {
        char name[64] = "[Not Found]";
        nvmlSystemGetProcessName(infos[i].pid, name, sizeof name);
        boxed("%3u  %10u  %-48.48s %9lluMiB", index, infos[i].pid, name, infos[i].usedGpuMemory / MIB);
    }
}

static int table(unsigned count)
{
    char driver[64] = "";
    int cuda = 0;
    unsigned printed = 0;
    nvmlDevice_t device;
    nvmlSystemGetDriverVersion(driver, sizeof driver);
    nvmlSystemGetCudaDriverVersion(&cuda);
    rule();
    boxed("NVIDIA-SMI %-14s Driver Version: %-14s CUDA Version: %d.%d", driver, driver, cuda / 1000, cuda % 1000 / 10);
    rule();
    boxed("GPU  %-22s %-16s %23s %9s", "Name", "Bus-Id", "Memory-Usage", "GPU-Util");
    rule();
    for (unsigned i = 0; i < count; i++)
        if (nvmlDeviceGetHandleByIndex_v2(i, &device) == NVML_SUCCESS)
            row(i, device);
    rule();
    boxed("GPU  %10s  %-48s %12s", "PID", "Process name", "GPU Memory");
    rule();
    for (unsigned i = 0; i < count; i++)
        if (nvmlDeviceGetHandleByIndex_v2(i, &device) == NVML_SUCCESS)
            process_rows(i, device, &printed);
    if (printed == 0)
        boxed("No running processes found");
    rule();
    return 0;
}

/* One field of one card as text. Returns false for a field that is not known. */
static int field(const char *name, unsigned index, nvmlDevice_t device, int units, char *text, size_t room)
{
    nvmlMemory_t memory = {0};
    nvmlUtilization_t rates = {0};
    nvmlPciInfo_t pci = {.busId = ""};
    unsigned now = 0, pending = 0;
    const int is_memory = strncmp(name, "memory.", 7) == 0;
    if (is_memory && nvmlDeviceGetMemoryInfo(device, &memory) != NVML_SUCCESS)
        return snprintf(text, room, "[Unknown Error]") > 0;
    if (is_memory) {
        const unsigned long long bytes = strcmp(name, "memory.total") == 0  ? memory.total
                                         : strcmp(name, "memory.used") == 0 ? memory.used
                                                                            : memory.free;
        return snprintf(text, room, "%llu%s", bytes / MIB, units ? " MiB" : "") > 0;
    }
    if (strcmp(name, "index") == 0)
        return snprintf(text, room, "%u", index) > 0;
    if (strcmp(name, "uuid") == 0 || strcmp(name, "gpu_uuid") == 0)
        return nvmlDeviceGetUUID(device, text, (unsigned)room) == NVML_SUCCESS;
    if (strcmp(name, "name") == 0 || strcmp(name, "gpu_name") == 0)
        return nvmlDeviceGetName(device, text, (unsigned)room) == NVML_SUCCESS;
    if (strcmp(name, "driver_version") == 0)
        return nvmlSystemGetDriverVersion(text, (unsigned)room) == NVML_SUCCESS;
    if (strcmp(name, "pci.bus_id") == 0) {
        nvmlDeviceGetPciInfo_v3(device, &pci);
        return snprintf(text, room, "%s", pci.busId) > 0;
    }
    if (strcmp(name, "utilization.gpu") == 0) {
        const int has = nvmlDeviceGetUtilizationRates(device, &rates) == NVML_SUCCESS;
        return has ? snprintf(text, room, "%u%s", rates.gpu, units ? " %" : "") > 0 : snprintf(text, room, "[N/A]") > 0;
    }
    if (strcmp(name, "mig.mode.current") == 0) {
        const int has = nvmlDeviceGetMigMode(device, &now, &pending) == NVML_SUCCESS;
        return snprintf(text, room, "%s", !has ? "[N/A]" : now ? "Enabled" : "Disabled") > 0;
    }
    return 0;
}

static void heading(const char *name, int units)
{
    const char *unit = strncmp(name, "memory.", 7) == 0 ? " [MiB]" : strcmp(name, "utilization.gpu") == 0 ? " [%]" : "";
    printf("%s%s", name, units ? unit : "");
}

static int query(unsigned count, const char *fields, const char *format)
{
    char *names[32], copy[512], *rest = NULL;
    unsigned wanted = 0;
    const int units = strstr(format, "nounits") == NULL;
    snprintf(copy, sizeof copy, "%s", fields);
    for (char *name = strtok_r(copy, ", ", &rest); name != NULL && wanted < 32; name = strtok_r(NULL, ", ", &rest))
        names[wanted++] = name;
    for (unsigned f = 0; f < wanted && strstr(format, "noheader") == NULL; f++) {
        printf("%s", f == 0 ? "" : ", ");
        heading(names[f], units);
        printf("%s", f + 1 == wanted ? "\n" : "");
    }
    for (unsigned i = 0; i < count; i++) {
        nvmlDevice_t device;
        nvmlReturn_t rc = nvmlDeviceGetHandleByIndex_v2(i, &device);
        if (rc != NVML_SUCCESS)
            return quit("card", rc);
        for (unsigned f = 0; f < wanted; f++) {
            char text[128] = "";
            if (!field(names[f], i, device, units, text, sizeof text)) {
                fprintf(stderr, "Field \"%s\" is not a valid field to query.\n", names[f]);
                return 2;
            }
            printf("%s%s%s", f == 0 ? "" : ", ", text, f + 1 == wanted ? "\n" : "");
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    const char *fields = NULL, *format = "csv";
    int list = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-L") == 0 || strcmp(argv[i], "--list-gpus") == 0)
            list = 1;
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
    if (rc != NVML_SUCCESS)
        return quit("cannot talk to the driver", rc);
    if (fields != NULL)
        return query(count, fields, format);
    for (unsigned i = 0; list && i < count; i++) {
        nvmlDevice_t device;
        if (nvmlDeviceGetHandleByIndex_v2(i, &device) == NVML_SUCCESS)
            list_card(i, device);
    }
    return list ? 0 : table(count);
}
