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

#define INSTANCES 7u
#define PROCESSES 1024u
#define VALUE_BYTES 128
#define WIDTH 78
#define RULE "+--------------------------------------------------------------------------------+\n"

struct field {
    const char *unit;
    char value[VALUE_BYTES];
};

/* A field of a device, or nothing but its unit (NULL). False: there is no such field. */
static bool read_field(const char *name, nvmlDevice_t device, struct field *field)
{
    struct {
        unsigned number, pending;
        char text[96];
        nvmlPciInfo_t pci;
        nvmlMemory_t memory;
        nvmlUtilization_t rates;
    } of = {0};
    nvmlReturn_t rc = NVML_SUCCESS;
    field->unit = NULL;
#define FIELD(its_name, its_unit, call, format, its_value)                                                                     \
    if (strcmp(name, its_name) == 0) {                                                                                         \
        field->unit = its_unit;                                                                                                \
        rc = device == NULL ? NVML_SUCCESS : call;                                                                             \
        snprintf(field->value, VALUE_BYTES, format, its_value);                                                                \
    }
#include "fields.def"
    if (rc != NVML_SUCCESS) {
        field->unit = "";
        snprintf(field->value, VALUE_BYTES, "[%s]", rc == NVML_ERROR_NOT_SUPPORTED ? "N/A" : nvmlErrorString(rc));
    }
    return field->unit != NULL;
}

static nvmlDevice_t device_at(unsigned index)
{
    nvmlDevice_t device = NULL;
    nvmlDeviceGetHandleByIndex_v2(index, &device);
    return device;
}

static int list(unsigned count)
{
    struct field name, uuid;
    nvmlDevice_t mig;
    for (unsigned gpu = 0; gpu < count; gpu++) {
        read_field("name", device_at(gpu), &name);
        read_field("uuid", device_at(gpu), &uuid);
        printf("GPU %u: %s (UUID: %s)\n", gpu, name.value, uuid.value);
        for (unsigned i = 0; i < INSTANCES; i++) {
            if (nvmlDeviceGetMigDeviceHandleByIndex(device_at(gpu), i, &mig) != NVML_SUCCESS)
                continue;
            read_field("name", mig, &name);
            read_field("uuid", mig, &uuid);
            const char *profile = strstr(name.value, "MIG ");
            printf("  %-15s Device  %u: (UUID: %s)\n", profile != NULL ? profile : name.value, i, uuid.value);
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

static void gpu_row(nvmlDevice_t device)
{
    static const char *const names[] = {"index", "name", "pci.bus_id", "memory.used", "memory.total", "utilization.gpu"};
    struct field field[6];
    for (unsigned i = 0; i < 6; i++) {
        read_field(names[i], device, &field[i]);
        strcat(field[i].value, field[i].unit);
    }
    boxed("%3s  %-22.22s %-16s %10s / %10s %9s", field[0].value, field[1].value, field[2].value, field[3].value, field[4].value, field[5].value);
}

/* Returns how many processes. */
static unsigned process_rows(unsigned gpu)
{
    static nvmlProcessInfo_t infos[PROCESSES];
    unsigned count = PROCESSES;
    if (nvmlDeviceGetComputeRunningProcesses_v3(device_at(gpu), &count, infos) != NVML_SUCCESS)
        return 0;
    for (unsigned i = 0; i < count; i++) {
        char name[64] = "[Not Found]";
        nvmlSystemGetProcessName(infos[i].pid, name, sizeof name);
        boxed("%3u  %10u  %-48.48s %9lluMiB", gpu, infos[i].pid, name, infos[i].usedGpuMemory >> 20);
    }
    return count;
}

static int table(unsigned count)
{
    char driver[64] = "";
    int cuda = 0;
    unsigned processes = 0;
    nvmlSystemGetDriverVersion(driver, sizeof driver);
    nvmlSystemGetCudaDriverVersion(&cuda);
    printf(RULE);
    boxed("NVIDIA-SMI %-14s Driver Version: %-14s CUDA Version: %d.%d", driver, driver, cuda / 1000, cuda % 1000 / 10);
    printf(RULE);
    boxed("GPU  %-22s %-16s %23s %9s", "Name", "Bus-Id", "Memory-Usage", "GPU-Util");
    printf(RULE);
    for (unsigned gpu = 0; gpu < count; gpu++)
        gpu_row(device_at(gpu));
    printf(RULE);
    boxed("GPU  %10s  %-48s %12s", "PID", "Process name", "GPU Memory");
    printf(RULE);
    for (unsigned gpu = 0; gpu < count; gpu++)
        processes += process_rows(gpu);
    if (processes == 0)
        boxed("No running processes found");
    printf(RULE);
    return 0;
}

/* The fields of a device, or their headings (NULL). False: one of them does not exist. */
static bool print_line(const char *fields, nvmlDevice_t device, bool units)
{
    char copy[512], *rest = NULL;
    const char *between = "";
    struct field field;
    snprintf(copy, sizeof copy, "%s", fields);
    for (const char *name = strtok_r(copy, ", ", &rest); name != NULL; name = strtok_r(NULL, ", ", &rest), between = ", ") {
        if (!read_field(name, device, &field))
            return fprintf(stderr, "Field \"%s\" is not a valid field to query.\n", name), false;
        printf("%s%s", between, device == NULL ? name : field.value);
        if (units && field.unit[0] != '\0')
            printf(device == NULL ? " [%s]" : " %s", field.unit);
    }
    printf("\n");
    return true;
}

static int query(unsigned count, const char *fields, const char *format)
{
    const bool units = strstr(format, "nounits") == NULL;
    bool known = strstr(format, "noheader") != NULL || print_line(fields, NULL, units);
    for (unsigned gpu = 0; known && gpu < count; gpu++)
        known = print_line(fields, device_at(gpu), units);
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
    if (fields != NULL)
        return query(count, fields, format);
    return listed ? list(count) : table(count);
}
