/* missing.h - what stands in the tables of real functions for one that the driver or the management library has not.
 *
 * So no pointer of `tangram.driver` or `tangram.management` is ever NULL, from before the driver is found on, and a call that was
 * not treated as optional returns an error and does not crash. Nothing compares those pointers with NULL: HAS (below)
 * distinguishes a missing function from a real one, where a hook has a better answer than an error.
 */
#ifndef TANGRAM_MISSING_H
#define TANGRAM_MISSING_H

#include "abi.h"
#include "views/management.h"

/* Each answers CUDA_ERROR_NOT_SUPPORTED or NVML_ERROR_FUNCTION_NOT_FOUND, and leaves its parameters unchanged. */
#define HOOK(name, base, since, ptds, params) CUresult missing_##name params;
#define REAL(name, params) CUresult missing_##name params;
#define NVML(name, params) nvmlReturn_t missing_##name params;
#define REAL_NVML(name, params) nvmlReturn_t missing_##name params;
#include "hooks/hooks.def"

/* Has this driver the function at all? Any of them may be missing, in the oldest driver or the next one. */
#define HAS(name) (tangram.driver.name != missing_##name)
#define HAS_NVML(name) (tangram.management.name != missing_##name)

#endif
