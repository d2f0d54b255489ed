"""Memory of one GPU that another one of the same process uses: calls of container.py. Device numbers are the process's."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any, Final

import cuda
import kernels
import ways

MIB = cuda.MIB
SIZE = 4 * MIB
FEW = 4096

_contexts: list[c_void_p] = []
_kernels: list[kernels.Kernels] = []
_pools: dict[int, c_void_p] = {}
_host = c_void_p()


def peers_begin() -> list[int]:
    """Primary contexts of devices 0 and 1. Whether each can access the other."""
    cuda.must("cuInit", c_uint(0))
    for device in (0, 1):
        made = c_void_p()
        cuda.must("cuDevicePrimaryCtxRetain", byref(made), c_int(device))
        _contexts.append(made)
        _on(device)
        _kernels.append(kernels.Kernels())
    cuda.must("cuMemHostAlloc", byref(_host), c_size_t(SIZE), c_uint(1))
    can = [c_int(-1), c_int(-1)]
    for device in (0, 1):
        cuda.must("cuDeviceCanAccessPeer", byref(can[device]), c_int(device), c_int(1 - device))
    return [one.value for one in can]


def _on(device: int) -> None:
    cuda.must("cuCtxSetCurrent", _contexts[device])


def peers_enable(device: int) -> int:
    """Access of that device to the other one. The CUresult."""
    _on(device)
    return cuda.call("cuCtxEnablePeerAccess", _contexts[1 - device], c_uint(0))


def peers_disable(device: int) -> int:
    """The same of the end of it."""
    _on(device)
    return cuda.call("cuCtxDisablePeerAccess", _contexts[1 - device])


def peers_codes() -> dict[str, int]:
    """Call -> CUresult."""
    _on(0)
    seen = {
        "disabled before": peers_disable(0),
        "flags 1": cuda.call("cuCtxEnablePeerAccess", _contexts[1], c_uint(1)),
        "its own context": cuda.call("cuCtxEnablePeerAccess", _contexts[0], c_uint(0)),
        "no context": cuda.call("cuCtxEnablePeerAccess", None, c_uint(0)),
        "enabled": peers_enable(0),
        "a second time": peers_enable(0),
        "disabled": peers_disable(0),
        "disabled again": peers_disable(0),
    }
    second = c_void_p()
    cuda.must("cuCtxCreate_v2", byref(second), c_uint(0), c_int(1))
    _on(0)
    seen["another context of that device"] = cuda.call("cuCtxEnablePeerAccess", second, c_uint(0))
    cuda.must("cuCtxDestroy_v2", second)
    return seen


def peers_take(device: int, kind: str, size: int = SIZE) -> int:
    """Memory that a kernel of its own device has written (seed 5)."""
    at = c_uint64()
    _on(device)
    if kind == "plain":
        cuda.must("cuMemAlloc_v2", byref(at), c_size_t(size))
    elif kind == "pool":
        _pools[device] = c_void_p()
        cuda.must("cuDeviceGetDefaultMemPool", byref(_pools[device]), c_int(device))
        cuda.must("cuMemAllocAsync", byref(at), c_size_t(size), None)
    else:
        how, handle = cuda.AllocationProp(1, 1, cuda.Location(1, device)), c_uint64()
        cuda.must("cuMemCreate", byref(handle), c_size_t(size), byref(how), c_uint64(0))
        at.value = ways.mapped(handle.value, size) if device == 0 else _mapped(handle.value, size, device)
    write(device, at.value, 5, size)
    return at.value


def _mapped(handle: int, size: int, device: int) -> int:
    at = c_uint64()
    cuda.must("cuMemAddressReserve", byref(at), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
    cuda.must("cuMemMap", at, c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))
    if code := peers_set(at.value, device, 3, size):
        raise cuda.Refused("cuMemSetAccess", code)
    return at.value


def peers_set(at: int, device: int, flags: int, size: int = SIZE) -> int:
    """cuMemSetAccess. The CUresult."""
    access = cuda.AccessDesc(cuda.Location(1, device), flags)
    return cuda.call("cuMemSetAccess", c_uint64(at), c_size_t(size), byref(access), c_size_t(1))


def peers_set_pool(of: int, device: int, flags: int) -> int:
    """cuMemPoolSetAccess of the default pool of a device. The CUresult."""
    access = cuda.AccessDesc(cuda.Location(1, device), flags)
    return cuda.call("cuMemPoolSetAccess", _pools[of], byref(access), c_size_t(1))


def write(device: int, at: int, seed: int, size: int = SIZE) -> None:
    """By a kernel."""
    _on(device)
    _kernels[device].launch("write", at, size, seed)
    cuda.must("cuCtxSynchronize")


def peers_kernel(device: int, at: int, seed: int = 7, size: int = SIZE) -> int:
    """A kernel of that device writes there. The CUresult of waiting for it; after an error the process is of no more use."""
    _on(device)
    _kernels[device].launch("write", at, size, seed)
    return cuda.call("cuCtxSynchronize")


def peers_wrong(device: int, at: int, seed: int, size: int = SIZE) -> int:
    """Cells, counted by a kernel of that device, that `write` did not leave with that seed."""
    _on(device)
    cell = c_uint.from_address(_host.value or 0)
    cell.value = 0
    _kernels[device].launch("compare", at, size, seed, _host.value or 0)
    cuda.must("cuCtxSynchronize")
    return int(cell.value)


def _graph(to: int, from_: int) -> int:
    """A copy that is captured, and replayed."""
    stream, graph, exec_ = c_void_p(), c_void_p(), c_void_p()
    cuda.must("cuStreamCreate", byref(stream), c_uint(1))
    cuda.must("cuStreamBeginCapture_v2", stream, c_int(0))
    code = cuda.call("cuMemcpyAsync", c_uint64(to), c_uint64(from_), c_size_t(SIZE), stream)
    ended = cuda.call("cuStreamEndCapture", stream, byref(graph))
    if code or ended:
        return code or ended
    code = cuda.call("cuGraphInstantiateWithFlags", byref(exec_), graph, c_uint64(0))
    return code or cuda.call("cuGraphLaunch", exec_, stream) or cuda.call("cuStreamSynchronize", stream)


UNIFIED: Final = 4


def _two_dimensions(to: int, from_: int) -> cuda.Copy2D:
    return cuda.Copy2D(src_type=2, src_device=from_, src_pitch=FEW, dst_type=2, dst_device=to, dst_pitch=FEW, width=FEW, height=SIZE // FEW)  # fmt: skip


def _three_dimensions(to: int, from_: int) -> cuda.Copy3D:
    """Two planes. By unified addresses."""
    rows = SIZE // FEW // 2
    return cuda.Copy3D(
        src_type=UNIFIED, src_device=from_, src_pitch=FEW, src_height=rows, dst_type=UNIFIED, dst_device=to, dst_pitch=FEW, dst_height=rows,
        width=FEW, height=rows, depth=2,
    )  # fmt: skip


def _from_host(to: int) -> cuda.Copy2D:
    return cuda.Copy2D(
        src_type=cuda.HOST,
        src_host=_host.value,
        src_pitch=FEW,
        dst_type=2,
        dst_device=to,
        dst_pitch=FEW,
        width=FEW,
        height=1,
    )


def _waited(code: int) -> int:
    return code or cuda.call("cuCtxSynchronize")


COPIES: dict[str, Callable[[int, int, int], int]] = {
    "cuMemcpy": lambda to, from_, _: _waited(cuda.call("cuMemcpy", c_uint64(to), c_uint64(from_), c_size_t(SIZE))),
    "cuMemcpyDtoD": lambda to, from_, _: _waited(cuda.call("cuMemcpyDtoD_v2", c_uint64(to), c_uint64(from_), c_size_t(SIZE))),
    "cuMemcpyAsync": lambda to, from_, _: _waited(cuda.call("cuMemcpyAsync", c_uint64(to), c_uint64(from_), c_size_t(SIZE), None)),
    "cuMemcpyDtoDAsync": lambda to, from_, _: _waited(cuda.call("cuMemcpyDtoDAsync_v2", c_uint64(to), c_uint64(from_), c_size_t(SIZE), None)),
    "cuMemcpyPeer": lambda to, from_, of: _waited(cuda.call("cuMemcpyPeer", c_uint64(to), _contexts[1 - of], c_uint64(from_), _contexts[of], c_size_t(SIZE))),
    "cuMemcpy2D": lambda to, from_, _: _waited(cuda.call("cuMemcpy2D_v2", byref(_two_dimensions(to, from_)))),
    "cuMemcpy2DUnaligned": lambda to, from_, _: _waited(cuda.call("cuMemcpy2DUnaligned_v2", byref(_two_dimensions(to, from_)))),
    "cuMemcpy2DAsync": lambda to, from_, _: _waited(cuda.call("cuMemcpy2DAsync_v2", byref(_two_dimensions(to, from_)), None)),
    "cuMemcpy3D": lambda to, from_, _: _waited(cuda.call("cuMemcpy3D_v2", byref(_three_dimensions(to, from_)))),
    "cuMemcpy3DAsync": lambda to, from_, _: _waited(cuda.call("cuMemcpy3DAsync_v2", byref(_three_dimensions(to, from_)), None)),
    "a graph of cuMemcpyAsync": lambda to, from_, _: _graph(to, from_),
}  # fmt: skip
"""Name -> of an address, from another one, which is of that device."""
HOST: dict[str, Callable[[int], int]] = {
    "cuMemcpyHtoD": lambda at: cuda.call("cuMemcpyHtoD_v2", c_uint64(at), _host, c_size_t(SIZE)),
    "cuMemcpy from the host": lambda at: cuda.call("cuMemcpy", c_uint64(at), c_uint64(_host.value or 0), c_size_t(SIZE)),
    "cuMemcpy2D from the host": lambda at: _waited(cuda.call("cuMemcpy2D_v2", byref(_from_host(at)))),
    "cuMemcpyDtoH": lambda at: cuda.call("cuMemcpyDtoH_v2", _host, c_uint64(at), c_size_t(SIZE)),
    "cuMemcpyHtoDAsync": lambda at: _waited(cuda.call("cuMemcpyHtoDAsync_v2", c_uint64(at), _host, c_size_t(SIZE), None)),
    "cuMemsetD8": lambda at: _waited(cuda.call("cuMemsetD8_v2", c_uint64(at), c_ubyte(3), c_size_t(SIZE))),
}  # fmt: skip
"""Name -> of an address of the other GPU."""


def peers_copy(name: str, device: int, kind: str) -> list[Any]:
    """A copy of memory of device 0 to device 1, while `device` is current: the CUresult, and whether the content is there."""
    from_, to = peers_take(0, kind), peers_take(1, kind)
    write(0, from_, 11)
    _on(device)
    code = COPIES[name](to, from_, 0)
    return [code, code == 0 and peers_wrong(1, to, 11) == 0]


def peers_host(name: str, kind: str) -> list[Any]:
    """A copy between the host and device 1, or a fill there, while device 0 is current: the CUresult, and whether the first cell is as it should be."""
    at, cell = peers_take(1, kind), c_uint.from_address(_host.value or 0)
    cell.value = 99
    _on(0)
    code = HOST[name](at)
    wanted = 0x03030303 if "memset" in name else 5 if "DtoH" in name else 99
    if code or "DtoH" in name:
        return [code, code == 0 and cell.value == wanted]
    _on(1)
    cuda.must("cuMemcpyDtoH_v2", _host, c_uint64(at), c_size_t(FEW))
    return [code, cell.value == wanted]


def peers_access(at: int, device: int) -> list[int]:
    """cuMemGetAccess: CUresult, flags."""
    flags = c_uint64(99)
    return [cuda.call("cuMemGetAccess", byref(flags), byref(cuda.Location(1, device)), c_uint64(at)), flags.value]


def peers_fill(device: int, leave: int) -> int:
    """Takes a device's memory but for so many bytes: the bytes taken."""
    _on(device)
    free, total, taken = c_size_t(), c_size_t(), 0
    cuda.must("cuMemGetInfo_v2", byref(free), byref(total))
    for size in (1024 * MIB, 32 * MIB, 2 * MIB):
        while free.value - taken >= leave + size and cuda.call("cuMemAlloc_v2", byref(c_uint64()), c_size_t(size)) == 0:
            taken += size
    return taken


def peers_free(device: int) -> int:
    """Bytes that cuMemGetInfo has for a device."""
    _on(device)
    return cuda.info()[0]


def peers_elastic(at: int) -> bool:
    """Whether it can be swapped."""
    data = (c_char * 8)()
    cuda.must("cuPointerGetAttribute", data, c_int(7), c_uint64(at))
    return bool(int.from_bytes(data.raw, "little") >> 62 & 1)
