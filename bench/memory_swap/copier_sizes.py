"""How much copier.py copies, and in which blocks."""

from __future__ import annotations

from bench.memory_swap import shapes

MIB = 2**20
BLOCK_MIB = 512
"""elastic.h's ELASTIC_BLOCK: of a large allocation's blocks the largest."""


class Sizes:
    """MiB. 20 GB one way, as the goal has it, in one block and in 20 MiB (PyTorch's expandable segments). A model of 16 GB in PyTorch's other segments, in the
    library's blocks; 8,000 blocks of 2 MiB. On the fake driver everything by a hundred."""

    def __init__(self, fake: bool) -> None:
        self.total = 200 if fake else 19_080
        model = shapes.segments(shapes.tensors(160_000_000 if fake else 16_000_000_000))
        self.forms = {
            "one block": [self.total],
            "20 MiB": [20] * (self.total // 20),
            "segments": [mib for size in model for mib in _blocks_mib(size // MIB)],
            "2 MiB": [2] * (80 if fake else 8000),
        }
        self.starts = (64, 128) if fake else (8 * 1024, 32 * 1024, 64 * 1024)

    def of(self, form: str) -> int:
        """What is copied in that form."""
        return sum(self.forms[form])


def _blocks_mib(mib: int) -> list[int]:
    """Blocks of a region of that size: elastic.h's ELASTIC_BLOCK at most."""
    return [BLOCK_MIB] * (mib // BLOCK_MIB) + [mib % BLOCK_MIB] * (mib % BLOCK_MIB > 0)
