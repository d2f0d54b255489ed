"""What the driver tells about a pointer, for programs of gpu.py."""

from __future__ import annotations

from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_void_p, cast

from gpu_driver import MIB, cuda
from gpu_structs import Location, Prop

ATTRIBUTES = {
    "CONTEXT": 1, "MEMORY_TYPE": 2, "DEVICE_POINTER": 3, "HOST_POINTER": 4, "P2P_TOKENS": 5, "SYNC_MEMOPS": 6, "BUFFER_ID": 7,
    "IS_MANAGED": 8, "DEVICE_ORDINAL": 9, "IS_LEGACY_CUDA_IPC_CAPABLE": 10, "RANGE_START_ADDR": 11, "RANGE_SIZE": 12, "MAPPED": 13,
    "ALLOWED_HANDLE_TYPES": 14, "IS_GPU_DIRECT_RDMA_CAPABLE": 15, "ACCESS_FLAGS": 16, "MEMPOOL_HANDLE": 17, "MAPPING_SIZE": 18,
    "MAPPING_BASE_ADDR": 19, "MEMORY_BLOCK_ID": 20, "IS_HW_DECOMPRESS_CAPABLE": 21,
}  # fmt: skip
UNTOUCHED = b"\xaa" * 16


def attribute(at: int, name: str) -> list[int | str]:
    """The bytes that the driver wrote into 16 of aa, in hexadecimal."""
    data = (c_ubyte * 16)(*UNTOUCHED)
    return [cuda.cuPointerGetAttribute(data, ATTRIBUTES[name], c_uint64(at)), bytes(data).hex()]


def attributes(at: int, *names: str) -> list[int | list[int]]:
    """By one call of cuPointerGetAttributes: their first eight bytes."""
    data = [(c_ubyte * 16)() for _ in names]
    places = (c_void_p * len(names))(*(cast(one, c_void_p) for one in data))
    numbers = (c_int * len(names))(*(ATTRIBUTES[name] for name in names))
    rc = cuda.cuPointerGetAttributes(len(names), numbers, places, c_uint64(at))
    return [rc, [int.from_bytes(bytes(one)[:8], "little") for one in data]]


def sync_memops(at: int, value: int) -> list[int]:
    return [cuda.cuPointerSetAttribute(byref(c_int(value)), ATTRIBUTES["SYNC_MEMOPS"], c_uint64(at))]


def range_of(at: int) -> list[int]:
    base, size = c_uint64(), c_size_t()
    return [cuda.cuMemGetAddressRange_v2(byref(base), byref(size), c_uint64(at)), base.value, size.value]


def alloc_bytes(size: int) -> list[int]:
    at = c_uint64()
    return [cuda.cuMemAlloc_v2(byref(at), c_size_t(size)), at.value]


def alloc_rows(width: int, height: int, element: int = 4) -> list[int]:
    at, pitch = c_uint64(), c_size_t()
    rc = cuda.cuMemAllocPitch_v2(byref(at), byref(pitch), c_size_t(width), c_size_t(height), element)
    return [rc, at.value, pitch.value]


def alloc_nowhere() -> list[int]:
    return [cuda.cuMemAlloc_v2(None, c_size_t(MIB))]


def no_context() -> list[int]:
    return [cuda.cuCtxSetCurrent(None)]


def stream_done(stream: int = 0) -> list[int]:
    """By cuStreamQuery."""
    rc = cuda.cuStreamQuery(c_void_p(stream))
    return [0 if rc == 600 else rc, int(rc == 0)]


def device_handle(at: int) -> list[int]:
    """A DMA-BUF of two MiB."""
    return [cuda.cuMemGetHandleForAddressRange(byref(c_int()), c_uint64(at), c_size_t(2 * MIB), 1, c_uint64(0))]


def properties(handle: int) -> list[int | list[int]]:
    """Of a block: kind, exportable as, kind of place, its number."""
    prop = Prop()
    rc = cuda.cuMemGetAllocationPropertiesFromHandle(byref(prop), c_uint64(handle))
    return [rc, [prop.type, prop.handles, prop.location.type, prop.location.id]]


def access_of(at: int, device: int = 0) -> list[int]:
    flags = c_uint64()
    return [cuda.cuMemGetAccess(byref(flags), byref(Location(1, device)), c_uint64(at)), flags.value]


def map_at(at: int, handle: int, mib: int, offset: int = 0) -> list[int]:
    size = c_size_t(mib * MIB)
    return [cuda.cuMemMap(c_uint64(at), size, c_size_t(offset), c_uint64(handle), c_uint64(0))]


def reserve(mib: int) -> list[int]:
    at = c_uint64()
    return [cuda.cuMemAddressReserve(byref(at), c_size_t(mib * MIB), c_size_t(0), c_uint64(0), c_uint64(0)), at.value]


def unreserve(at: int, mib: int) -> list[int]:
    return [cuda.cuMemAddressFree(c_uint64(at), c_size_t(mib * MIB))]


def export_as(handle: int, kind: int) -> list[int]:
    return [cuda.cuMemExportToShareableHandle((c_ubyte * 64)(), c_uint64(handle), kind, c_uint64(0))]


def expand(blocks: int, mib: int) -> list[int]:
    """A segment of so many blocks side by side, as PyTorch's expandable segments make it."""
    rc, at = reserve(blocks * mib)
    for i in range(blocks):
        handle = c_uint64()
        prop = Prop(type=1, handles=1, location=Location(1, 0))
        rc = rc or cuda.cuMemCreate(byref(handle), c_size_t(mib * MIB), byref(prop), c_uint64(0))
        rc = rc or map_at(at + i * mib * MIB, handle.value, mib)[0]
        rc = rc or cuda.cuMemRelease(handle)
    return [rc, at]
