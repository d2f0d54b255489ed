/* green.c - green contexts: some of a card's SMs. Here each is another name for the primary context, which it keeps alive.
 *
 * A real one has SMs of its own and its context a handle of its own; what is allocated in it is the primary context's there, too.
 */
#include "internal.h"

EXPORT CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, CUdevResourceType type)
{
    TRY(device_ok(device));
    CHECK(resource != NULL, CUDA_ERROR_INVALID_VALUE);
    CHECK(type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
    resource->type = type;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *made, CUdevResourceDesc resources, CUdevice device, unsigned flags)
{
    TRY(device_ok(device));
    CHECK(made != NULL && resources != NULL && (flags & CU_GREEN_CTX_DEFAULT_STREAM) != 0, CUDA_ERROR_INVALID_VALUE);
    CUcontext primary;
    TRY(cuDevicePrimaryCtxRetain(&primary, device));
    const CUresult rc = handle_new(made, HANDLE_GREEN, sizeof **made);
    if (rc == CUDA_SUCCESS)
        (*made)->primary = primary;
    else
        cuDevicePrimaryCtxRelease_v2(device);
    return rc;
}

EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx green)
{
    TRY(handle_ok(green, HANDLE_GREEN, CUDA_ERROR_INVALID_CONTEXT));
    const CUdevice device = green->primary->device;
    handle_free(green);
    return cuDevicePrimaryCtxRelease_v2(device);
}
