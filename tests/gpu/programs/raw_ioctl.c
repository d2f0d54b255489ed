/* raw_ioctl.c - a program without libcuda: takes GPU memory by the kernel driver's own requests, until its input ends.
 *
 *   raw_ioctl MIB         prints "held MIB" or "refused STATUS", the kernel driver's status in hexadecimal
 *
 * Linked statically. No context, no channel: only memory. The driver counts it as used, and NVML lists no process at all (H100, driver 580.159.04:
 * 2,560 MiB used, 0 before; compute, graphics and MPS lists empty). Forms from NVIDIA's open kernel modules (nvos.h, class/cl0080.h, cl2080.h, cl0040.h), driver 580.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

enum { ESCAPE_ALLOC = 0x2b, ESCAPE_REGISTER_FD = 201, ROOT = 0x0041, DEVICE = 0x0080, SUBDEVICE = 0x2080, LOCAL_MEMORY = 0x0040 };
enum { H_DEVICE = 0x5c000001, H_SUBDEVICE, H_MEMORY };

struct alloc { /* NVOS64_PARAMETERS */
    uint32_t client, parent, handle, object_class;
    uint64_t parameters, rights;
    uint32_t parameters_bytes, flags, status, pad;
};

struct device { /* NV0080_ALLOC_PARAMETERS */
    uint32_t id, client_share, target_client, target_device, flags, pad;
    uint64_t va_size, va_start, va_limit;
    uint32_t va_mode, pad2;
};

struct memory { /* NV_MEMORY_ALLOCATION_PARAMS */
    uint32_t owner, type, flags, width, height, pitch, attr, attr2, format, compression, zcull, pad;
    uint64_t range_low, range_high, size, alignment, offset, limit, address;
    uint32_t ctag, vaspace, internal_flags, tag, numa, pad2;
};

static int control;

static uint32_t allocate(uint32_t client, uint32_t parent, uint32_t *handle, uint32_t object_class, void *parameters, size_t bytes)
{
    struct alloc form = {client, parent, *handle, object_class, (uint64_t)(uintptr_t)parameters, 0, (uint32_t)bytes, 0, 0, 0};
    if (ioctl(control, _IOC(_IOC_READ | _IOC_WRITE, 'F', ESCAPE_ALLOC, sizeof form), &form) != 0)
        return 0xffffffffu;
    *handle = form.handle;
    return form.status;
}

int main(int count, char **words)
{
    const uint64_t mib = count > 1 ? strtoull(words[1], NULL, 10) : 1;
    char name[32];
    int gpu = -1;
    control = open("/dev/nvidiactl", O_RDWR);
    for (int minor = 0; minor < 16 && gpu < 0; minor++) {
        snprintf(name, sizeof name, "/dev/nvidia%d", minor);
        gpu = open(name, O_RDWR);
    }
    if (control < 0 || gpu < 0)
        return printf("refused: no device node\n"), 1;
    ioctl(gpu, _IOC(_IOC_READ | _IOC_WRITE, 'F', ESCAPE_REGISTER_FD, sizeof control), &control);
    uint32_t client = 0, device = H_DEVICE, subdevice = H_SUBDEVICE, memory = H_MEMORY, id = 0;
    struct device of_device = {0};
    struct memory of_memory = {.owner = 0x54474d52, .size = mib << 20};
    uint32_t rc = allocate(0, 0, &client, ROOT, &client, sizeof client);
    rc = rc ? rc : allocate(client, client, &device, DEVICE, &of_device, sizeof of_device);
    rc = rc ? rc : allocate(client, device, &subdevice, SUBDEVICE, &id, sizeof id);
    rc = rc ? rc : allocate(client, device, &memory, LOCAL_MEMORY, &of_memory, sizeof of_memory);
    if (rc)
        printf("refused %x\n", rc);
    else
        printf("held %llu\n", (unsigned long long)mib);
    fflush(stdout);
    return getchar() == 0;
}
