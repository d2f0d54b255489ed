"""Driver calls by ctypes, for programs that carry the library: run as a program, it evaluates one expression a line.

    alloc(100)  ->  [0, 140001234]        a CUresult, then what came back

Expressions find what is here, in gpu_code.py, in gpu_graphs.py, in gpu_pools.py and in gpu_pointers.py. Sizes are in MiB. Names are the exported ones of the C headers, so every call meets the library by its symbol.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time
from ctypes import byref, c_char, c_int, c_size_t, c_ubyte, c_uint64, c_void_p

import gpu_code
import gpu_graphs
import gpu_pointers
import gpu_pools
import gpu_process
from gpu_driver import MIB, cuda
from gpu_structs import (
    Access,
    Array,
    Array2D,
    External,
    IpcHandle,
    Location,
    PoolProps,
    Prop,
    Tile,
)


def found(names: tuple[str, ...]) -> list[object]:
    """Those which both dlsym and cuGetProcAddress find."""
    at, status = c_void_p(), c_int()
    request = cuda.cuGetProcAddress_v2
    known = [
        request(n.encode(), byref(at), 13000, c_uint64(0), byref(status)) == 0 and at.value is not None for n in names
    ]
    return [0, [n for n, requested in zip(names, known, strict=True) if requested or hasattr(cuda, n)]]


def use(device: int = 0) -> list[int]:
    context = c_void_p()
    rc = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(byref(context), device) or cuda.cuCtxSetCurrent(context)
    return [rc, context.value or 0]


def context_new(device: int = 0) -> list[int]:
    context = c_void_p()
    return [cuda.cuCtxCreate_v2(byref(context), 0, device), context.value or 0]


def context_by(name: str, device: int = 0) -> list[int]:
    """By one of the names of cuCtxCreate."""
    context = c_void_p()
    between: dict[str, list[int | None]] = {"cuCtxCreate_v3": [None, 0], "cuCtxCreate_v4": [None]}
    return [getattr(cuda, name)(byref(context), *between.get(name, []), 0, device), context.value or 0]


def green() -> list[int]:
    """A green context of all SMs, current."""
    resource, description, made, current = (c_char * 512)(), c_void_p(), c_void_p(), c_void_p()
    of_multiprocessors, default_stream = 1, 1
    codes = [
        cuda.cuDeviceGetDevResource(0, byref(resource), of_multiprocessors),
        cuda.cuDevResourceGenerateDesc(byref(description), byref(resource), 1),
        cuda.cuGreenCtxCreate(byref(made), description, 0, default_stream),
    ]
    if not any(codes):
        codes += [cuda.cuCtxFromGreenCtx(byref(current), made), cuda.cuCtxSetCurrent(current)]
    return [max(codes), made.value or 0]


def green_end(made: int) -> list[int]:
    return [cuda.cuGreenCtxDestroy(c_void_p(made))]


def initialise() -> list[int]:
    return [cuda.cuInit(0)]


def leave(device: int = 0) -> list[int]:
    return [cuda.cuDevicePrimaryCtxRelease_v2(device)]


def context_end(context: int) -> list[int]:
    return [cuda.cuCtxDestroy_v2(c_void_p(context))]


def reset(device: int = 0) -> list[int]:
    return [cuda.cuDevicePrimaryCtxReset_v2(device)]


def alloc(mib: float) -> list[int]:
    at = c_uint64()
    return [cuda.cuMemAlloc_v2(byref(at), c_size_t(int(mib * MIB))), at.value]


def churn(seconds: float, seed: int, most_mib: int = 40) -> list[int]:
    """Allocates and frees at random; how often it was refused. Any other error ends it."""
    dice, held, refused = random.Random(seed), list[int](), 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if held and dice.random() < 0.4:
            rc, *_ = free(held.pop(dice.randrange(len(held))))
        else:
            rc, at = alloc(dice.randrange(1, most_mib))
            held += [at] if rc == 0 else []
            refused += rc == 2
        if rc not in (0, 2):
            return [rc]
    for at in held:
        free(at)
    return [0, refused]


def managed(mib: float) -> list[int]:
    at = c_uint64()
    return [cuda.cuMemAllocManaged(byref(at), c_size_t(int(mib * MIB)), 1), at.value]


def host(mib: int) -> list[int]:
    """Pinned."""
    at = c_void_p()
    return [cuda.cuMemHostAlloc(byref(at), c_size_t(mib * MIB), 0), at.value or 0]


def free(at: int) -> list[int]:
    return [cuda.cuMemFree_v2(c_uint64(at))]


def info() -> list[int]:
    left, total = c_size_t(), c_size_t()
    return [cuda.cuMemGetInfo_v2(byref(left), byref(total)), left.value // MIB, total.value // MIB]


def set_limit(limit: int, value: int) -> list[int]:
    """Of the context: 0 is the stack of a thread, 1 the printf buffer, 2 the heap."""
    return [cuda.cuCtxSetLimit(limit, c_size_t(value))]


def stream_new(flags: int = 1) -> list[int]:
    stream = c_void_p()
    return [cuda.cuStreamCreate(byref(stream), flags), stream.value or 0]


def stream_alloc(mib: float, stream: int = 0, suffix: str = "") -> list[int]:
    at = c_uint64()
    call = getattr(cuda, f"cuMemAllocAsync{suffix}")
    return [call(byref(at), c_size_t(int(mib * MIB)), c_void_p(stream)), at.value]


def stream_free(at: int, stream: int = 0, suffix: str = "") -> list[int]:
    return [getattr(cuda, f"cuMemFreeAsync{suffix}")(c_uint64(at), c_void_p(stream))]


def stream_sync(stream: int = 0, suffix: str = "") -> list[int]:
    return [getattr(cuda, f"cuStreamSynchronize{suffix}")(c_void_p(stream))]


def context_sync() -> list[int]:
    return [cuda.cuCtxSynchronize()]


def event_sync() -> list[int]:
    event = c_void_p()
    rc = cuda.cuEventCreate(byref(event), 2) or cuda.cuEventRecord(event, None) or cuda.cuEventSynchronize(event)
    return [rc or cuda.cuEventDestroy_v2(event)]


def busy(milliseconds: int, stream: int = 0) -> list[int]:
    """A kernel of that length."""
    image = b"//fake spin us=param0\n.version 8.0\n.target sm_80\n.visible .entry spin(.param .u32 us) { ret; }\n"
    module, function = c_void_p(), c_void_p()
    rc = cuda.cuModuleLoadData(byref(module), image) or cuda.cuModuleGetFunction(byref(function), module, b"spin")
    argument = ctypes.c_uint32(milliseconds * 1000)
    parameters = (c_void_p * 1)(ctypes.addressof(argument))
    return [rc or cuda.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, c_void_p(stream), parameters, None)]


def pool_new(device: int = 0, kind: int = 1, location: int = 1, handles: int = 0) -> list[int]:
    pool = c_void_p()
    props = PoolProps(type=kind, handles=handles, location=Location(location, device))
    return [cuda.cuMemPoolCreate(byref(pool), byref(props)), pool.value or 0]


def pool_of(device: int = 0) -> list[int]:
    pool = c_void_p()
    return [cuda.cuDeviceGetDefaultMemPool(byref(pool), device), pool.value or 0]


def pool_default(location: int, kind: int, device: int = 0, name: str = "cuMemGetDefaultMemPool") -> list[int]:
    """By the functions of CUDA 13: of a place and a kind of memory."""
    pool = c_void_p()
    return [getattr(cuda, name)(byref(pool), byref(Location(location, device)), kind), pool.value or 0]


def pool_alloc(mib: float, pool: int, stream: int = 0, suffix: str = "") -> list[int]:
    at = c_uint64()
    call = getattr(cuda, f"cuMemAllocFromPoolAsync{suffix}")
    return [call(byref(at), c_size_t(int(mib * MIB)), c_void_p(pool), c_void_p(stream)), at.value]


def pool_end(pool: int) -> list[int]:
    return [cuda.cuMemPoolDestroy(c_void_p(pool))]


def pool_trim(pool: int, keep_mib: int = 0) -> list[int]:
    return [cuda.cuMemPoolTrimTo(c_void_p(pool), c_size_t(keep_mib * MIB))]


def pool_keep(pool: int, mib: int) -> list[int]:
    """The release threshold."""
    return [cuda.cuMemPoolSetAttribute(c_void_p(pool), 4, byref(c_uint64(mib * MIB)))]


def pool_choose(pool: int, device: int = 0) -> list[int]:
    return [cuda.cuDeviceSetMemPool(device, c_void_p(pool))]


def pool_export(pool: int, at: int) -> list[object]:
    """[CUresult, pid, the pool's descriptor, the pointer's data]."""
    fd, data = c_int(-1), IpcHandle()
    rc = cuda.cuMemPoolExportToShareableHandle(byref(fd), c_void_p(pool), 1, c_uint64(0))
    return [rc or cuda.cuMemPoolExportPointer(byref(data), c_uint64(at)), os.getpid(), fd.value, bytes(data).hex()]


def pool_open(pid: int, fd: int) -> list[int]:
    pool = c_void_p()
    mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
    return [cuda.cuMemPoolImportFromShareableHandle(byref(pool), c_void_p(mine), 1, c_uint64(0)), pool.value or 0]


def pool_import(pid: int, fd: int, data: str) -> list[int]:
    at = c_uint64()
    rc, pool = pool_open(pid, fd)
    handle = IpcHandle.from_buffer_copy(bytes.fromhex(data))
    return [rc or cuda.cuMemPoolImportPointer(byref(at), c_void_p(pool), byref(handle)), at.value]


def create(mib: int, device: int = 0, handles: int = 0) -> list[int]:
    handle = c_uint64()
    prop = Prop(type=1, handles=handles, location=Location(1, device))
    return [cuda.cuMemCreate(byref(handle), c_size_t(mib * MIB), byref(prop), c_uint64(0)), handle.value]


def release(handle: int) -> list[int]:
    return [cuda.cuMemRelease(c_uint64(handle))]


def map_block(handle: int, mib: int, *, access: bool = True, device: int = 0, flags: int = 3) -> list[int]:
    """Reserves an address and maps there."""
    at, size = c_uint64(), c_size_t(mib * MIB)
    rc = cuda.cuMemAddressReserve(byref(at), size, c_size_t(0), c_uint64(0), c_uint64(0))
    rc = rc or cuda.cuMemMap(at, size, c_size_t(0), c_uint64(handle), c_uint64(0))
    if access and rc == 0:
        rc = give_access(at.value, mib, device, flags)[0]
    return [rc, at.value]


def give_access(at: int, mib: int, device: int = 0, flags: int = 3) -> list[int]:
    access = Access(Location(1, device), flags)
    return [cuda.cuMemSetAccess(c_uint64(at), c_size_t(mib * MIB), byref(access), c_size_t(1))]


def unmap(at: int, mib: int) -> list[int]:
    return [cuda.cuMemUnmap(c_uint64(at), c_size_t(mib * MIB))]


def retain(at: int) -> list[int]:
    handle = c_uint64()
    return [cuda.cuMemRetainAllocationHandle(byref(handle), c_void_p(at)), handle.value]


def export_block(handle: int) -> list[int]:
    """[CUresult, pid, descriptor]: another process opens /proc/PID/fd/N."""
    fd = c_int(-1)
    return [cuda.cuMemExportToShareableHandle(byref(fd), c_uint64(handle), 1, c_uint64(0)), os.getpid(), fd.value]


def import_block(pid: int, fd: int) -> list[int]:
    handle = c_uint64()
    mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
    rc = cuda.cuMemImportFromShareableHandle(byref(handle), c_void_p(mine), 1)
    os.close(mine)
    return [rc, handle.value]


def array(
    width: int, height: int, *, depth: int = 0, texel: int = 0x20, channels: int = 1, flags: int = 0
) -> list[int]:
    """A float array by cuArray3DCreate."""
    made = c_void_p()
    how = Array(width, height, depth, texel, channels, flags)
    return [cuda.cuArray3DCreate_v2(byref(made), byref(how)), made.value or 0]


def array2d(width: int, height: int) -> list[int]:
    made = c_void_p()
    return [cuda.cuArrayCreate_v2(byref(made), byref(Array2D(width, height, 0x20, 1))), made.value or 0]


def array_end(made: int) -> list[int]:
    return [cuda.cuArrayDestroy(c_void_p(made))]


def tile(made: int, handle: int, suffix: str = "") -> list[int]:
    """Maps a block into the first tile of a sparse array; handle 0 unmaps it."""
    where = (c_uint64 * 4)(0, 0, 65536 << 32, 1 << 32 | 1)  # level 0, extent 65536 x 1 x 1
    info = Tile(array=made, where=where, operation=1 if handle else 2, handle=handle, devices=1)
    return [getattr(cuda, f"cuMemMapArrayAsync{suffix}")(byref(info), 1, None)]


def mipmap(width: int, height: int, levels: int) -> list[int]:
    made = c_void_p()
    how = Array(width, height, 0, 0x20, 1, 0)
    return [cuda.cuMipmappedArrayCreate(byref(made), byref(how), levels), made.value or 0]


def mipmap_end(made: int) -> list[int]:
    return [cuda.cuMipmappedArrayDestroy(c_void_p(made))]


def ipc_get(at: int) -> list[object]:
    handle = IpcHandle()
    return [cuda.cuIpcGetMemHandle(byref(handle), c_uint64(at)), bytes(handle).hex()]


def ipc_open(text: str) -> list[int]:
    at = c_uint64()
    return [cuda.cuIpcOpenMemHandle_v2(byref(at), IpcHandle.from_buffer_copy(bytes.fromhex(text)), 1), at.value]


def ipc_close(at: int) -> list[int]:
    return [cuda.cuIpcCloseMemHandle(c_uint64(at))]


def external(mib: int) -> list[int]:
    made = c_void_p()
    how = External(type=1, size=mib * MIB)
    return [cuda.cuImportExternalMemory(byref(made), byref(how)), made.value or 0]


def external_end(made: int) -> list[int]:
    return [cuda.cuDestroyExternalMemory(c_void_p(made))]


def fill(at: int, mib: float, value: int) -> list[int]:
    return [cuda.cuMemsetD8_v2(c_uint64(at), c_ubyte(value), c_size_t(int(mib * MIB)))]


def bytes_at(at: int, count: int) -> list[object]:
    raw = ctypes.create_string_buffer(count)
    return [cuda.cuMemcpyDtoH_v2(raw, c_uint64(at), c_size_t(count)), raw.raw.hex()]


def main() -> None:
    names = vars(gpu_code) | vars(gpu_graphs) | vars(gpu_pointers) | vars(gpu_pools) | vars(gpu_process) | globals()
    for line in sys.stdin:
        print(json.dumps(eval(line, names)), flush=True)


if __name__ == "__main__":
    main()
