/* procaddr.c - cuGetProcAddress, both forms.
 *
 * The driver answers first: it knows which form a version and a stream flag mean, and what it does not have. Its answer
 * is then replaced by our hook of that very function. A newer form of a function that we hook is returned as it is, with
 * a warning: a hook of an older form would be called with the wrong arguments.
 */
#include "hooks/hook.h"
#include "process.h"

void newer_form(const char *symbol)
{
    state_set(WIRE_UNKNOWN_FUNCTION, true);
    warn(WARN_NEWER_FUNCTION, "this driver has a newer %s than this version knows: memory allocated through it is not counted", symbol);
}

static void exchange(const char *symbol, void **at)
{
    void *hook = hook_for_address(symbol, *at);
    if (hook != NULL)
        *at = hook;
    else if (hook_has_base(symbol))
        newer_form(symbol);
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **at, int version, cuuint64_t flags)
{
    if (!driver_ready() || !HAS(cuGetProcAddress))
        return CUDA_ERROR_NOT_FOUND;
    CUresult rc = tangram.driver.cuGetProcAddress(symbol, at, version, flags);
    if (rc == CUDA_SUCCESS && at != NULL && *at != NULL)
        exchange(symbol, at);
    return rc;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **at, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *status)
{
    if (!driver_ready() || !HAS(cuGetProcAddress_v2))
        return CUDA_ERROR_NOT_FOUND;
    CUresult rc = tangram.driver.cuGetProcAddress_v2(symbol, at, version, flags, status);
    if (rc == CUDA_SUCCESS && at != NULL && *at != NULL)
        exchange(symbol, at);
    return rc;
}
