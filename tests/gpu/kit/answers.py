"""What the driver answers to calls about one allocation, seen by the program itself: calls of container.py.

An allocation is `plain` (cuMemAlloc, which the library serves from elastic memory where the container may burst) or `mapped` (cuMemCreate).
"""

from __future__ import annotations

import time
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

import cuda
import kernels
import ways

ATTRIBUTES = {
    "CONTEXT": 1, "MEMORY_TYPE": 2, "DEVICE_POINTER": 3, "HOST_POINTER": 4, "SYNC_MEMOPS": 6, "BUFFER_ID": 7, "IS_MANAGED": 8,
    "DEVICE_ORDINAL": 9, "IS_LEGACY_CUDA_IPC_CAPABLE": 10, "RANGE_START_ADDR": 11, "RANGE_SIZE": 12, "MAPPED": 13,
    "ALLOWED_HANDLE_TYPES": 14, "IS_GPU_DIRECT_RDMA_CAPABLE": 15, "ACCESS_FLAGS": 16, "MEMPOOL_HANDLE": 17, "MAPPING_SIZE": 18,
    "MAPPING_BASE_ADDR": 19, "MEMORY_BLOCK_ID": 20, "IS_HW_DECOMPRESS_CAPABLE": 21,
}  # fmt: skip
SYNC_MEMOPS = ATTRIBUTES["SYNC_MEMOPS"]
SIZE = 3 * cuda.MIB + 100
MAPPED_SIZE = 4 * cuda.MIB
BUSY_US = 300_000
NON_BLOCKING = 1

_kernels: list[kernels.Kernels] = []


def new(kind: str) -> dict[str, int]:
    """One allocation: its address and size."""
    if kind == "mapped":
        code, handle = ways.created(MAPPED_SIZE, exportable=True)
        if code:
            raise cuda.Refused("cuMemCreate", code)
        at = ways.mapped(handle, MAPPED_SIZE)
        cuda.must("cuMemRelease", c_uint64(handle))
        return {"at": at, "bytes": MAPPED_SIZE}
    return {"at": _alloc(), "bytes": SIZE}


def _alloc(size: int = SIZE) -> int:
    at = c_uint64()
    cuda.must("cuMemAlloc_v2", byref(at), c_size_t(size))
    return at.value


def context() -> int:
    """The current one."""
    found = c_void_p()
    cuda.must("cuCtxGetCurrent", byref(found))
    return found.value or 0


def attributes(at: int) -> dict[str, list[int]]:
    """Name -> CUresult, and what was written. Only as many bytes count as were written into sixteen of aa."""
    found = {}
    for name, number in ATTRIBUTES.items():
        data = (c_ubyte * 16)(*b"\xaa" * 16)
        code = cuda.call("cuPointerGetAttribute", data, c_int(number), c_uint64(at))
        wide = bytes(data[4:8]) != b"\xaa" * 4
        found[name] = [code, int.from_bytes(bytes(data[: 8 if wide else 4 if data[1] != 0xAA else 1]), "little")]
    return found


def calls(at: int) -> dict[str, list[int]]:
    """Name -> CUresult and figures."""
    base, size, handle, ipc = c_uint64(), c_size_t(), c_uint64(), cuda.IpcHandle()
    return {
        "cuMemGetAddressRange": [
            cuda.call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(at + 10)), base.value, size.value,
        ],
        "cuMemRetainAllocationHandle": [cuda.call("cuMemRetainAllocationHandle", byref(handle), c_void_p(at))],
        "cuIpcGetMemHandle": [cuda.call("cuIpcGetMemHandle", byref(ipc), c_uint64(at))],
        "setting SYNC_MEMOPS": [
            cuda.call("cuPointerSetAttribute", byref(c_int(1)), c_int(SYNC_MEMOPS), c_uint64(at))
        ],
    }  # fmt: skip


def free_without_context() -> int:
    """The CUresult."""
    at, current = _alloc(), context()
    cuda.must("cuCtxSetCurrent", None)
    code = cuda.call("cuMemFree_v2", c_uint64(at))
    cuda.must("cuCtxSetCurrent", c_void_p(current))
    return code


def _stream() -> c_void_p:
    made = c_void_p()
    cuda.must("cuStreamCreate", byref(made), c_uint(NON_BLOCKING))
    return made


class Busy:
    """Work for a while on a stream of its own. Whether it has ended is read in the host's memory: a query of the driver may end a capture."""

    def __init__(self) -> None:
        if not _kernels:
            _kernels.append(kernels.Kernels())
            _kernels[0].launch("spin", 1)  # loaded, so that no later launch has to
            cuda.must("cuCtxSynchronize")
        flag = c_void_p()
        cuda.must("cuMemAllocHost_v2", byref(flag), c_size_t(4))
        self.stream, self._flag = _stream(), c_uint.from_address(flag.value or 0)
        self._flag.value = 0
        _kernels[0].launch("spin", BUSY_US, stream=self.stream)
        _kernels[0].launch("write", flag.value or 0, 4, 1, stream=self.stream)

    @property
    def ended(self) -> bool:
        return self._flag.value == 1

    def wait(self) -> None:
        cuda.must("cuStreamSynchronize", self.stream)


def beside_work(what: str, mode: int | None) -> dict[str, Any]:
    """A call while a kernel runs on another stream, in a capture of that mode (0 global, 1 of this thread, 2 relaxed; None: in none).

    `code`: the CUresult. `waits`: the kernel had ended when it returned. `ends`: the capture was broken. `freed`: what was to be freed is.
    """
    at, capturing = _alloc(), _stream()
    busy, graph, made = Busy(), c_void_p(), c_uint64()
    if mode is not None:
        cuda.must("cuStreamBeginCapture_v2", capturing, c_int(mode))
    began = time.monotonic()
    code = {
        "cuMemFree": lambda: cuda.call("cuMemFree_v2", c_uint64(at)),
        "cuCtxSynchronize": lambda: cuda.call("cuCtxSynchronize"),
        "cuMemFree of an unknown pointer": lambda: cuda.call("cuMemFree_v2", c_uint64(123456)),
        "cuMemAlloc": lambda: cuda.call("cuMemAlloc_v2", byref(made), c_size_t(SIZE)),
    }[what]()
    took, waits = time.monotonic() - began, busy.ended
    ends = mode is not None and cuda.call("cuStreamEndCapture", capturing, byref(graph)) != 0
    busy.wait()
    if graph.value:
        cuda.must("cuGraphDestroy", graph)
    freed = cuda.call("cuMemFree_v2", c_uint64(at)) != 0
    if made.value:
        cuda.must("cuMemFree_v2", made)
    return {"code": code, "waits": waits, "ends": ends, "freed": freed, "took_ms": round(took * 1000, 1)}


def free_async() -> dict[str, Any]:
    """cuMemFreeAsync behind a kernel: its CUresult, whether it returned before the kernel ended, and whether the pointer was free at once."""
    at, busy = _alloc(), Busy()
    code = cuda.call("cuMemFreeAsync", c_uint64(at), busy.stream)
    before = not busy.ended
    busy.wait()
    return {"code": code, "before": before, "freed": cuda.call("cuMemFree_v2", c_uint64(at)) != 0}
