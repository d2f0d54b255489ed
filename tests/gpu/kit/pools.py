"""What the driver answers about stream-ordered memory and its pools, seen by the program itself: a call of container.py."""

from __future__ import annotations

from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

import answers
import cuda
import ways

FOLLOW, OPPORTUNISTIC, INTERNAL, THRESHOLD, RESERVED, RESERVED_HIGH, USED, USED_HIGH = range(1, 9)
MIB = cuda.MIB
SMALL, LARGE, WHOLE = 3000, 5 * MIB + 100, 64 * MIB
ALL_KEPT = 2**64 - 1


class _Pool:
    """A pool of the program's."""

    def __init__(self, threshold: int = 0) -> None:
        self.handle = c_void_p()
        cuda.must("cuMemPoolCreate", byref(self.handle), byref(ways.pool_props()))
        self.set(THRESHOLD, threshold)

    def set(self, attribute: int, value: int) -> int:
        return cuda.call("cuMemPoolSetAttribute", self.handle, c_int(attribute), byref(c_uint64(value)))

    def get(self, attribute: int) -> int:
        value = c_uint64()
        cuda.must("cuMemPoolGetAttribute", self.handle, c_int(attribute), byref(value))
        return value.value

    def take(self, size: int, stream: c_void_p | None = None) -> int:
        at = c_uint64()
        cuda.must("cuMemAllocFromPoolAsync", byref(at), c_size_t(size), self.handle, stream)
        return at.value

    def end(self) -> int:
        return cuda.call("cuMemPoolDestroy", self.handle)


def _free(at: int, stream: c_void_p | None = None) -> int:
    return cuda.call("cuMemFreeAsync", c_uint64(at), stream)


def pool_figures() -> dict[str, Any]:
    """Row -> what a program sees of a pool's attributes, on a stream without other work."""
    pool = _Pool()
    seen: dict[str, Any] = {
        f"default of attribute {number}": pool.get(number) for number in range(FOLLOW, THRESHOLD + 1)
    }
    first = pool.take(SMALL)
    seen["used after 3000 bytes"] = pool.get(USED)
    second = pool.take(LARGE)
    seen["used after 5 MiB and 100 bytes more"] = pool.get(USED)
    seen["reserved, MiB"] = pool.get(RESERVED) / MIB
    seen["a high set to 1"] = pool.set(USED_HIGH, 1)
    seen["0 bytes"] = [cuda.call("cuMemAllocFromPoolAsync", byref(c_uint64(7)), c_size_t(0), pool.handle, None)]
    code = _free(first)
    seen["cuMemFreeAsync"], seen["a second time"] = code, _free(first)
    seen["used after it"] = pool.get(USED)
    cuda.must("cuStreamSynchronize", None)
    seen["used after a synchronisation"] = pool.get(USED)
    seen["used high"] = pool.get(USED_HIGH)
    pool.set(USED_HIGH, 0)
    seen["used high, reset"] = pool.get(USED_HIGH)
    seen["cuMemFree"] = cuda.call("cuMemFree_v2", c_uint64(second))
    seen["reserved after cuMemFree, MiB"] = pool.get(RESERVED) / MIB
    cuda.must("cuCtxSynchronize")
    seen["reserved after a synchronisation"] = pool.get(RESERVED)
    seen["destroyed"] = pool.end()
    return seen


def pool_reserves() -> dict[str, Any]:
    """The same of what a pool keeps."""
    pool = _Pool(ALL_KEPT)
    pieces = [pool.take(WHOLE) for _ in range(4)]
    for at in pieces[:3]:
        _free(at)
    cuda.must("cuCtxSynchronize")
    seen: dict[str, Any] = {"kept by the threshold, MiB": pool.get(RESERVED) / MIB}
    cuda.must("cuMemPoolTrimTo", pool.handle, c_size_t(3 * WHOLE))
    seen["after a trim to 192 MiB"] = pool.get(RESERVED) / MIB
    cuda.must("cuMemPoolTrimTo", pool.handle, c_size_t(0))
    seen["after a trim to 0, MiB, with 64 live"] = pool.get(RESERVED) / MIB
    seen["destroyed with live memory"] = pool.end()
    seen["its pointer is freed"] = _free(pieces[3])
    cuda.must("cuCtxSynchronize")
    seen["and again"] = _free(pieces[3])
    return seen


def pool_reuse() -> dict[str, Any]:
    """Whether memory that was freed in one stream is returned again, while that stream has work and after it."""
    pool, other = _Pool(ALL_KEPT), answers._stream()
    busy = answers.Busy()
    at = pool.take(WHOLE, busy.stream)
    _free(at, busy.stream)
    used_meanwhile = pool.get(USED)
    same = pool.take(WHOLE, busy.stream)
    _free(same, busy.stream)
    pool.set(INTERNAL, 0)
    elsewhere = pool.take(WHOLE, other)
    event = c_void_p()
    cuda.must("cuEventCreate", byref(event), c_int(2))
    cuda.must("cuEventRecord", event, busy.stream)
    follower = answers._stream()
    cuda.must("cuStreamWaitEvent", follower, event, c_int(0))
    behind = pool.take(WHOLE, follower)
    ended = busy.ended
    _free(behind, follower)
    busy.wait()
    cuda.must("cuStreamSynchronize", follower)
    later = pool.take(WHOLE, other)
    return {
        "the work had not ended": not ended,
        "used while the free is behind work, MiB": used_meanwhile / MIB,
        "in the same stream at once": same == at,
        "in another stream while it has work": elsewhere == at,
        "in a stream that waits for an event behind the free": behind == at,
        "in another stream when it has ended": later in (at, behind),
    }


def pool_pointer() -> dict[str, Any]:
    """Attributes of a pointer into a pool's memory, and calls about it."""
    pool = _Pool()
    at = pool.take(SMALL)
    made = answers.attributes(at + 10)
    ipc, descriptor = cuda.IpcHandle(), c_int(-1)
    seen: dict[str, Any] = {name: value for name, value in made.items() if name not in ("BUFFER_ID", "MEMORY_BLOCK_ID")}
    seen["DEVICE_POINTER"][1] -= at
    seen["RANGE_START_ADDR"][1] -= at
    seen["MEMPOOL_HANDLE"][1] = seen["MEMPOOL_HANDLE"][1] == pool.handle.value
    seen["HOST_POINTER"] = seen["HOST_POINTER"][:1]
    for name in ("MAPPING_BASE_ADDR", "MAPPING_SIZE"):
        seen[name] = seen[name][:1]
    seen["cuMemPoolExportPointer"] = cuda.call("cuMemPoolExportPointer", byref(ipc), c_uint64(at))
    seen["cuMemPoolExportToShareableHandle"] = cuda.call(
        "cuMemPoolExportToShareableHandle", byref(descriptor), pool.handle, c_int(1), c_uint64(0)
    )
    seen["cuIpcGetMemHandle"] = cuda.call("cuIpcGetMemHandle", byref(ipc), c_uint64(at))
    seen["cuMemRetainAllocationHandle"] = cuda.call("cuMemRetainAllocationHandle", byref(c_uint64()), c_void_p(at))
    current = answers.context()
    cuda.must("cuCtxSetCurrent", None)
    seen["cuMemFree without a current context"] = cuda.call("cuMemFree_v2", c_uint64(at))
    cuda.must("cuCtxSetCurrent", c_void_p(current))
    return seen


def pool_beside_work() -> dict[str, Any]:
    """cuMemFree and cuMemFreeAsync of a pool's memory beside work and in captures: the CUresult, whether it waited, whether the capture ended."""
    seen: dict[str, Any] = {}
    pool = _Pool()
    for name, mode in (("no capture", None), ("global", 0), ("thread-local", 1), ("relaxed", 2)):
        at, capturing, graph = pool.take(LARGE), answers._stream(), c_void_p()
        cuda.must("cuCtxSynchronize")
        busy = answers.Busy()
        if mode is not None:
            cuda.must("cuStreamBeginCapture_v2", capturing, c_int(mode))
        code = cuda.call("cuMemFree_v2", c_uint64(at))
        waits = busy.ended
        ends = mode is not None and cuda.call("cuStreamEndCapture", capturing, byref(graph)) != 0
        busy.wait()
        seen[f"cuMemFree, {name}"] = [code, waits, ends]
    at, capturing, graph = pool.take(LARGE), answers._stream(), c_void_p()
    cuda.must("cuCtxSynchronize")
    cuda.must("cuStreamBeginCapture_v2", capturing, c_int(2))
    code = _free(at, capturing)
    seen["cuMemFreeAsync in a capture"] = [code, cuda.call("cuStreamEndCapture", capturing, byref(graph)) != 0]
    return seen
