/* rm.h - the few bytes of the NVIDIA kernel driver's interface that the library reads and uses: x86-64 and AArch64, drivers 535 to 595.
 *
 * Facts, measured on driver 580 and published with NVIDIA's open kernel modules (nvos.h, nv_escape.h, class/cl*.h,
 * ctrl/ctrl2080/ctrl2080fifo.h, ctrl2080gpu.h), whose tags of all these branches agree: hack/driver_abi.py extracts them and
 * `make driver-abi` compares. A form of another size is not ours to read and is passed on unseen.
 *
 * AArch64: these headers have no condition on the processor. Their types are those of nvtypes.h, which has them as on any machine with pointers of 64 bits, and the
 * number of a request is made by asm-generic/ioctl.h on both. The compiler checks sizes and offsets for each (driver_abi.h). Read only: no request was made
 * to a driver on AArch64.
 */
#ifndef TANGRAM_RM_H
#define TANGRAM_RM_H

#include <stdint.h>

/* The number of a request: type 'F' in bits 8-15, the escape in bits 0-7, the size of the argument in bits 16-29. */
enum { RM_TYPE = 'F', RM_ESCAPE_FREE = 0x29, RM_ESCAPE_CONTROL = 0x2a, RM_ESCAPE_ALLOC = 0x2b, RM_ESCAPE_XFER = 211 };

#define RM_REQUEST(escape, type) (0xc0000000ul | (unsigned long)sizeof(type) << 16 | RM_TYPE << 8 | (escape))

static inline unsigned rm_type(unsigned long request) { return (unsigned)(request >> 8 & 0xff); }
static inline unsigned rm_escape(unsigned long request) { return (unsigned)(request & 0xff); }
static inline unsigned rm_size(unsigned long request) { return (unsigned)(request >> 16 & 0x3fff); }

/* Classes. A channel's class differs from one architecture to the next in all but its low byte (0xc86f on Hopper). */
enum { RM_CLIENT = 0x0041, RM_DEVICE = 0x0080, RM_SUBDEVICE = 0x2080, RM_GROUP = 0xa06c, RM_CHANNEL_LOW = 0x6f };

/* So does the class of a channel's 3D object (0xcb97 on Hopper), which OpenGL and Vulkan allocate and CUDA does not. */
enum { RM_GRAPHICS_LOW = 0x97 };

/* Engines of a channel group: graphics and compute are one engine, of which MIG makes eight; the copy engines come after. */
enum { RM_ENGINE_COMPUTE_FIRST = 1, RM_ENGINE_COMPUTE_LAST = 8, RM_ENGINE_COPY_FIRST = 9 };

enum { RM_OK = 0 };

struct rm_alloc { /* 48 bytes */
    uint32_t client, parent, handle, object_class;
    uint64_t parameters, rights;
    uint32_t parameters_bytes, flags, status, pad;
};

struct rm_alloc_short { /* 32 bytes */
    uint32_t client, parent, handle, object_class;
    uint64_t parameters;
    uint32_t parameters_bytes, status;
};

struct rm_free { /* 16 bytes */
    uint32_t client, parent, handle, status;
};

struct rm_control { /* 32 bytes */
    uint32_t client, object, command, flags;
    uint64_t parameters;
    uint32_t parameters_bytes, status;
};

struct rm_xfer { /* any of them, wrapped */
    uint32_t escape, bytes;
    uint64_t argument;
};

struct rm_group_parameters { /* the head of it */
    uint32_t error_object, ecc_object, vaspace, engine;
};

enum { RM_CHANNELS = 64, RM_COMMAND_DISABLE_CHANNELS = 0x2080110b, RM_COMMAND_GET_GID = 0x2080014a, RM_GID_BINARY = 2, RM_GID_BYTES = 256 };

struct rm_disable { /* 536 bytes */
    uint8_t disable, pad1[3];
    uint32_t channels;
    uint8_t only_scheduling, rewind, pad2[6];
    uint64_t preempt_event;
    uint32_t client[RM_CHANNELS], channel[RM_CHANNELS];
};

struct rm_gid { /* 268 bytes */
    uint32_t index, flags, bytes;
    uint8_t data[RM_GID_BYTES];
};

#include "gputime/driver_abi.h" /* the values in NVIDIA's sources, compared by the compiler */

#endif
