"""One process whose kernels compute, driven by its parent: run as a program, one Python expression a line, its value as JSON.

Memory that the fake driver calls the GPU's is memory of this process, so that what kernels and copies did can be read without a copy.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.integration.shim.gpu_structs import Access, Location, Prop
from vgpu.gputime import resource_manager as rm

cuda = ctypes.CDLL("libcuda.so.1")
MIB = 1 << 20
PATTERN = 2654435761
SUBDEVICE = 0x5C000001
KERNELS = b"""//fake write us=param3 does=write at=param0 bytes=param1 seed=param2
//fake add us=param3 does=add at=param0 bytes=param1 times=param2
//fake compare us=0 does=compare at=param0 bytes=param1 seed=param2 to=param3
//fake wait us=0 does=wait at=param0
//fake meet us=0 does=wait sets=param0 at=param1
//fake nothing us=0
//fake spin us=param0
.entry write() {}
.entry add() {}
.entry compare() {}
.entry wait() {}
.entry meet() {}
.entry nothing() {}
.entry spin() {}
"""
TYPES = {"write": "QQII", "add": "QQII", "compare": "QQIQ", "wait": "Q", "meet": "QQ", "nothing": "", "spin": "I"}
C_TYPES = {"Q": ctypes.c_uint64, "I": ctypes.c_uint32}


def ok(rc: int) -> None:
    assert rc == 0, f"CUresult {rc}"


def u64(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


def cells(at: int, count: int) -> list[int]:
    return list((ctypes.c_uint32 * count).from_address(at))


def cell(at: int) -> int:
    return ctypes.c_uint32.from_address(at).value


def put(at: int, value: int) -> None:
    ctypes.c_uint32.from_address(at).value = value


def wrong(at: int, size: int, seed: int) -> int:
    """Cells that have not what `write` leaves: the obvious slow version of the kernel `compare`."""
    raw = array.array("I", ctypes.string_at(at, size))
    return sum(value != (number * PATTERN + seed) & 0xFFFFFFFF for number, value in enumerate(raw))


# Memory.


def alloc(size: int) -> int:
    at = ctypes.c_uint64()
    ok(cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size)))
    return at.value


def alloc_async(size: int, on: int = 0) -> int:
    at = ctypes.c_uint64()
    ok(cuda.cuMemAllocAsync(ctypes.byref(at), ctypes.c_size_t(size), ctypes.c_void_p(on)))
    return at.value


def free_async(at: int, on: int = 0) -> int:
    return cuda.cuMemFreeAsync(u64(at), ctypes.c_void_p(on))


def default_pool() -> ctypes.c_void_p:
    pool = ctypes.c_void_p()
    ok(cuda.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0))
    return pool


def reserved_mib() -> int:
    """By the default pool."""
    value = ctypes.c_uint64()
    ok(cuda.cuMemPoolGetAttribute(default_pool(), 5, ctypes.byref(value)))
    return value.value // MIB


def trim(keep: int = 0) -> None:
    ok(cuda.cuMemPoolTrimTo(default_pool(), ctypes.c_size_t(keep)))


def pinned(size: int) -> int:
    at = ctypes.c_void_p()
    ok(cuda.cuMemHostAlloc(ctypes.byref(at), ctypes.c_size_t(size), 0))
    assert at.value
    return at.value


def create(mib: int = 2, device: int = 0) -> int:
    handle, how = ctypes.c_uint64(), Prop(1, 1, Location(1, device))
    ok(cuda.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(mib * MIB), ctypes.byref(how), u64(0)))
    return handle.value


def reserve(mib: int) -> int:
    at = ctypes.c_uint64()
    ok(cuda.cuMemAddressReserve(ctypes.byref(at), ctypes.c_size_t(mib * MIB), ctypes.c_size_t(0), u64(0), u64(0)))
    return at.value


def map_block(at: int, handle: int, mib: int = 2) -> int:
    access = Access(Location(1, 0), 3)
    ok(cuda.cuMemMap(u64(at), ctypes.c_size_t(mib * MIB), ctypes.c_size_t(0), u64(handle), u64(0)))
    ok(cuda.cuMemSetAccess(u64(at), ctypes.c_size_t(mib * MIB), ctypes.byref(access), ctypes.c_size_t(1)))
    return at


def blocks(count: int, mib: int = 2) -> int:
    """Mapped side by side; only the maps keep them."""
    at = reserve(count * mib)
    for number in range(count):
        handle = create(mib)
        map_block(at + number * mib * MIB, handle, mib)
        ok(cuda.cuMemRelease(u64(handle)))
    return at


def unmap(at: int, mib: int = 2) -> int:
    return cuda.cuMemUnmap(u64(at), ctypes.c_size_t(mib * MIB))


def renew(at: int, mib: int = 2) -> None:
    """Another block in the place of one, with its content."""
    content = ctypes.string_at(at, mib * MIB)
    ok(unmap(at, mib))
    handle = create(mib)
    map_block(at, handle, mib)
    ok(cuda.cuMemRelease(u64(handle)))
    assert not any(ctypes.string_at(at, mib * MIB))
    ctypes.memmove(at, content, mib * MIB)


def export(handle: int) -> int:
    fd = ctypes.c_int()
    ok(cuda.cuMemExportToShareableHandle(ctypes.byref(fd), u64(handle), 1, u64(0)))
    return fd.value


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: it is passed by value."""

    _fields_ = (("raw", ctypes.c_ubyte * 64),)


def ipc_name(at: int) -> str:
    handle = IpcHandle()
    ok(cuda.cuIpcGetMemHandle(ctypes.byref(handle), u64(at)))
    return bytes(handle.raw).hex()


def ipc_open(name: str) -> int:
    at = ctypes.c_uint64()
    ok(cuda.cuIpcOpenMemHandle_v2(ctypes.byref(at), IpcHandle.from_buffer_copy(bytes.fromhex(name)), 1))
    return at.value


def close(fd: int) -> None:
    os.close(fd)


def map_file(path: str, size: int) -> int:
    """A file of the host, mapped."""
    with Path(path).open("r+b") as file:
        kept.append(mmap.mmap(file.fileno(), size))
    return ctypes.addressof(ctypes.c_char.from_buffer(kept[-1]))


def take(pid: int, fd: int, mib: int = 2) -> int:
    """The block behind a descriptor of another process, mapped here and kept by the map alone."""
    handle = ctypes.c_uint64()
    with Path(f"/proc/{pid}/fd/{fd}").open("rb") as file:
        ok(cuda.cuMemImportFromShareableHandle(ctypes.byref(handle), ctypes.c_void_p(file.fileno()), 1))
    at = map_block(reserve(mib), handle.value, mib)
    ok(cuda.cuMemRelease(u64(handle.value)))
    return at


def used_mib() -> int:
    left, total = ctypes.c_size_t(), ctypes.c_size_t()
    ok(cuda.cuMemGetInfo_v2(ctypes.byref(left), ctypes.byref(total)))
    return (total.value - left.value) // MIB


# Work.


def stream(flags: int = 1) -> int:
    made = ctypes.c_void_p()
    ok(cuda.cuStreamCreate(ctypes.byref(made), flags))
    return made.value or 0


def launch(name: str, *values: int, on: int = 0) -> int:
    kept = [C_TYPES[kind](value) for kind, value in zip(TYPES[name], values, strict=True)]
    parameters = (ctypes.c_void_p * max(1, len(kept)))(*(ctypes.addressof(one) for one in kept))
    rc: int = cuda.cuLaunchKernel(functions[name], 1, 1, 1, 1, 1, 1, 0, ctypes.c_void_p(on), parameters, None)
    return rc


def copy(to: int, source: int, size: int, on: int) -> int:
    return cuda.cuMemcpyAsync(u64(to), u64(source), ctypes.c_size_t(size), ctypes.c_void_p(on))


def copy_now(to: int, source: int, size: int) -> int:
    return cuda.cuMemcpy(u64(to), u64(source), ctypes.c_size_t(size))


def fill(at: int, value: int, size: int, on: int) -> int:
    return cuda.cuMemsetD8Async(u64(at), ctypes.c_ubyte(value), ctypes.c_size_t(size), ctypes.c_void_p(on))


def fill_now(at: int, value: int, size: int) -> int:
    return cuda.cuMemsetD8_v2(u64(at), ctypes.c_ubyte(value), ctypes.c_size_t(size))


def done(on: int = 0) -> int:
    return cuda.cuStreamSynchronize(ctypes.c_void_p(on))


def query(on: int = 0) -> int:
    return cuda.cuStreamQuery(ctypes.c_void_p(on))


def host_function(at: int, on: int) -> None:
    """A host function that puts 1 there."""
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: put(at, 1))
    kept.append(run)
    ok(cuda.cuLaunchHostFunc(ctypes.c_void_p(on), run, None))


def order(before: int, after: int) -> None:
    """What comes in one stream stands behind what is in the other."""
    event = ctypes.c_void_p()
    ok(cuda.cuEventCreate(ctypes.byref(event), 0))
    ok(cuda.cuEventRecord(event, ctypes.c_void_p(before)))
    ok(cuda.cuStreamWaitEvent(ctypes.c_void_p(after), event, 0))


def graph_of(on: int, what: str) -> int:
    """An executable graph of what that expression queues on the stream."""
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    ok(cuda.cuStreamBeginCapture_v2(ctypes.c_void_p(on), 0))
    eval(what)
    ok(cuda.cuStreamEndCapture(ctypes.c_void_p(on), ctypes.byref(graph)))
    ok(cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, u64(0)))
    return executable.value or 0


def replay(graph: int, on: int) -> None:
    ok(cuda.cuGraphLaunch(ctypes.c_void_p(graph), ctypes.c_void_p(on)))


class Texture(ctypes.Structure):
    """CUDA_RESOURCE_DESC of linear memory, one channel of bytes."""

    _fields_ = (
        ("type", ctypes.c_int), ("at", ctypes.c_uint64), ("format", ctypes.c_int), ("channels", ctypes.c_uint32), ("size", ctypes.c_size_t),
        ("more", ctypes.c_int * 26), ("flags", ctypes.c_uint32),
    )  # fmt: skip


class Fill(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("at", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint32), ("element", ctypes.c_uint32), ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )  # fmt: skip


def texture(at: int, size: int) -> int:
    made = ctypes.c_uint64()
    return cuda.cuTexObjectCreate(ctypes.byref(made), ctypes.byref(Texture(2, at, 1, 1, size)), None, None)


def filling_graph(at: int, size: int) -> int:
    """Makes a graph with a node that fills."""
    graph, node = ctypes.c_void_p(), ctypes.c_void_p()
    ok(cuda.cuGraphCreate(ctypes.byref(graph), 0))
    how = Fill(at, 0, 0, 1, size, 1)
    return cuda.cuGraphAddMemsetNode(ctypes.byref(node), graph, None, ctypes.c_size_t(0), ctypes.byref(how), context)


def set_memops(at: int) -> int:
    return cuda.cuPointerSetAttribute(ctypes.byref(ctypes.c_uint(1)), 6, u64(at))


def attribute(at: int, number: int) -> list[int]:
    value = ctypes.c_uint64(77)
    return [cuda.cuPointerGetAttribute(ctypes.byref(value), number, u64(at)), value.value]


# Beside it.


def beside(expression: str) -> None:
    """Evaluated by another thread; `result` waits for it."""

    def run() -> None:
        ok(cuda.cuCtxSetCurrent(context))
        results.append(eval(expression))

    threads.append(threading.Thread(target=run))
    threads[-1].start()


def result() -> Any:
    threads.pop().join()
    return results.pop()


def until(expression: str) -> bool:
    while not eval(expression):
        time.sleep(0.001)
    return True


def still(expression: str, seconds: float = 0.03) -> bool:
    """Is its value the same after that time?"""
    before = eval(expression)
    time.sleep(seconds)
    return bool(before == eval(expression))


def switch(client: int, channels: list[int], disable: bool) -> int:
    """Suspends or resumes channels, of this process or another one."""
    files = Path("/proc/self/fd").iterdir()
    fd = next(int(file.name) for file in files if "nvidia-fake-driver" in str(file.readlink()))
    parameters = ctypes.create_string_buffer(
        rm.disable_parameters(client, channels, disable=disable), rm.PARAMETERS_BYTES
    )
    argument = rm.control(client, SUBDEVICE, ctypes.addressof(parameters))
    fcntl.ioctl(fd, rm.CONTROL_REQUEST, argument)
    return rm.status(argument)


# Several GPUs.


def on_gpu(device: int, name: str = "") -> None:
    """Makes a context of that device current: the process's first there, or a further one for each name."""
    if (device, name) not in contexts:
        made = ctypes.c_void_p()
        ok(cuda.cuCtxCreate_v2(ctypes.byref(made), 0, device))
        contexts[device, name] = made, _functions()
    made, found = contexts[device, name]
    ok(cuda.cuCtxSetCurrent(made))
    functions.update(found)


def end_context(device: int, name: str = "") -> None:
    ok(cuda.cuCtxDestroy_v2(contexts.pop((device, name))[0]))


def enable(of: int, name: str = "", flags: int = 0) -> int:
    """Of the current context, to the memory of that one."""
    return cuda.cuCtxEnablePeerAccess(contexts[of, name][0], flags)


def disable(of: int, name: str = "") -> int:
    return cuda.cuCtxDisablePeerAccess(contexts[of, name][0])


def can_access(device: int, peer: int) -> int:
    answer = ctypes.c_int(7)
    ok(cuda.cuDeviceCanAccessPeer(ctypes.byref(answer), device, peer))
    return answer.value


def open_to(at: int, access: dict[int, int], mib: int = 2) -> int:
    """cuMemSetAccess of device -> flags."""
    those = (Access * len(access))(*(Access(Location(1, device), flags) for device, flags in access.items()))
    return cuda.cuMemSetAccess(u64(at), u64(mib * MIB), those, u64(len(access)))


def access_of(at: int, device: int) -> int:
    flags = ctypes.c_ulonglong(7)
    ok(cuda.cuMemGetAccess(ctypes.byref(flags), ctypes.byref(Location(1, device)), u64(at)))
    return flags.value


def mapped(handle: int, access: dict[int, int], mib: int) -> int:
    """Only the map keeps it."""
    at = reserve(mib)
    ok(cuda.cuMemMap(u64(at), u64(mib * MIB), u64(0), u64(handle), u64(0)))
    ok(cuda.cuMemRelease(u64(handle)))
    ok(open_to(at, access, mib))
    return at


def block_on(device: int, access: dict[int, int], mib: int = 2) -> int:
    return mapped(create(mib, device), access, mib)


def copy_peer(to: int, to_device: int, source: int, from_device: int, size: int) -> int:
    ends = contexts[to_device, ""][0], contexts[from_device, ""][0]
    return cuda.cuMemcpyPeer(u64(to), ends[0], u64(source), ends[1], u64(size))


def open_pool(pool: ctypes.c_void_p, device: int, flags: int) -> int:
    return cuda.cuMemPoolSetAccess(pool, ctypes.byref(Access(Location(1, device), flags)), u64(1))


contexts: dict[tuple[int, str], tuple[ctypes.c_void_p, dict[str, ctypes.c_void_p]]] = {}
threads: list[threading.Thread] = []
results: list[Any] = []
kept: list[Any] = []
functions: dict[str, ctypes.c_void_p] = {}
context = ctypes.c_void_p()


def _functions() -> dict[str, ctypes.c_void_p]:
    """Of the current context."""
    module, found = ctypes.c_void_p(), {}
    ok(cuda.cuModuleLoadData(ctypes.byref(module), KERNELS))
    for name in TYPES:
        found[name] = ctypes.c_void_p()
        ok(cuda.cuModuleGetFunction(ctypes.byref(found[name]), module, name.encode()))
    return found


def begin() -> None:
    ok(cuda.cuInit(0))
    ok(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
    functions.update(_functions())
    contexts[0, ""] = context, dict(functions)


def main() -> None:
    begin()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(eval(line)), flush=True)


if __name__ == "__main__":
    main()
