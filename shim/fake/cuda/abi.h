/* abi.h - the driver API's types: ours, or (for the ABI test) those of NVIDIA's cuda.h, old prototypes included. */
#ifdef FAKE_WITH_NVIDIA_HEADER
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#undef cuDeviceGetName
#else
#include "fake_cuda.h"
#endif
