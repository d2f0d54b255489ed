"""A process whose blocks of GPU memory are copied, driven by its parent: owner.py SOCKET, one JSON list a line.

["make", "a", 4194304, 7]  ->  null        a block with random bytes of seed 7; of None: zeros
["export", "a"]            ->  null        its descriptor goes through SOCKET
["digest", "a"]            ->  hex         of its content
["drop", "a"]              ->  null
"""

from __future__ import annotations

import array
import ctypes
import hashlib
import json
import os
import socket
import sys
from typing import Any

import numpy

from tests.integration.shim.gpu_structs import Access, Location, Prop

MIB = 2**20
cuda: Any = None
"""libcuda; loaded by the program alone, for its parent has no driver."""


def content(size_bytes: int, seed: int | None) -> bytes:
    """What a block of that seed has in it."""
    return bytes(size_bytes) if seed is None else numpy.random.default_rng(seed).bytes(size_bytes)


def must(rc: int, call: str) -> None:
    if rc:
        raise RuntimeError(f"{call}: CUresult {rc}")


class Block:
    """One physical allocation and its address."""

    def __init__(self, size_bytes: int, seed: int | None) -> None:
        self.bytes = size_bytes
        self.handle, self.at = ctypes.c_uint64(), ctypes.c_uint64()
        how, access = Prop(1, 1, Location(1, 0)), Access(Location(1, 0), 3)
        size = ctypes.c_size_t(size_bytes)
        must(cuda.cuMemCreate(ctypes.byref(self.handle), size, ctypes.byref(how), ctypes.c_uint64()), "cuMemCreate")
        must(
            cuda.cuMemAddressReserve(
                ctypes.byref(self.at), size, ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
            ),
            "reserve",
        )
        must(cuda.cuMemMap(self.at, size, ctypes.c_size_t(), self.handle, ctypes.c_uint64()), "cuMemMap")
        must(cuda.cuMemSetAccess(self.at, size, ctypes.byref(access), ctypes.c_size_t(1)), "cuMemSetAccess")
        must(cuda.cuMemcpyHtoD_v2(self.at, content(size_bytes, seed), size), "cuMemcpyHtoD")

    def export(self) -> int:
        fd = ctypes.c_int()
        must(cuda.cuMemExportToShareableHandle(ctypes.byref(fd), self.handle, 1, ctypes.c_uint64()), "export")
        return fd.value

    def digest(self) -> str:
        found = ctypes.create_string_buffer(self.bytes)
        must(cuda.cuMemcpyDtoH_v2(found, self.at, ctypes.c_size_t(self.bytes)), "cuMemcpyDtoH")
        return hashlib.sha256(found).hexdigest()

    def drop(self) -> None:
        must(cuda.cuMemUnmap(self.at, ctypes.c_size_t(self.bytes)), "cuMemUnmap")
        must(cuda.cuMemAddressFree(self.at, ctypes.c_size_t(self.bytes)), "cuMemAddressFree")
        must(cuda.cuMemRelease(self.handle), "cuMemRelease")


def main() -> None:
    parent, blocks = socket.socket(fileno=int(sys.argv[1])), dict[str, Block]()
    context = ctypes.c_void_p()
    must(cuda.cuInit(0), "cuInit")
    must(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0), "cuCtxCreate")
    for line in sys.stdin:
        answer: Any = None
        match json.loads(line):
            case ["make", name, size_bytes, seed]:
                blocks[name] = Block(size_bytes, seed)
            case ["export", name]:
                fd = blocks[name].export()
                parent.sendmsg([b"fd"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
                os.close(fd)
            case ["digest", name]:
                answer = blocks[name].digest()
            case ["drop", name]:
                blocks.pop(name).drop()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    cuda = ctypes.CDLL("libcuda.so.1")
    main()
