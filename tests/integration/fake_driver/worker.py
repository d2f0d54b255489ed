"""One process that uses the fake libcuda, driven by its parent: run as a program, one JSON list a line.

    ["cuMemAlloc", 1048576]  ->  [0, address]

Calls name the functions below. It stands for a container's process in tests that need several.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

lib = ctypes.CDLL("libcuda.so.1")


class ArrayDescriptor(ctypes.Structure):
    """CUDA_ARRAY3D_DESCRIPTOR."""

    _fields_ = (
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
        ("format", ctypes.c_int),
        ("channels", ctypes.c_uint),
        ("flags", ctypes.c_uint),
    )


STREAM, EVENT, MEMORY = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
SPIN = b"""//fake spin us=param0
.version 8.0
.target sm_80
.visible .entry spin(.param .u32 us) { ret; }
"""


def cuInit() -> list[Any]:  # noqa: N802
    return [lib.cuInit(0)]


def context(device: int) -> list[Any]:
    made = ctypes.c_void_p()
    return [lib.cuCtxCreate_v2(ctypes.byref(made), 0, device), made.value]


def retain(device: int) -> list[Any]:
    made = ctypes.c_void_p()
    rc = lib.cuDevicePrimaryCtxRetain(ctypes.byref(made), device)
    return [rc or lib.cuCtxSetCurrent(made), made.value]


def release(device: int) -> list[Any]:
    return [lib.cuDevicePrimaryCtxRelease_v2(device)]


def churn(size: int) -> list[Any]:
    """Allocates and frees until the process is killed."""
    at = ctypes.c_uint64()
    while True:
        lib.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size))
        lib.cuMemFree_v2(at)


def alloc(size: int) -> list[Any]:
    at = ctypes.c_uint64()
    return [lib.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size)), at.value]


def managed(size: int) -> list[Any]:
    at = ctypes.c_uint64()
    return [lib.cuMemAllocManaged(ctypes.byref(at), ctypes.c_size_t(size), 1), at.value]


def managed_pool(size: int) -> list[Any]:
    """Memory of the device's default managed pool."""
    pool, at, place = ctypes.c_void_p(), ctypes.c_uint64(), (ctypes.c_int * 2)(1, 0)
    rc = lib.cuMemGetDefaultMemPool(ctypes.byref(pool), place, 2)
    return [rc or lib.cuMemAllocFromPoolAsync(ctypes.byref(at), ctypes.c_size_t(size), pool, None), at.value]


def free(at: int) -> list[Any]:
    return [lib.cuMemFree_v2(ctypes.c_uint64(at))]


def info() -> list[Any]:
    left, total = ctypes.c_size_t(), ctypes.c_size_t()
    return [lib.cuMemGetInfo_v2(ctypes.byref(left), ctypes.byref(total)), left.value, total.value]


def replay(steps: list[int]) -> list[Any]:
    """Allocate (size > 0) or free (-number of the step that allocated - 1); answer the bytes lost after each step."""
    before = info()[1]
    at: dict[int, int] = {}
    lost = []
    for number, step in enumerate(steps):
        rc = free(at.pop(-step - 1))[0] if step < 0 else 0
        if step > 0:
            rc, at[number] = alloc(step)
        if rc != 0:
            return [rc]
        lost.append(before - info()[1])
    return [0, lost]


def array(width: int, height: int, depth: int = 0) -> list[Any]:
    """An array of bytes."""
    how = ArrayDescriptor(width, height, depth, 1, 1, 0)
    made = ctypes.c_void_p()
    return [lib.cuArray3DCreate_v2(ctypes.byref(made), ctypes.byref(how)), made.value]


def arrays_lose(shape: list[int], levels: int, count: int) -> list[Any]:
    """So many arrays (levels > 0: mipmapped) of [width, height, depth, format, channels, flags]; the bytes lost after each."""
    how, before, made, lost = ArrayDescriptor(*shape), info()[1], [], []
    for _ in range(count):
        one = ctypes.c_void_p()
        rc = (
            lib.cuMipmappedArrayCreate(ctypes.byref(one), ctypes.byref(how), levels)
            if levels
            else lib.cuArray3DCreate_v2(ctypes.byref(one), ctypes.byref(how))
        )
        if rc != 0:
            return [rc]
        made.append(one)
        lost.append(before - info()[1])
    destroy = lib.cuMipmappedArrayDestroy if levels else lib.cuArrayDestroy
    assert [destroy(one) for one in made] == [0] * count
    assert info()[1] == before
    return [0, lost]


def array_destroy(handle: int) -> list[Any]:
    return [lib.cuArrayDestroy(ctypes.c_void_p(handle))]


def count() -> list[Any]:
    number = ctypes.c_int()
    return [lib.cuDeviceGetCount(ctypes.byref(number)), number.value]


def uuid(device: int) -> list[Any]:
    raw = (ctypes.c_ubyte * 16)()
    return [lib.cuDeviceGetUuid_v2(raw, device), bytes(raw).hex()]


def name(device: int) -> list[Any]:
    text = ctypes.create_string_buffer(128)
    return [lib.cuDeviceGetName(text, 128, device), text.value.decode()]


def write(at: int, text: str) -> list[Any]:
    raw = text.encode()
    return [lib.cuMemcpyHtoD_v2(ctypes.c_uint64(at), raw, ctypes.c_size_t(len(raw)))]


def read(at: int, size: int) -> list[Any]:
    raw = ctypes.create_string_buffer(size)
    return [lib.cuMemcpyDtoH_v2(raw, ctypes.c_uint64(at), ctypes.c_size_t(size)), raw.raw.decode(errors="replace")]


def ipc_get(at: int) -> list[Any]:
    handle = (ctypes.c_ubyte * 64)()
    return [lib.cuIpcGetMemHandle(handle, ctypes.c_uint64(at)), bytes(handle).hex()]


def ipc_open(handle: str) -> list[Any]:
    class Handle(ctypes.Structure):
        _fields_ = [("raw", ctypes.c_ubyte * 64)]

    at = ctypes.c_uint64()
    return [lib.cuIpcOpenMemHandle_v2(ctypes.byref(at), Handle.from_buffer_copy(bytes.fromhex(handle)), 1), at.value]


def ipc_close(at: int) -> list[Any]:
    return [lib.cuIpcCloseMemHandle(ctypes.c_uint64(at))]


def launch(microseconds: int, times: int = 1) -> list[Any]:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    rc = lib.cuModuleLoadData(ctypes.byref(module), SPIN) or lib.cuModuleGetFunction(
        ctypes.byref(function), module, b"spin"
    )
    argument = ctypes.c_uint32(microseconds)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    for _ in range(times):
        rc = rc or lib.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, None, parameters, None)
    return [rc]


def launch_broken(error: int) -> list[Any]:
    """A kernel that ends in the error at once."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    image = b"//fake broken us=0 error=%d\n.visible .entry broken() { ret; }\n" % error
    rc = lib.cuModuleLoadData(ctypes.byref(module), image)
    rc = rc or lib.cuModuleGetFunction(ctypes.byref(function), module, b"broken")
    return [rc or lib.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, None, None, None)]


def prepare() -> list[Any]:
    """A stream, an event and memory for every_call."""
    rc = lib.cuStreamCreate(ctypes.byref(STREAM), 1) or lib.cuEventCreate(ctypes.byref(EVENT), 0)
    return [rc or lib.cuMemAlloc_v2(ctypes.byref(MEMORY), ctypes.c_size_t(512))]


def every_call() -> list[Any]:
    """What calls answer: (those that end with the process's kernels, those that do not)."""
    out, two = ctypes.c_void_p(), (ctypes.c_size_t * 2)()
    mode, flags, active = ctypes.c_int(0), ctypes.c_uint(), ctypes.c_int()
    ref = ctypes.byref
    pointer = lib.cuPointerGetAttribute(ref(mode), 2, MEMORY)
    failing = {
        "cuStreamQuery": lib.cuStreamQuery(STREAM),
        "cuStreamQuery of NULL": lib.cuStreamQuery(None),
        "cuStreamSynchronize": lib.cuStreamSynchronize(STREAM),
        "cuCtxSynchronize": lib.cuCtxSynchronize(),
        "cuEventQuery": lib.cuEventQuery(EVENT),
        "cuEventRecord": lib.cuEventRecord(EVENT, STREAM),
        "cuMemAlloc": lib.cuMemAlloc_v2(ref(out), ctypes.c_size_t(512)),
        "cuMemFree": lib.cuMemFree_v2(MEMORY),
        "cuMemGetInfo": lib.cuMemGetInfo_v2(ref(two), ref(two, 8)),
        "cuStreamCreate": lib.cuStreamCreate(ref(out), 0),
        "cuModuleLoadData": lib.cuModuleLoadData(ref(out), SPIN),
        "cuMemAllocAsync": lib.cuMemAllocAsync(ref(out), ctypes.c_size_t(512), STREAM),
        "cuStreamIsCapturing": lib.cuStreamIsCapturing(STREAM, ref(mode)),
        "cuStreamGetCtx": lib.cuStreamGetCtx(STREAM, ref(out)),
        "cuStreamDestroy": lib.cuStreamDestroy_v2(STREAM),
        "cuEventDestroy": lib.cuEventDestroy_v2(EVENT),
        "cuCtxCreate": lib.cuCtxCreate_v2(ref(out), 0, 0),
    }
    succeeding = {
        "cuCtxGetDevice": lib.cuCtxGetDevice(ref(mode)),
        "cuCtxGetCurrent": lib.cuCtxGetCurrent(ref(out)),
        "cuDeviceGetCount": lib.cuDeviceGetCount(ref(mode)),
        "cuPointerGetAttribute": pointer,
        "cuThreadExchangeStreamCaptureMode": lib.cuThreadExchangeStreamCaptureMode(ref(ctypes.c_int(0))),
        "cuCtxPushCurrent": lib.cuCtxPushCurrent_v2(out),
        "cuDevicePrimaryCtxGetState": lib.cuDevicePrimaryCtxGetState(0, ref(flags), ref(active)),
    }
    return [0, failing, succeeding]


def reset() -> list[Any]:
    """Reset the primary context: its own answer, and that of an allocation and of a new retain after it."""
    out = ctypes.c_void_p()
    rc = lib.cuDevicePrimaryCtxReset_v2(0)
    allocated = lib.cuMemAlloc_v2(ctypes.byref(out), ctypes.c_size_t(512))
    return [rc, allocated, lib.cuDevicePrimaryCtxRetain(ctypes.byref(out), 0)]


def found(name: str) -> list[Any]:
    """Whether cuGetProcAddress finds the name."""
    at, status = ctypes.c_void_p(), ctypes.c_int()
    rc = lib.cuGetProcAddress_v2(name.encode(), ctypes.byref(at), 13000, ctypes.c_uint64(0), ctypes.byref(status))
    return [rc, at.value is not None]


def exported(name: str) -> list[Any]:
    """Whether dlsym finds the symbol."""
    return [0, hasattr(ctypes.CDLL("libcuda.so.1"), name)]


def load(text: str) -> list[Any]:
    module = ctypes.c_void_p()
    return [lib.cuModuleLoadData(ctypes.byref(module), text.encode()), module.value]


def load_bytes(image: str) -> list[Any]:
    """An image in hexadecimal."""
    module = ctypes.c_void_p()
    return [lib.cuModuleLoadData(ctypes.byref(module), bytes.fromhex(image)), module.value]


def variable(module: int, name: str) -> list[Any]:
    """[CUresult, [address, bytes]]"""
    at, size = ctypes.c_uint64(), ctypes.c_size_t()
    rc = lib.cuModuleGetGlobal_v2(ctypes.byref(at), ctypes.byref(size), ctypes.c_void_p(module), name.encode())
    return [rc, [at.value, size.value]]


def kernel(module: int, name: str) -> list[Any]:
    made = ctypes.c_void_p()
    return [lib.cuModuleGetFunction(ctypes.byref(made), ctypes.c_void_p(module), name.encode()), made.value]


def local_bytes(made: int) -> list[Any]:
    value = ctypes.c_int()
    return [lib.cuFuncGetAttribute(ctypes.byref(value), 3, ctypes.c_void_p(made)), value.value]


def launch_function(made: int, stream: int = 0) -> list[Any]:
    return [lib.cuLaunchKernel(ctypes.c_void_p(made), 1, 1, 1, 1, 1, 1, 0, ctypes.c_void_p(stream), None, None)]


def set_limit(limit: int, value: int) -> list[Any]:
    return [lib.cuCtxSetLimit(limit, ctypes.c_size_t(value))]


def limit(number: int) -> list[Any]:
    value = ctypes.c_size_t()
    return [lib.cuCtxGetLimit(ctypes.byref(value), number), value.value]


def stream() -> list[Any]:
    made = ctypes.c_void_p()
    return [lib.cuStreamCreate(ctypes.byref(made), 1), made.value]


def stream_end(made: int) -> list[Any]:
    return [lib.cuStreamDestroy_v2(ctypes.c_void_p(made))]


def unload(module: int) -> list[Any]:
    return [lib.cuModuleUnload(ctypes.c_void_p(module))]


def synchronize() -> list[Any]:
    return [lib.cuCtxSynchronize()]


def query() -> list[Any]:
    return [lib.cuStreamQuery(None)]


def forked_init() -> list[Any]:
    """cuInit in a child after fork; its result as the child's exit status."""
    child = os.fork()
    if child == 0:
        os._exit(lib.cuInit(0))
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


if __name__ == "__main__":
    for line in sys.stdin:
        function, *arguments = json.loads(line)
        print(json.dumps(globals()[function](*arguments)), flush=True)
