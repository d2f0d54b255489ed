"""What a mover knows of its order, and of its container."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Protocol

from vgpu.protocol.copier import BLOCK_LIMIT_BYTES
from vgpu.protocol.messages import SwapIn, SwapOut, UnableReason, Unmap

UNABLE_TEXTS: Final = {
    UnableReason.NO_ELASTIC_MEMORY: "it has no block that can be moved",
    UnableReason.UNKNOWN_BLOCK: "it does not know the block",
    UnableReason.NO_DESCRIPTOR: "it has no free file descriptor",
    UnableReason.DRIVER: "its driver refused",
}


class MoverOwner(Protocol):
    """The container, to its movers."""

    def left(self, gpu: str, size_bytes: int) -> None:
        """So much left the GPU."""

    def away_changed(self, gpu: str) -> None:
        """More or less is away than was reported."""

    def may_move_bytes(self, gpu: str) -> int:
        """How much more of its memory can be chosen or away."""


@dataclass(slots=True)
class MoverOrder:
    message: SwapOut | Unmap | SwapIn
    until_s: float
    seq: int = 0
    named: set[int] = field(default_factory=set)
    """Blocks of its answer until now."""
    named_bytes: int = 0
    least_bytes: int = BLOCK_LIMIT_BYTES
    """Of the smallest of them."""
    fresh: Collection[int] = ()
    """Blocks that use memory of the GPU because of this order."""
