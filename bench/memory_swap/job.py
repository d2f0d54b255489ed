"""A container's program over the driver API, with the requests that PyTorch would make (shapes.py). See work.py.

The forms `segments`, `2 MiB` and `managed` are cuMemAlloc and cuMemAllocManaged, `expandable` is cuMemCreate mapped into one range.
"""

from __future__ import annotations

import sys
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/gpu/kit"))
import cuda
import kernels
import ways

from bench.memory_swap import shapes
from bench.memory_swap.work import ELASTIC, obey

BUFFER_ID = 7


class DriverMemory:
    """Blocks of the driver, and kernels that touch all of each."""

    def __init__(self) -> None:
        cuda.must("cuInit", c_uint(0))
        cuda.primary()
        self._kernels = kernels.Kernels()
        self._blocks: list[tuple[int, int]] = []
        self._wrong = c_uint64()

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self._blocks]

    def make(self, form: str, total_bytes: int) -> None:
        cuda.must("cuMemAllocHost_v2", byref(self._wrong), c_size_t(4))
        sizes = shapes.blocks(form, total_bytes)
        if form == "expandable":
            self._map(sizes)
        else:
            for size in sizes:
                self._blocks.append((self._allocated(size, managed=form == "managed"), size))
        for number, (at, size) in enumerate(self._blocks):
            self._kernels.launch("write", at, size, number)

    @staticmethod
    def _allocated(size: int, managed: bool) -> int:
        at = c_uint64()
        if managed:
            cuda.must("cuMemAllocManaged", byref(at), c_size_t(size), c_uint(cuda.GLOBAL))
        else:
            cuda.must("cuMemAlloc_v2", byref(at), c_size_t(size))
        return at.value

    def _map(self, sizes: list[int]) -> None:
        """One range of addresses, a handle for each block, as PyTorch's expandable segments have them."""
        base, whole = c_uint64(), sum(sizes)
        cuda.must("cuMemAddressReserve", byref(base), c_size_t(whole), c_size_t(0), c_uint64(0), c_uint64(0))
        access = cuda.AccessDesc(cuda.Location(cuda.DEVICE, 0), cuda.READ_WRITE)
        at = base.value
        for size in sizes:
            code, handle = ways.created(size)
            if code:
                raise cuda.Refused("cuMemCreate", code)
            cuda.must("cuMemMap", c_uint64(at), c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))
            cuda.must("cuMemSetAccess", c_uint64(at), c_size_t(size), byref(access), c_size_t(1))
            self._blocks.append((at, size))
            at += size

    def elastic_bytes(self) -> int:
        found, number = 0, c_uint64()
        for at, size in self._blocks:
            code = cuda.call("cuPointerGetAttribute", byref(number), c_int(BUFFER_ID), c_uint64(at))
            found += size if code == 0 and number.value & ELASTIC else 0
        return found

    def add(self, block: int) -> None:
        self._kernels.launch("add", *self._blocks[block], 1)

    def wait(self) -> None:
        cuda.must("cuStreamSynchronize", c_void_p())

    def wrong_cells(self, added: int) -> int:
        found = c_uint.from_address(self._wrong.value)
        wrong = 0
        for number, (at, size) in enumerate(self._blocks):
            found.value = 0
            self._kernels.launch("compare", at, size, (number + added) & 0xFFFFFFFF, self._wrong.value)
            self.wait()
            wrong += found.value
        return wrong


if __name__ == "__main__":
    obey(DriverMemory())
