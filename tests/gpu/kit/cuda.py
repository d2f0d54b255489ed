"""The CUDA driver API as a container calls it: calls, structures, contexts.

Runs inside the process that is measured, with the library preloaded or without, on the real driver or the fake one; standard
library only. Structures are those of cuda.h (CUDA 12 and 13 agree on the ones used here). Sizes are bytes.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_ushort, c_void_p
from typing import Any, Final

MIB: Final = 2**20
OUT_OF_MEMORY: Final = 2
DEVICE, PINNED, READ_WRITE, POSIX_FD, GLOBAL = 1, 1, 3, 1, 1
PER_THREAD_STREAM: Final = 2
"""Flag of cuGetProcAddress."""

lib = ctypes.CDLL("libcuda.so.1")


class Missing(Exception):
    """This driver has no such function."""


class Refused(Exception):
    """A call that a case needs did not succeed: its name and CUresult."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} answered {code}")
        self.code = code


def call(name: str, *arguments: Any) -> int:
    """The CUresult. Integers must come wrapped, unless they are C ints."""
    try:
        function = getattr(lib, name)
    except AttributeError:
        raise Missing(name) from None
    return int(function(*arguments))


def must(name: str, *arguments: Any) -> None:
    """The call has to succeed."""
    code = call(name, *arguments)
    if code:
        raise Refused(name, code)


class Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", c_int), ("handle_types", c_int), ("location", Location), ("win32", c_void_p), ("flags", c_char * 8),
    )  # fmt: skip


class AccessDesc(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", c_int))


class PoolProps(ctypes.Structure):
    _fields_ = (
        ("type", c_int), ("handle_types", c_int), ("location", Location), ("win32", c_void_p),
        ("max_size", c_size_t), ("usage", c_ushort), ("reserved", c_char * 54),
    )  # fmt: skip


class AllocNode(ctypes.Structure):
    _fields_ = (
        ("pool", PoolProps), ("access", c_void_p), ("access_count", c_size_t), ("bytes", c_size_t), ("at", c_uint64),
    )  # fmt: skip


class ArrayDesc(ctypes.Structure):
    _fields_ = (("width", c_size_t), ("height", c_size_t), ("format", c_int), ("channels", c_uint))


class Array3D(ctypes.Structure):
    _fields_ = (
        ("width", c_size_t), ("height", c_size_t), ("depth", c_size_t), ("format", c_int), ("channels", c_uint),
        ("flags", c_uint),
    )  # fmt: skip


class Copy2D(ctypes.Structure):
    _fields_ = (
        ("src_x", c_size_t), ("src_y", c_size_t), ("src_type", c_int), ("src_host", c_void_p), ("src_device", c_uint64),
        ("src_array", c_void_p), ("src_pitch", c_size_t), ("dst_x", c_size_t), ("dst_y", c_size_t), ("dst_type", c_int),
        ("dst_host", c_void_p), ("dst_device", c_uint64), ("dst_array", c_void_p), ("dst_pitch", c_size_t),
        ("width", c_size_t), ("height", c_size_t),
    )  # fmt: skip


def _end_of_3d(of: str) -> tuple[tuple[str, type], ...]:
    return (
        (f"{of}_x", c_size_t), (f"{of}_y", c_size_t), (f"{of}_z", c_size_t), (f"{of}_level", c_size_t), (f"{of}_type", c_int), (f"{of}_host", c_void_p),
        (f"{of}_device", c_uint64), (f"{of}_array", c_void_p), (f"{of}_reserved", c_void_p), (f"{of}_pitch", c_size_t), (f"{of}_height", c_size_t),
    )  # fmt: skip


class Copy3D(ctypes.Structure):
    _fields_ = (*_end_of_3d("src"), *_end_of_3d("dst"), ("width", c_size_t), ("height", c_size_t), ("depth", c_size_t))


class IpcHandle(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_ubyte * 64),)


FLOAT, HOST, ARRAY = 0x20, 1, 3
TEXEL: Final = 16
"""Bytes of four floats."""
ROW: Final = 16384 * TEXEL


def primary() -> Any:
    made = c_void_p()
    must("cuDevicePrimaryCtxRetain", byref(made), c_int(0))
    must("cuCtxSetCurrent", made)
    return made


def made_v2() -> Any:
    made = c_void_p()
    must("cuCtxCreate_v2", byref(made), c_uint(0), c_int(0))
    return made


def made_v3() -> Any:
    made = c_void_p()
    must("cuCtxCreate_v3", byref(made), None, c_int(0), c_uint(0), c_int(0))
    return made


def made_v4() -> Any:
    made = c_void_p()
    must("cuCtxCreate_v4", byref(made), None, c_uint(0), c_int(0))
    return made


def green() -> Any:
    """All SMs; SM resources are type 1, a default stream flag 1. The buffer is larger than any version of the structure."""
    resource, description, made, current = (c_char * 512)(), c_void_p(), c_void_p(), c_void_p()
    must("cuDeviceGetDevResource", c_int(0), byref(resource), c_int(1))
    must("cuDevResourceGenerateDesc", byref(description), byref(resource), c_uint(1))
    must("cuGreenCtxCreate", byref(made), description, c_int(0), c_uint(1))
    must("cuCtxFromGreenCtx", byref(current), made)
    must("cuCtxSetCurrent", current)
    return made


CONTEXTS: Final[dict[str, tuple[Any, Any]]] = {
    "primary": (primary, lambda _: must("cuDevicePrimaryCtxRelease_v2", c_int(0))),
    "primary, reset": (primary, lambda _: must("cuDevicePrimaryCtxReset_v2", c_int(0))),
    "cuCtxCreate_v2": (made_v2, lambda made: must("cuCtxDestroy_v2", made)),
    "cuCtxCreate_v3": (made_v3, lambda made: must("cuCtxDestroy_v2", made)),
    "cuCtxCreate_v4": (made_v4, lambda made: must("cuCtxDestroy_v2", made)),
    "green": (green, lambda made: must("cuGreenCtxDestroy", made)),
}


def info() -> tuple[int, int]:
    """cuMemGetInfo: free, total."""
    free, total = c_size_t(), c_size_t()
    must("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value, total.value
