/* nvml_table.c - functions of the management library that are answered by their line in nvml.def alone.
 *
 * The driver is not called for a shared GPU: what it would fill in or change stays as it is.
 */
#include "hooks/hook.h"
#include "process.h"

static nvmlReturn_t unless_any_is_shared(nvmlReturn_t answer)
{
    return grant_ready() == GRANT_NONE ? NVML_SUCCESS : answer;
}

static nvmlReturn_t unless_this_is_shared(uintptr_t device, nvmlReturn_t answer)
{
    struct gpu *gpu;
    nvmlReturn_t rc = shared_gpu((nvmlDevice_t)device, &gpu);
    return rc == NVML_SUCCESS && gpu != NULL ? answer : rc;
}

#define UNLESS_ANYWHERE(answer) unless_any_is_shared(answer)
#define UNLESS_DEVICE(answer) unless_this_is_shared(a, answer)
#define ANSWERED(name, scope, answer)                                                                                          \
    EXPORT nvmlReturn_t name MANAGEMENT_WORDS                                                                                  \
    {                                                                                                                          \
        NEEDS_NVML(name);                                                                                                      \
        nvmlReturn_t rc = UNLESS_##scope(answer);                                                                              \
        return rc != NVML_SUCCESS ? rc : tangram.management.name(a, b, c, d, e, f);                                            \
    }

#define NVML(name, params)
#define REFUSED(name, scope) ANSWERED(name, scope, NVML_ERROR_NOT_SUPPORTED)
#define DENIED(name, scope) ANSWERED(name, scope, NVML_ERROR_NO_PERMISSION)
#include "views/nvml.def"
