"""One copy of the copier: from a block to its slot, or back."""

from __future__ import annotations

from dataclasses import dataclass

from arbiter import descriptors
from arbiter.swap.block import MovedBlock
from vgpu.memory.swap_slots import Slot


@dataclass(slots=True, eq=False)
class PoolJob:
    """See the module."""

    saves: bool
    slot: Slot
    size_bytes: int
    fd: int
    """Of the block; it is closed with the job."""
    block: MovedBlock | None
    """None: nobody waits for it."""
    container: str
    """Its name: what it passed is counted there until it is closed."""
    frees: bool = False
    """Its slot is free when it has ended."""

    def close(self) -> None:
        """Close its descriptor, without waiting."""
        descriptors.close(self.fd, self.container)
