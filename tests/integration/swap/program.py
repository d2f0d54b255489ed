"""A container's program, whose kernels compute: reads one Python expression a line and answers with JSON."""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time

from tests.integration.shim.gpu_structs import Access, Location, Prop

cuda = ctypes.CDLL("libcuda.so.1")
MIB = 1 << 20
KERNELS = b"""//fake write us=param3 does=write at=param0 bytes=param1 seed=param2
//fake add us=param3 does=add at=param0 bytes=param1 times=param2
//fake compare us=0 does=compare at=param0 bytes=param1 seed=param2 to=param3
//fake endless does=wait at=param0 sets=param1
.entry endless() {}
.entry write() {}
.entry add() {}
.entry compare() {}
"""
U32, U64 = ctypes.c_uint32, ctypes.c_uint64


def check(code: int) -> None:
    assert code == 0, f"CUresult {code}"


check(cuda.cuInit(0))
context, module = ctypes.c_void_p(), ctypes.c_void_p()
check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
check(cuda.cuModuleLoadData(ctypes.byref(module), KERNELS))


def function(name: bytes) -> ctypes.c_void_p:
    found = ctypes.c_void_p()
    check(cuda.cuModuleGetFunction(ctypes.byref(found), module, name))
    return found


write_kernel, add_kernel, compare_kernel, endless_kernel = map(function, (b"write", b"add", b"compare", b"endless"))
count = ctypes.c_void_p()
check(cuda.cuMemHostAlloc(ctypes.byref(count), ctypes.c_size_t(4096), 0))
blocks: dict[int, tuple[int, int]] = {}
"""Address -> bytes, and what its cells are: i x 2654435761 + this."""


def launch(kernel: ctypes.c_void_p, *values: U32 | U64, on: ctypes.c_void_p | None = None) -> None:
    """In that stream."""
    parameters = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(one), ctypes.c_void_p) for one in values))
    check(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, on, parameters, None))


def wait() -> None:
    check(cuda.cuCtxSynchronize())


def alloc(mib: float) -> tuple[int, float]:
    """The driver's answer, and the seconds that it took."""
    began, at, size = time.monotonic(), U64(), int(mib * MIB)
    code = cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size))
    if code == 0:
        blocks[at.value] = size, 0
    return code, time.monotonic() - began


def fill(mib: float, seed: int = 0) -> int:
    """Allocates, and writes every cell."""
    code, _ = alloc(mib)
    if code == 0:
        at = list(blocks)[-1]
        write(at, seed)
    return code


def managed(mib: int) -> int:
    """Memory that cannot be moved. The driver's answer."""
    return int(cuda.cuMemAllocManaged(ctypes.byref(U64()), ctypes.c_size_t(mib * MIB), 1))


def write(at: int, seed: int) -> None:
    size, _ = blocks[at]
    launch(write_kernel, U64(at), U64(size), U32(seed), U32(0))
    blocks[at] = size, seed
    wait()


def free_all() -> None:
    for at in blocks:
        check(cuda.cuMemFree_v2(U64(at)))
    blocks.clear()


def add(us: int = 0) -> None:
    """One to each cell of everything."""
    for at, (size, seed) in blocks.items():
        launch(add_kernel, U64(at), U64(size), U32(1), U32(us))
        blocks[at] = size, (seed + 1) % 2**32


def work(seconds: float, us: int = 0) -> int:
    """Adds until so much time has passed; how often."""
    began, rounds = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        add(us)
        wait()
        rounds += 1
    return rounds


def wrong() -> int:
    """Cells that are not as they should be, by the GPU."""
    found = 0
    for at, (size, seed) in blocks.items():
        ctypes.c_uint32.from_address(count.value or 0).value = 0
        launch(compare_kernel, U64(at), U64(size), U32(seed), U64(count.value or 0))
        wait()
        found += ctypes.c_uint32.from_address(count.value or 0).value
    return found


def launch_endless() -> None:
    """A kernel that runs until `end_endless`."""
    at = (count.value or 0) + 1024
    ctypes.c_uint32.from_address(at).value = ctypes.c_uint32.from_address(at + 4).value = 0
    launch(endless_kernel, U64(at), U64(at + 4))
    while not ctypes.c_uint32.from_address(at + 4).value:
        time.sleep(0.001)


def end_endless() -> None:
    ctypes.c_uint32.from_address((count.value or 0) + 1024).value = 1
    wait()


stream = ctypes.c_void_p()
half = ctypes.c_void_p()
"""Pinned memory for half of a block."""
replayed = ctypes.c_void_p()
"""A graph of one add to the first block."""


def prepare(mib: int, seed: int = 0) -> int:
    """Two blocks of that size, which `mix` uses in a stream, and others of every kind of region, which it leaves as they are."""
    sizes: list[float] = [mib, mib, 3, 12, 12, *[0.5] * 8]
    for number, size in enumerate(sizes):
        if (code := fill(size, seed + 1000 * number)) != 0:
            return code
    first, second = list(blocks)[:2]
    check(cuda.cuStreamCreate(ctypes.byref(stream), 1))
    check(cuda.cuMemHostAlloc(ctypes.byref(half), ctypes.c_size_t(mib * MIB // 2), 0))
    graph = ctypes.c_void_p()
    check(cuda.cuStreamBeginCapture_v2(stream, 0))
    _add(first)
    check(cuda.cuStreamEndCapture(stream, ctypes.byref(graph)))
    check(cuda.cuGraphInstantiateWithFlags(ctypes.byref(replayed), graph, U64(0)))
    _echo(first, second)
    check(cuda.cuStreamSynchronize(stream))
    blocks[second] = blocks[first]
    return 0


def _add(at: int) -> None:
    launch(add_kernel, U64(at), U64(blocks[at][0]), U32(1), U32(0), on=stream)


def _echo(first: int, second: int) -> None:
    """Copies the first to the second: one half on the GPU, the other by way of the host."""
    size = ctypes.c_size_t(blocks[first][0] // 2)
    check(cuda.cuMemcpyDtoDAsync_v2(U64(second), U64(first), size, stream))
    check(cuda.cuMemcpyDtoHAsync_v2(half, U64(first + size.value), size, stream))
    check(cuda.cuMemcpyHtoDAsync_v2(U64(second + size.value), half, size, stream))


def mix(seconds: float) -> int:
    """Kernels, replays of a graph and copies in flight until so much time has passed; how many rounds."""
    first, second = list(blocks)[:2]
    began, rounds = time.monotonic(), 0
    while rounds == 0 or time.monotonic() - began < seconds:
        for _ in range(2):
            check(cuda.cuGraphLaunch(replayed, stream))
            _add(first)
            _echo(first, second)
            size, seed = blocks[first]
            blocks[first] = blocks[second] = size, (seed + 2) % 2**32
        check(cuda.cuStreamSynchronize(stream))
        rounds += 1
    return rounds


def memory() -> tuple[int, int]:
    """What the program sees: free and total MiB."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    return free.value // MIB, total.value // MIB


handles: dict[int, int] = {}
"""Address -> handle of cuMemCreate."""
DEVICE = Location(1, 0)


def expand(sizes_mib: list[int], seed: int) -> int:
    """As expandable segments do: one range of addresses, a handle for each size; every cell is written. The driver's answer."""
    base, size = U64(), sum(sizes_mib) * MIB
    check(cuda.cuMemAddressReserve(ctypes.byref(base), ctypes.c_size_t(size), ctypes.c_size_t(0), U64(0), U64(0)))
    at = base.value
    for mib in sizes_mib:
        size, handle, how = ctypes.c_size_t(mib * MIB), U64(), Prop(1, 1, DEVICE)
        code = cuda.cuMemCreate(ctypes.byref(handle), size, ctypes.byref(how), U64(0))
        if code:
            return int(code)
        check(cuda.cuMemMap(U64(at), size, ctypes.c_size_t(0), handle, U64(0)))
        check(cuda.cuMemSetAccess(U64(at), size, ctypes.byref(Access(DEVICE, 3)), ctypes.c_size_t(1)))
        handles[at], blocks[at] = handle.value, (mib * MIB, 0)
        write(at, seed)
        at += mib * MIB
    return 0


def shrink(mib: int) -> int:
    """Unmaps and releases that much, from the end on; the bytes that are left."""
    for at in sorted(handles, reverse=True):
        if mib <= 0:
            break
        size, _ = blocks.pop(at)
        check(cuda.cuMemUnmap(U64(at), ctypes.c_size_t(size)))
        check(cuda.cuMemRelease(U64(handles.pop(at))))
        mib -= size // MIB
    return sum(size for size, _ in blocks.values())


def place(number: int) -> int:
    """Where the block with that number is."""
    return sorted(handles)[number]


def export(number: int) -> int:
    """The driver's answer."""
    fd = ctypes.c_int(-1)
    return int(cuda.cuMemExportToShareableHandle(ctypes.byref(fd), U64(handles[place(number)]), 1, U64(0)))


def first_cell(number: int) -> int:
    """Read by the processor: its memory must be on the GPU."""
    return ctypes.c_uint32.from_address(place(number)).value


# Stream-ordered memory.

FORGETS_NOTHING = 2**64 - 1
streams: list[ctypes.c_void_p] = []
pieces: list[tuple[int, int, int, int]] = []
"""Address, bytes, seed, and which stream it was allocated in."""


def use_streams(number: int, *, keeps: bool) -> None:
    """`keeps`: the pool never releases at a synchronisation, as PyTorch sets it."""
    pool = ctypes.c_void_p()
    check(cuda.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0))
    check(cuda.cuMemPoolSetAttribute(pool, 4, ctypes.byref(U64(FORGETS_NOTHING if keeps else 0))))
    for _ in range(number):
        streams.append(ctypes.c_void_p())
        check(cuda.cuStreamCreate(ctypes.byref(streams[-1]), 1))


def take_piece(size: int, number: int, seed: int) -> int:
    """Allocates in that stream, and writes every cell in its order. The driver's answer."""
    at = U64()
    code = cuda.cuMemAllocAsync(ctypes.byref(at), ctypes.c_size_t(size), streams[number])
    if code == 0:
        launch(write_kernel, at, U64(size), U32(seed), U32(0), on=streams[number])
        pieces.append((at.value, size, seed, number))
    return int(code)


def give_piece(which: int, number: int) -> None:
    """Frees it in that stream, behind all that uses it, after a kernel has added up in this process's memory the cells that are wrong."""
    at, size, seed, its = pieces.pop(which)
    if number != its:
        event = ctypes.c_void_p()
        check(cuda.cuEventCreate(ctypes.byref(event), 2))
        check(cuda.cuEventRecord(event, streams[its]))
        check(cuda.cuStreamWaitEvent(streams[number], event, 0))
        check(cuda.cuEventDestroy_v2(event))
    wrong_at = (count.value or 0) + 2048 + 64 * number
    launch(compare_kernel, U64(at), U64(size), U32(seed), U64(wrong_at), on=streams[number])
    check(cuda.cuMemFreeAsync(U64(at), streams[number]))


def work_in_streams(steps: int, seed: int, most_mib: int) -> tuple[int, int]:
    """Allocations and frees at random, with kernels between them and a synchronisation now and then: refusals, and wrong cells."""
    dice, refused = random.Random(seed), 0
    for step in range(steps):
        number = dice.randrange(len(streams))
        live = sum(size for _, size, _, _ in pieces)
        if pieces and (live > most_mib * MIB or dice.random() < 0.4):
            give_piece(dice.randrange(len(pieces)), number)
        else:
            refused += take_piece(4 * dice.choice((1, 700, 50_000, MIB, 5 * MIB)), number, seed + step) != 0
        if dice.random() < 0.1:
            wait()
    while pieces and dice.random() < 0.9:
        give_piece(-1, pieces[-1][3])
    wait()
    return refused, sum(
        ctypes.c_uint32.from_address((count.value or 0) + 2048 + 64 * one).value for one in range(len(streams))
    )


def elastic(at: int) -> bool:
    number = U64()
    check(cuda.cuPointerGetAttribute(ctypes.byref(number), 7, U64(at)))
    return bool(number.value >> 62)


print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
