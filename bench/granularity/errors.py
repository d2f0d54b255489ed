"""What each call answers when a kernel has trapped, and of streams whose thread or green context is gone."""

from __future__ import annotations

import ctypes as c
import threading
import time
from collections.abc import Callable

from bench.granularity.driver import EMPTY, Gpu, Rows, alloc, cuda, function, load, ptr, size, u64


def errors(rows: Rows) -> None:
    """What each call answers after a kernel trapped; and streams whose thread or green context is gone."""
    gpu = Gpu()
    stream, event, other = ptr(), ptr(), ptr()
    cuda.cuStreamCreate(c.byref(stream), 1)
    cuda.cuStreamCreate(c.byref(other), 1)
    cuda.cuEventCreate(c.byref(event), 0)
    at = alloc(512)
    left: list[object] = []

    def in_thread() -> None:
        cuda.cuCtxSetCurrent(gpu.context)
        k = function(load(EMPTY))
        left.append(cuda.cuLaunchKernel_ptsz(k, 1, 1, 1, 1, 1, 1, 0, None, None, None))
        left.append(cuda.cuStreamQuery_ptsz(None))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    rows.add(
        "errors",
        "per-thread stream of an ended thread",
        1,
        "",
        "",
        "",
        "",
        f"launch, query in it {left}; sync afterwards {cuda.cuCtxSynchronize()}",
    )
    trap = b".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry f() { trap; ret; }\n\0"
    kernel, fine = function(load(trap)), function(load(EMPTY))
    rows.add(
        "errors",
        "launch of a trap",
        1,
        "",
        "",
        "",
        "",
        f"{cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None)}",
    )
    time.sleep(0.2)
    for name, call in _calls(gpu, stream, other, event, fine, at):
        rows.add("errors", f"after a trap: {name}", 1, "", "", "", "", f"answered {call()}")


def _calls(gpu: Gpu, stream: ptr, other: ptr, event: ptr, kernel: ptr, at: int) -> list[tuple[str, Callable[[], int]]]:
    """What is called after the trap. `stream` had it, `other` did not; `at` is memory, `kernel` would run well."""
    got = ptr()
    dev_at, sz, total, value = u64(), size(), size(), c.c_int()
    return [
        ("cuStreamQuery", lambda: cuda.cuStreamQuery(stream)), ("cuStreamQuery other", lambda: cuda.cuStreamQuery(other)),
        ("cuStreamSynchronize", lambda: cuda.cuStreamSynchronize(stream)), ("cuCtxSynchronize", lambda: cuda.cuCtxSynchronize()),
        ("cuEventQuery", lambda: cuda.cuEventQuery(event)), ("cuEventRecord", lambda: cuda.cuEventRecord(event, other)),
        ("cuMemAlloc", lambda: cuda.cuMemAlloc_v2(c.byref(dev_at), size(512))), ("cuMemFree", lambda: cuda.cuMemFree_v2(u64(at))),
        ("cuMemGetInfo", lambda: cuda.cuMemGetInfo_v2(c.byref(sz), c.byref(total))), ("cuLaunchKernel", lambda: cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, other, None, None)),
        ("cuStreamCreate", lambda: cuda.cuStreamCreate(c.byref(got), 0)), ("cuModuleLoadData", lambda: cuda.cuModuleLoadData(c.byref(got), EMPTY)),
        ("cuCtxGetDevice", lambda: cuda.cuCtxGetDevice(c.byref(value))), ("cuCtxGetCurrent", lambda: cuda.cuCtxGetCurrent(c.byref(got))), ("cuDeviceGetCount", lambda: cuda.cuDeviceGetCount(c.byref(value))),
        ("cuMemAllocAsync", lambda: cuda.cuMemAllocAsync(c.byref(dev_at), size(512), None)), ("cuPointerGetAttribute", lambda: cuda.cuPointerGetAttribute(c.byref(value), 2, u64(at))),
        ("cuStreamIsCapturing", lambda: cuda.cuStreamIsCapturing(other, c.byref(value))), ("cuStreamGetCtx", lambda: cuda.cuStreamGetCtx(other, c.byref(got))),
        ("cuThreadExchangeStreamCaptureMode", lambda: cuda.cuThreadExchangeStreamCaptureMode(c.byref(value))), ("cuCtxPushCurrent", lambda: cuda.cuCtxPushCurrent_v2(gpu.context)),
        ("cuStreamDestroy", lambda: cuda.cuStreamDestroy_v2(stream)), ("cuEventDestroy", lambda: cuda.cuEventDestroy_v2(event)),
        ("cuDevicePrimaryCtxGetState", lambda: cuda.cuDevicePrimaryCtxGetState(gpu.device, c.byref(c.c_uint()), c.byref(value))),
        ("cuCtxCreate_v2", lambda: cuda.cuCtxCreate_v2(c.byref(got), 0, gpu.device)),
        ("cuDevicePrimaryCtxReset", lambda: cuda.cuDevicePrimaryCtxReset_v2(gpu.device)),
        ("cuDevicePrimaryCtxRetain after reset", lambda: cuda.cuDevicePrimaryCtxRetain(c.byref(got), gpu.device)), ("cuMemAlloc after reset", lambda: cuda.cuMemAlloc_v2(c.byref(dev_at), size(512))),
    ]  # fmt: skip


def green(rows: Rows) -> None:
    gpu = Gpu()

    class Resource(c.Structure):
        _fields_ = [("bytes", c.c_ubyte * 256)]

    resource, description, context, stream, inner = Resource(), ptr(), ptr(), ptr(), ptr()
    rc = [
        cuda.cuDeviceGetDevResource(gpu.device, c.byref(resource), 1),
        cuda.cuDevResourceGenerateDesc(c.byref(description), c.byref(resource), 1),
    ]
    before = gpu.free()
    rc.append(cuda.cuGreenCtxCreate(c.byref(context), description, gpu.device, 1))
    lost = before - gpu.free()
    rc.append(cuda.cuGreenCtxStreamCreate(c.byref(stream), context, 1, 0))
    rc.append(cuda.cuCtxFromGreenCtx(c.byref(inner), context))
    kernel = function(load(EMPTY))
    rc.append(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None))
    of = ptr()
    rc.append(cuda.cuStreamGetCtx(stream, c.byref(of)))
    rows.add(
        "green",
        "create, stream, launch",
        1,
        "",
        lost,
        "",
        "",
        f"answered {rc}; primary {gpu.context.value:#x}, green's {inner.value or 0:#x}, stream's {of.value or 0:#x}",
    )
    rows.add(
        "green",
        "primary context's sync",
        1,
        "",
        "",
        "",
        "",
        f"answered {cuda.cuCtxSynchronize()}; stream query {cuda.cuStreamQuery(stream)}",
    )
    rc = [
        cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None),
        cuda.cuGreenCtxDestroy(context),
        cuda.cuStreamQuery(stream),
        cuda.cuStreamGetCtx(stream, c.byref(of)),
    ]
    rows.add("green", "destroyed before its stream", 1, "", "", "", "", f"launch, destroy, query, getctx answered {rc}")
