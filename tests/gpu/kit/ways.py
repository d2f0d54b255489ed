"""Every way to take device memory, each behind take, give and settle. Sizes are bytes; runs in the process that is measured."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Final

from cuda import (
    DEVICE,
    FLOAT,
    GLOBAL,
    PER_THREAD_STREAM,
    PINNED,
    POSIX_FD,
    READ_WRITE,
    ROW,
    TEXEL,
    AccessDesc,
    AllocationProp,
    AllocNode,
    Array3D,
    ArrayDesc,
    Location,
    Missing,
    PoolProps,
    Refused,
    call,
    must,
)  # fmt: skip


class Path:
    """One way to take memory. A block is whatever `give` needs to give it back; `at` is where its bytes can be read."""

    def take(self, size: int) -> tuple[int, Any]:
        """(CUresult, block)"""
        raise NotImplementedError

    def give(self, block: Any) -> None:
        raise NotImplementedError

    def settle(self) -> None:
        """After giving: what makes the driver let go of it."""

    def at(self, block: Any) -> int:
        """Address of the block's first byte; 0 where it has none (arrays)."""
        return int(block)


class Sync(Path):
    def take(self, size: int) -> tuple[int, Any]:
        at = c_uint64()
        return call("cuMemAlloc_v2", byref(at), c_size_t(size)), at.value

    def give(self, block: Any) -> None:
        must("cuMemFree_v2", c_uint64(block))


class Pitch(Sync):
    def take(self, size: int) -> tuple[int, Any]:
        at, pitch = c_uint64(), c_size_t()
        rc = call("cuMemAllocPitch_v2", byref(at), byref(pitch), c_size_t(8192), c_size_t(size // 8192), c_uint(16))
        return rc, at.value


class Managed(Sync):
    """Written to, since managed memory is on the GPU only then."""

    def take(self, size: int) -> tuple[int, Any]:
        at = c_uint64()
        rc = call("cuMemAllocManaged", byref(at), c_size_t(size), c_uint(GLOBAL))
        if rc == 0:
            must("cuMemsetD8_v2", at, ctypes.c_ubyte(0), c_size_t(size))
            must("cuCtxSynchronize")
        return rc, at.value


class ManagedUnwritten(Sync):
    """Brought to the GPU by a prefetch, so that what is read is what the driver put there."""

    def take(self, size: int) -> tuple[int, Any]:
        at = c_uint64()
        rc = call("cuMemAllocManaged", byref(at), c_size_t(size), c_uint(GLOBAL))
        if rc == 0:
            must("cuMemPrefetchAsync", at, c_size_t(size), c_int(0), None)
            must("cuCtxSynchronize")
        return rc, at.value


class Async(Path):
    def take(self, size: int) -> tuple[int, Any]:
        at = c_uint64()
        return call("cuMemAllocAsync", byref(at), c_size_t(size), None), at.value

    def give(self, block: Any) -> None:
        must("cuMemFreeAsync", c_uint64(block), None)

    def settle(self) -> None:
        must("cuStreamSynchronize", None)
        must("cuCtxSynchronize")


class PerThread(Path):
    """cuMemAllocAsync on the per-thread default stream, by the route the runtime takes."""

    def __init__(self) -> None:
        self._alloc = self._find("cuMemAllocAsync", ctypes.CFUNCTYPE(c_int, c_void_p, c_size_t, c_void_p))
        self._free = self._find("cuMemFreeAsync", ctypes.CFUNCTYPE(c_int, c_uint64, c_void_p))

    @staticmethod
    def _find(name: str, kind: Any) -> Any:
        at, status = c_void_p(), c_int()
        flags = c_uint64(PER_THREAD_STREAM)
        must("cuGetProcAddress_v2", name.encode(), byref(at), c_int(12000), flags, byref(status))
        if not at.value:
            raise Missing(f"{name}, per-thread")
        return kind(at.value)

    def take(self, size: int) -> tuple[int, Any]:
        at = c_uint64()
        return self._alloc(ctypes.addressof(at), size, None), at.value

    def give(self, block: Any) -> None:
        code = self._free(block, None)
        if code:
            raise Refused("cuMemFreeAsync_ptsz", code)

    def settle(self) -> None:
        must("cuStreamSynchronize_ptsz", None)
        must("cuCtxSynchronize")


def pool_props(device: int = 0) -> PoolProps:
    return PoolProps(type=PINNED, location=Location(DEVICE, device))


class Pool(Async):
    """An explicit pool that keeps what is freed, whatever it is, until it is trimmed."""

    RELEASE_THRESHOLD, RESERVED = 4, 5

    def __init__(self) -> None:
        self.pool = c_void_p()
        must("cuMemPoolCreate", byref(self.pool), byref(pool_props()))
        must("cuMemPoolSetAttribute", self.pool, c_int(self.RELEASE_THRESHOLD), byref(c_uint64(2**64 - 1)))

    def take(self, size: int) -> tuple[int, Any]:
        at = c_uint64()
        return call("cuMemAllocFromPoolAsync", byref(at), c_size_t(size), self.pool, None), at.value

    def settle(self) -> None:
        must("cuCtxSynchronize")
        must("cuMemPoolTrimTo", self.pool, c_size_t(0))

    def reserved(self) -> int:
        now = c_uint64()
        must("cuMemPoolGetAttribute", self.pool, c_int(self.RESERVED), byref(now))
        return now.value


class PoolDestroyed(Pool):
    """The same, given back by destroying the pool."""

    def settle(self) -> None:
        must("cuCtxSynchronize")
        must("cuMemPoolDestroy", self.pool)
        Pool.__init__(self)


def created(size: int, exportable: bool = False) -> tuple[int, int]:
    """cuMemCreate: (CUresult, handle)."""
    prop = AllocationProp(type=PINNED, handle_types=POSIX_FD if exportable else 0, location=Location(DEVICE, 0))
    handle = c_uint64()
    return call("cuMemCreate", byref(handle), c_size_t(size), byref(prop), c_uint64(0)), handle.value


def mapped(handle: int, size: int) -> int:
    """Map a handle to a fresh address, readable and writable; the address."""
    at = c_uint64()
    must("cuMemAddressReserve", byref(at), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
    must("cuMemMap", at, c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))
    must("cuMemSetAccess", at, c_size_t(size), byref(AccessDesc(Location(DEVICE, 0), READ_WRITE)), c_size_t(1))
    return at.value


def unmapped(at: int, size: int) -> None:
    must("cuMemUnmap", c_uint64(at), c_size_t(size))
    must("cuMemAddressFree", c_uint64(at), c_size_t(size))


class Vmm(Path):
    """Created, mapped, its handle released at once: the mapping alone keeps it."""

    def take(self, size: int) -> tuple[int, Any]:
        rc, handle = created(size)
        if rc:
            return rc, None
        at = mapped(handle, size)
        must("cuMemRelease", c_uint64(handle))
        return 0, (at, size)

    def give(self, block: Any) -> None:
        unmapped(*block)

    def at(self, block: Any) -> int:
        return int(block[0])


class VmmHandles(Path):
    """Created and never mapped."""

    def take(self, size: int) -> tuple[int, Any]:
        return created(size)

    def give(self, block: Any) -> None:
        must("cuMemRelease", c_uint64(block))

    def at(self, block: Any) -> int:  # noqa: ARG002
        return 0


class VmmTwice(Path):
    """One handle at two addresses is one block; the last unmap ends it."""

    def take(self, size: int) -> tuple[int, Any]:
        rc, handle = created(size)
        if rc:
            return rc, None
        both = mapped(handle, size), mapped(handle, size)
        must("cuMemRelease", c_uint64(handle))
        return 0, (both, size)

    def give(self, block: Any) -> None:
        both, size = block
        for at in both:
            unmapped(at, size)

    def at(self, block: Any) -> int:
        return int(block[0][0])


class VmmImported(Path):
    """Exported and imported again in the same process: still one block. Where memory is elastic, the export is what the guarantee may have no room for."""

    def take(self, size: int) -> tuple[int, Any]:
        rc, handle = created(size, exportable=True)
        if rc:
            return rc, None
        fd, again = c_int(-1), c_uint64()
        rc = call("cuMemExportToShareableHandle", byref(fd), c_uint64(handle), c_int(POSIX_FD), c_uint64(0))
        if not rc:
            rc = call("cuMemImportFromShareableHandle", byref(again), c_void_p(fd.value), c_int(POSIX_FD))
            os.close(fd.value)
        if rc:
            must("cuMemRelease", c_uint64(handle))
            return rc, None
        return 0, (handle, again.value)

    def give(self, block: Any) -> None:
        for handle in block:
            must("cuMemRelease", c_uint64(handle))

    def at(self, block: Any) -> int:  # noqa: ARG002
        return 0


class Array(Path):
    def take(self, size: int) -> tuple[int, Any]:
        made = c_void_p()
        shape = ArrayDesc(ROW // TEXEL, size // ROW, FLOAT, 4)
        return call("cuArrayCreate_v2", byref(made), byref(shape)), made.value

    def give(self, block: Any) -> None:
        must("cuArrayDestroy", c_void_p(block))

    def at(self, block: Any) -> int:  # noqa: ARG002
        return 0


class Array3(Array):
    def take(self, size: int) -> tuple[int, Any]:
        made = c_void_p()
        shape = Array3D(1024, 16, size // (1024 * 16 * TEXEL), FLOAT, 4, 0)
        return call("cuArray3DCreate_v2", byref(made), byref(shape)), made.value


class Mipmap(Array):
    """The largest level is three quarters of it."""

    def take(self, size: int) -> tuple[int, Any]:
        made = c_void_p()
        shape = Array3D(2048, size * 3 // 4 // TEXEL // 2048, 0, FLOAT, 4, 0)
        return call("cuMipmappedArrayCreate", byref(made), byref(shape), c_uint(4)), made.value

    def give(self, block: Any) -> None:
        must("cuMipmappedArrayDestroy", c_void_p(block))


class GraphNode(Path):
    """An allocation node, launched: its memory is the graph's until freed, and the device's until trimmed."""

    def take(self, size: int) -> tuple[int, Any]:
        graph, node = c_void_p(), c_void_p()
        must("cuGraphCreate", byref(graph), c_uint(0))
        preference = AllocNode(pool=pool_props(), bytes=size)
        rc = call("cuGraphAddMemAllocNode", byref(node), graph, None, c_size_t(0), byref(preference))
        if rc:
            must("cuGraphDestroy", graph)
            return rc, None
        return self.launched(graph, preference.at)

    @staticmethod
    def launched(graph: c_void_p, at: int) -> tuple[int, Any]:
        made = c_void_p()
        rc = call("cuGraphInstantiateWithFlags", byref(made), graph, c_uint64(0))
        if rc == 0:
            rc = call("cuGraphLaunch", made, None)
        if rc == 0:
            rc = call("cuStreamSynchronize", None)
        if rc:
            if made.value:
                must("cuGraphExecDestroy", made)
            must("cuGraphDestroy", graph)
            return rc, None
        return 0, (at, made.value, graph.value)

    def give(self, block: Any) -> None:
        at, made, graph = block
        must("cuMemFreeAsync", c_uint64(at), None)
        must("cuStreamSynchronize", None)
        must("cuGraphExecDestroy", c_void_p(made))
        must("cuGraphDestroy", c_void_p(graph))

    def settle(self) -> None:
        must("cuCtxSynchronize")
        must("cuDeviceGraphMemTrim", c_int(0))

    def at(self, block: Any) -> int:
        return int(block[0])


class Captured(GraphNode):
    """cuMemAllocAsync inside a capture becomes such a node."""

    def __init__(self) -> None:
        self._stream = c_void_p()
        must("cuStreamCreate", byref(self._stream), c_uint(1))

    def take(self, size: int) -> tuple[int, Any]:
        at, graph = c_uint64(), c_void_p()
        must("cuStreamBeginCapture_v2", self._stream, c_int(1))
        rc = call("cuMemAllocAsync", byref(at), c_size_t(size), self._stream)
        must("cuStreamEndCapture", self._stream, byref(graph))
        if rc:
            if graph.value:
                must("cuGraphDestroy", graph)
            return rc, None
        return self.launched(graph, at.value)


PATHS: Final[dict[str, type[Path]]] = {
    "sync": Sync, "pitch": Pitch, "managed": Managed, "managed, unwritten": ManagedUnwritten, "async": Async, "async per-thread stream": PerThread,
    "pool trimmed": Pool, "pool destroyed": PoolDestroyed, "vmm": Vmm, "vmm unmapped handles": VmmHandles,
    "vmm mapped twice": VmmTwice, "vmm export and import": VmmImported, "array": Array, "array 3D": Array3,
    "mipmapped array": Mipmap, "graph memory node": GraphNode, "captured allocation": Captured,
}  # fmt: skip
