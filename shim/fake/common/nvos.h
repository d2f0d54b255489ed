/* nvos.h - the forms of the kernel driver's requests, as NVIDIA's open kernel modules publish them.
 *
 * Names and order are theirs: nvos.h, nv_escape.h, nv-ioctl-numbers.h, nv-ioctl.h, ctrl2080fifo.h, ctrl2080gpu.h and class/cl*.h,
 * the same in 535.183.06, 550.127.08, 570.124.06, 580.65.06 and 595.45.04 on x86-64. Nothing here comes from the library under
 * test, so that a mistake in its own forms is refused.
 */
#ifndef TANGRAM_FAKE_NVOS_H
#define TANGRAM_FAKE_NVOS_H

#include <stdint.h>
#include <sys/ioctl.h>

#define NV_IOCTL_MAGIC 'F'
enum { NV_ESC_RM_FREE = 0x29, NV_ESC_RM_CONTROL = 0x2a, NV_ESC_RM_ALLOC = 0x2b };

enum { NV01_ROOT_CLIENT = 0x41, NV01_DEVICE_0 = 0x80, NV20_SUBDEVICE_0 = 0x2080, KEPLER_CHANNEL_GROUP_A = 0xa06c, HOPPER_CHANNEL_GPFIFO_A = 0xc86f };
enum { NV2080_ENGINE_TYPE_GR0 = 1, NV2080_ENGINE_TYPE_GR7 = 8, NV2080_ENGINE_TYPE_COPY0 = 9 };
enum { NV_OK = 0, NV_ERR_INVALID_ARGUMENT = 0x1f, NV_ERR_INVALID_CHANNEL = 0x21, NV_ERR_NO_MEMORY = 0x51, NV_ERR_NOT_SUPPORTED = 0x56 };

struct NVOS00 { /* NV_ESC_RM_FREE */
    uint32_t hRoot, hObjectParent, hObjectOld, status;
};

struct NVOS64 { /* NV_ESC_RM_ALLOC */
    uint32_t hRoot, hObjectParent, hObjectNew, hClass;
    uint64_t pAllocParms, pRightsRequested;
    uint32_t paramsSize, flags, status, pad;
};

struct NVOS54 { /* NV_ESC_RM_CONTROL */
    uint32_t hClient, hObject, cmd, flags;
    uint64_t params;
    uint32_t paramsSize, status;
};

struct NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS {
    uint32_t hObjectError, hObjectEccError, hVASpace, engineType;
    uint8_t bIsCallingContextVgpuPlugin, pad[3];
};

enum { NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS = 0x2080110b, NV2080_CTRL_FIFO_DISABLE_CHANNELS_MAX_ENTRIES = 64 };
struct NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS {
    uint8_t bDisable, pad1[3];
    uint32_t numChannels;
    uint8_t bOnlyDisableScheduling, bRewindGpPut, pad2[6];
    uint64_t pRunlistPreemptEvent;
    uint32_t hClientList[NV2080_CTRL_FIFO_DISABLE_CHANNELS_MAX_ENTRIES], hChannelList[NV2080_CTRL_FIFO_DISABLE_CHANNELS_MAX_ENTRIES];
};

enum { NV2080_CTRL_CMD_GPU_GET_GID_INFO = 0x2080014a, NV2080_GPU_CMD_GPU_GET_GID_FLAGS_FORMAT_BINARY = 2, NV2080_GPU_MAX_GID_LENGTH = 256 };
struct NV2080_CTRL_GPU_GET_GID_INFO_PARAMS {
    uint32_t index, flags, length;
    uint8_t data[NV2080_GPU_MAX_GID_LENGTH];
};

#endif
