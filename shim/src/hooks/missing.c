/* missing.c - the bodies of missing.h. */
#include "hooks/missing.h"

#pragma GCC diagnostic ignored "-Wunused-parameter" /* it is there so that each has the type of the function that it stands for */

#define NOT_THERE                                                                                                              \
    {                                                                                                                          \
        return CUDA_ERROR_NOT_SUPPORTED;                                                                                       \
    }
#define HOOK(name, base, since, ptds, params) CUresult missing_##name params NOT_THERE
#define REAL(name, params) CUresult missing_##name params NOT_THERE
#define NVML(name, params)                                                                                                     \
    nvmlReturn_t missing_##name params                                                                                         \
    {                                                                                                                          \
        return NVML_ERROR_FUNCTION_NOT_FOUND;                                                                                  \
    }
#define REAL_NVML(name, params) NVML(name, params)
#include "hooks/hooks.def"
