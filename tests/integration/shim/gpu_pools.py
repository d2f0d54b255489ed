"""Pools and streams, for programs of gpu.py: attributes, access, export, events between streams."""

from __future__ import annotations

from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

from gpu_driver import cuda
from gpu_structs import Access, IpcHandle, Location

FOLLOW, OPPORTUNISTIC, INTERNAL, THRESHOLD, RESERVED, RESERVED_HIGH, USED, USED_HIGH = range(1, 9)


def pool_get(pool: int, attribute: int) -> list[int]:
    value = c_uint64()
    return [cuda.cuMemPoolGetAttribute(c_void_p(pool), attribute, byref(value)), value.value]


def pool_set(pool: int, attribute: int, value: int) -> list[int]:
    return [cuda.cuMemPoolSetAttribute(c_void_p(pool), attribute, byref(c_uint64(value)))]


def pool_bytes(size: int, pool: int, stream: int = 0) -> list[int]:
    at = c_uint64()
    return [cuda.cuMemAllocFromPoolAsync(byref(at), c_size_t(size), c_void_p(pool), c_void_p(stream)), at.value]


def pool_handle(pool: int) -> list[int]:
    """Of the pool, for another process."""
    return [cuda.cuMemPoolExportToShareableHandle(byref(c_int(-1)), c_void_p(pool), 1, c_uint64(0))]


def pool_name(at: int) -> list[int]:
    """Of the pointer, for another process."""
    return [cuda.cuMemPoolExportPointer(byref(IpcHandle()), c_uint64(at))]


def pool_access(pool: int, location: int = 1, device: int = 0) -> list[int]:
    """Opens it to that place."""
    access = Access(Location(location, device), 3)
    return [cuda.cuMemPoolSetAccess(c_void_p(pool), byref(access), c_size_t(1))]


def pool_access_of(pool: int) -> list[int]:
    flags = c_int()
    return [cuda.cuMemPoolGetAccess(byref(flags), c_void_p(pool), byref(Location(1, 0))), flags.value]


def pool_nowhere(pool: int) -> list[int]:
    """No place for the pointer."""
    return [cuda.cuMemAllocFromPoolAsync(None, c_size_t(512), c_void_p(pool), None)]


def stream_end(stream: int) -> list[int]:
    return [cuda.cuStreamDestroy_v2(c_void_p(stream))]


def stream_state(stream: int) -> list[int]:
    """600: it has work left."""
    return [0, cuda.cuStreamQuery(c_void_p(stream))]


def follows(after: int, before: int) -> list[int]:
    """What comes in the one stream stands behind what is in the other."""
    event = c_void_p()
    return [
        cuda.cuEventCreate(byref(event), 2)
        or cuda.cuEventRecord(event, c_void_p(before))
        or cuda.cuStreamWaitEvent(c_void_p(after), event, 0)
        or cuda.cuEventDestroy_v2(event)
    ]
