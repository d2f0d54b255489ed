"""A container's PyTorch program: the tensors of a model (shapes.py) as numbers of 32 bits. See work.py. PYTORCH_CUDA_ALLOC_CONF decides its form."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.memory_swap import shapes
from bench.memory_swap.work import ELASTIC, obey

FACTOR = 2654435761 - 2**32
CHUNK = 1 << 24
"""Cells that are compared at a time: temporary tensors stay small."""


class TorchMemory:
    """Tensors, and operations that touch all of each."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._ramp = torch.arange(CHUNK, device="cuda", dtype=torch.int32) * FACTOR

    @property
    def sizes(self) -> list[int]:
        return [one.numel() * 4 for one in self._tensors]

    def make(self, form: str, total_bytes: int) -> None:
        wanted = "expandable" if form == "expandable" else "segments"
        if wanted != form:
            raise ValueError(f"form {form}: PyTorch has segments or expandable")
        for number, size in enumerate(shapes.tensors(total_bytes)):
            tensor = torch.empty(size // 4, device="cuda", dtype=torch.int32)
            for offset, chunk in self._chunks(tensor):
                chunk.copy_(self._ramp[: chunk.numel()]).add_(_signed(offset * FACTOR + number))
            self._tensors.append(tensor)

    @staticmethod
    def _chunks(tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        return [(at, tensor[at : at + CHUNK]) for at in range(0, tensor.numel(), CHUNK)]

    def elastic_bytes(self) -> int:
        driver, number, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), 0
        for tensor in self._tensors:
            code = driver.cuPointerGetAttribute(ctypes.byref(number), 7, ctypes.c_uint64(tensor.data_ptr()))
            found += tensor.numel() * 4 if code == 0 and number.value & ELASTIC else 0
        return found

    def add(self, block: int) -> None:
        self._tensors[block].add_(1)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def wrong_cells(self, added: int) -> int:
        wrong = 0
        for number, tensor in enumerate(self._tensors):
            for offset, chunk in self._chunks(tensor):
                right = self._ramp[: chunk.numel()] + _signed(offset * FACTOR + number + added)
                wrong += int(torch.count_nonzero(chunk != right).item())
        return wrong


def _signed(number: int) -> int:
    """The same 32 bits as a signed number."""
    return (number + 2**31) % 2**32 - 2**31


if __name__ == "__main__":
    obey(TorchMemory())
