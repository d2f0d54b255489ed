"""A process of a container, driven by its parent: one JSON list a line in, one JSON object a line out. Its calls are the functions of this
file, of answers.py, of pools.py and of peers.py.

    ["fill", "sync", [268435456, 2097152]]  ->  {"ok": {"codes": [2, 2], "taken": 8053063680}}

Run by path (`python tests/gpu/kit/container.py`), so that it imports nothing of the repository but its neighbours.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import socket
import sys
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
import answers
import cuda
import kernels
import peers
import pools
import ways

BUFFER_ID = 7
ELASTIC = 1 << 62
"""Set in the number of an allocation that can be swapped: docs/development/elastic-memory.md."""

paths: dict[str, ways.Path] = {}
held: dict[str, list[Any]] = {}
contexts: list[tuple[str, Any]] = []
ipc: list[int] = []
kernel = c_void_p()


def _path(name: str) -> ways.Path:
    if name not in paths:
        paths[name], held[name] = ways.PATHS[name](), []
    return paths[name]


def start(way: str) -> int:
    """cuInit and a context. The CUresult of the first call that fails."""
    try:
        cuda.must("cuInit", c_uint(0))
        contexts.append((way, cuda.CONTEXTS[way][0]()))
    except cuda.Refused as refused:
        return refused.code
    return 0


def end_context() -> None:
    """End the last context with all that is in it."""
    way, made = contexts.pop()
    held.clear()
    paths.clear()
    cuda.CONTEXTS[way][1](made)


def info() -> list[int]:
    return list(cuda.info())


def take(name: str, size: int, count: int = 1) -> list[int]:
    """CUresults."""
    path, codes = _path(name), []
    for _ in range(count):
        code, block = path.take(size)
        codes.append(code)
        if code == 0:
            held[name].append(block)
    return codes


def fill(name: str, sizes: list[int], most: int = 1 << 62) -> dict[str, Any]:
    """Blocks of each size, cyclically, until one is refused: the refusals' codes, bytes taken."""
    path, codes, taken = _path(name), [], 0
    for size in sizes:
        code = 0
        while code == 0 and taken + size <= most:
            code, block = path.take(size)
            if code == 0:
                held[name].append(block)
                taken += size
        codes.append(code)
    return {"codes": codes, "taken": taken}


def give(name: str, settle: bool = True) -> None:
    """Give all of a path's blocks back."""
    while held[name]:
        paths[name].give(held[name].pop())
    if settle:
        paths[name].settle()


def settle(name: str) -> None:
    paths[name].settle()


def churn(seed: int, steps: int, most: int) -> dict[str, int]:
    """Random takes and gives by every path at once; blocks of 2 to `most` MiB. How many were refused, and otherwise answered."""
    dice, count = random.Random(seed), {"taken": 0, "refused": 0, "other": 0}
    names = [name for name in ways.PATHS if not name.startswith("managed") and name != "array 3D"]
    for _ in range(steps):
        name = dice.choice(names)
        path = _path(name)
        if held[name] and dice.random() < 0.45:
            path.give(held[name].pop(dice.randrange(len(held[name]))))
            if dice.random() < 0.3 and not (isinstance(path, ways.PoolDestroyed) and held[name]):
                path.settle()
            continue
        code, block = path.take(2 * dice.randint(1, most // 2) * cuda.MIB)
        if code == 0:
            held[name].append(block)
        count["taken" if code == 0 else "refused" if code == cuda.OUT_OF_MEMORY else "other"] += 1
    return count


def scatter(seed: int, steps: int, most: int, live: int) -> dict[str, int]:
    """Random takes and frees of linear memory of 1 to `most` bytes, small ones more often; at most `live` are held. What remains stays."""
    dice, count, path = random.Random(seed), {"taken": 0, "refused": 0}, _path("sync")
    for _ in range(steps):
        blocks = held["sync"]
        if blocks and (len(blocks) >= live or dice.random() < 0.45):
            path.give(blocks.pop(dice.randrange(len(blocks))))
            continue
        code, block = path.take(max(1, int(most ** dice.random())) if dice.random() < 0.5 else dice.randint(1, most))
        if code == 0:
            blocks.append(block)
        count["taken" if code == 0 else "refused"] += 1
    return count


def write(name: str, word: int) -> int:
    """Fill every block of a path with a 32-bit word; only for blocks of one size taken by `fill`. Bytes written."""
    total = 0
    for block, size in zip(held[name], sizes_of(name), strict=True):
        cuda.must("cuMemsetD32_v2", c_uint64(paths[name].at(block)), c_uint(word), c_size_t(size // 4))
        total += size
    cuda.must("cuCtxSynchronize")
    return total


def sizes_of(name: str) -> list[int]:
    """Bytes in each block of a path, by the driver."""
    found = []
    for block in held[name]:
        at, size = c_uint64(), c_size_t()
        cuda.must("cuMemGetAddressRange_v2", byref(at), byref(size), c_uint64(paths[name].at(block)))
        found.append(size.value)
    return found


def elastic_bytes(name: str) -> dict[str, int]:
    """How much of a path's blocks can be swapped, and of how much that is known: arrays and handles without a mapping have no address."""
    counted = {"elastic": 0, "counted": 0}
    for block in held.get(name, []):
        at = paths[name].at(block)
        base, size, number = c_uint64(), c_size_t(), c_uint64()
        if not at or cuda.call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(at)):
            continue
        cuda.must("cuPointerGetAttribute", byref(number), c_int(BUFFER_ID), c_uint64(at))
        counted["counted"] += size.value
        counted["elastic"] += size.value if number.value & ELASTIC else 0
    return counted


def count_word(name: str, size: int, word: int) -> dict[str, int]:
    """Take one block, read it before anything was written, count the word and what is not zero. The block stays held."""
    path = _path(name)
    code, block = path.take(size)
    if code:
        raise cuda.Refused(name, code)
    held[name].append(block)
    cuda.must("cuCtxSynchronize")
    return _count(_readable(name, path, block, size), name, size, word)


def count_held(name: str, word: int) -> dict[str, int]:
    """The same of the first block that is held already."""
    return _count(paths[name].at(held[name][0]), name, sizes_of(name)[0], word)


def count_all(name: str, word: int, by_kernel: bool) -> int:
    """Bytes of the word in all blocks of a path that have one address range each. By a kernel, or by the host where kernels compute nothing."""
    places = [(paths[name].at(block), size) for block, size in zip(held[name], sizes_of(name), strict=True)]
    if not by_kernel:
        return sum(_count(at, name, size, word)["pattern_bytes"] for at, size in places)
    found, seen = c_uint64(), c_uint()
    cuda.must("cuMemAlloc_v2", byref(found), c_size_t(4))
    kernel = kernels.Kernels()
    total = 0
    for at, size in places:
        cuda.must("cuMemsetD32_v2", found, c_uint(0), c_size_t(1))
        kernel.launch("count", at, size, word, found.value)
        cuda.must("cuMemcpyDtoH_v2", byref(seen), found, c_size_t(4))
        total += seen.value * 4
    cuda.must("cuMemFree_v2", found)
    return total


def _readable(name: str, path: ways.Path, block: Any, size: int) -> int:
    if name == "vmm unmapped handles":
        return ways.mapped(block, size)
    return path.at(block) or int(block)


def _count(where: int, name: str, size: int, word: int) -> dict[str, int]:
    piece = min(size, 64 * cuda.MIB)
    host = c_void_p()
    cuda.must("cuMemAllocHost_v2", byref(host), c_size_t(piece))
    words = nonzero = 0
    for offset in range(0, size, piece):
        if name == "array":
            rows = piece // cuda.ROW
            how = cuda.Copy2D(
                src_type=cuda.ARRAY, src_array=where, src_y=offset // cuda.ROW, dst_type=cuda.HOST,
                dst_host=host, dst_pitch=cuda.ROW, width=cuda.ROW, height=rows,
            )  # fmt: skip
            cuda.must("cuMemcpy2D_v2", byref(how))
        else:
            cuda.must("cuMemcpyDtoH_v2", host, c_uint64(where + offset), c_size_t(piece))
        found = _count_host(host.value or 0, piece, word)
        words, nonzero = words + found[0], nonzero + found[1]
    cuda.must("cuMemFreeHost", host)
    return {"pattern_bytes": words * 4, "nonzero_bytes": nonzero * 4, "bytes": size}


def _count_host(at: int, size: int, word: int) -> tuple[int, int]:
    """(words equal to `word`, words that are not zero)"""
    try:
        import numpy
    except ImportError:
        raw = (c_uint * (size // 4)).from_address(at)
        return sum(one == word for one in raw), sum(one != 0 for one in raw)
    seen = numpy.ctypeslib.as_array((ctypes.c_uint32 * (size // 4)).from_address(at))
    return int(numpy.count_nonzero(seen == word)), int(numpy.count_nonzero(seen))


def ipc_get(name: str = "sync") -> str:
    handle = cuda.IpcHandle()
    cuda.must("cuIpcGetMemHandle", byref(handle), c_uint64(held[name][0]))
    return bytes(handle.raw).hex()


def ipc_open(text: str) -> int:
    """The CUresult."""
    at = c_uint64()
    code = cuda.call(
        "cuIpcOpenMemHandle_v2", byref(at), cuda.IpcHandle.from_buffer_copy(bytes.fromhex(text)), c_uint(1)
    )
    if code == 0:
        ipc.append(at.value)
    return code


def ipc_close() -> int:
    return cuda.call("cuIpcCloseMemHandle", c_uint64(ipc.pop()))


def export_fd(channel: int, size: int) -> None:
    """Create a shareable block and send its descriptor over an inherited socket."""
    code, handle = ways.created(size, exportable=True)
    if code:
        raise cuda.Refused("cuMemCreate", code)
    fd = c_int(-1)
    cuda.must("cuMemExportToShareableHandle", byref(fd), c_uint64(handle), c_int(cuda.POSIX_FD), c_uint64(0))
    held.setdefault("shared", []).append(handle)
    with socket.socket(fileno=os.dup(channel)) as sock:
        socket.send_fds(sock, [b"."], [fd.value])
    os.close(fd.value)


def import_fd(channel: int, size: int, maps: bool) -> int:
    """The CUresult of importing what came over the socket, and of mapping it where that is asked."""
    with socket.socket(fileno=os.dup(channel)) as sock:
        _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    handle = c_uint64()
    code = cuda.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fds[0]), c_int(cuda.POSIX_FD))
    os.close(fds[0])
    if code:
        return code
    held.setdefault("shared", []).append(handle.value)
    if maps:
        try:
            held.setdefault("shared maps", []).append((ways.mapped(handle.value, size), size))
        except cuda.Refused as refused:
            return refused.code
    return 0


def release_shared() -> None:
    for at, size in held.pop("shared maps", []):
        ways.unmapped(at, size)
    for handle in held.pop("shared", []):
        cuda.must("cuMemRelease", c_uint64(handle))


def pool_reserved(name: str) -> int:
    pool = _path(name)
    assert isinstance(pool, ways.Pool)
    return pool.reserved()


def load(path: str) -> int:
    """A module of that file, which is kept. The CUresult."""
    module = c_void_p()
    return cuda.call("cuModuleLoad", byref(module), path.encode())


def library(mib: int) -> int:
    """A library of text with so many MiB of variables, and its kernel, which is kept. The CUresult."""
    global kernel
    text = (
        f".version 6.0\n.target sm_50\n.address_size 64\n.global .b8 v[{mib << 20}];\n.visible .entry f() {{ ret; }}\n"
    )
    made, kernel = c_void_p(), c_void_p()
    code = cuda.call("cuLibraryLoadData", byref(made), text.encode(), None, None, c_uint(0), None, None, c_uint(0))
    return code or cuda.call("cuLibraryGetKernel", byref(kernel), made, b"f")


def launch_kernel() -> int:
    """The kernel of the last library, in the current context. The CUresult."""
    one = c_uint(1)
    code = cuda.call("cuLaunchKernel", kernel, one, one, one, one, one, one, c_uint(0), None, None, None)
    return code or cuda.call("cuCtxSynchronize")


def further_context() -> int:
    """The CUresult."""
    return start("cuCtxCreate_v2")


def free_unknown() -> list[int]:
    """The driver's answers to pointers that are not its own: cuMemFree, cuMemFreeAsync."""
    return [cuda.call("cuMemFree_v2", c_uint64(123456)), cuda.call("cuMemFreeAsync", c_uint64(123456), None)]


def answer(line: str) -> dict[str, Any]:
    function, *arguments = json.loads(line)
    try:
        return {
            "ok": (
                globals().get(function)
                or getattr(answers, function, None)
                or getattr(pools, function, None)
                or getattr(peers, function)
            )(*arguments)
        }
    except cuda.Missing as missing:
        return {"missing": str(missing)}
    except cuda.Refused as refused:
        return {"refused": str(refused), "code": refused.code}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(line)), flush=True)
