"""A block that is not simply on the GPU: chosen to leave, away, or on its way back.

    (resident) ── named ──▶ CHOSEN ─▶ SAVING ─▶ SAVED ─▶ UNMAPPING ─▶ AWAY         recorded from UNMAPPING on
    AWAY ─▶ MAKING ─▶ MADE ─▶ RESTORING ─▶ RESTORED ─▶ FILLED ── acknowledged ──▶ (resident)   recorded all the time

A block that leaves is whole on the GPU until UNMAPPED. One that comes back has its slot until the process has shown that it read FILLED.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Final, Protocol

from vgpu.memory.swap_records import Key, Stage, SwapRecord
from vgpu.memory.swap_slots import Slot
from vgpu.protocol.copier import Done


class BlockState(IntEnum):
    """See the module."""

    CHOSEN = auto()
    """Its job waits in the queue of the pool."""
    SAVING = auto()
    SAVED = auto()
    UNMAPPING = auto()
    """The process was ordered to unmap it, and has not answered."""
    AWAY = auto()
    MAKING = auto()
    """The process was ordered to make it, and has not answered."""
    MADE = auto()
    """Its job waits in the queue of the pool."""
    RESTORING = auto()
    RESTORED = auto()
    FILLED = auto()
    """The process was sent FILLED. If that did not arrive, it is sent again."""


LEAVING: Final = frozenset({BlockState.CHOSEN, BlockState.SAVING, BlockState.SAVED, BlockState.UNMAPPING})
ON_GPU: Final = frozenset(
    {BlockState.CHOSEN, BlockState.SAVING, BlockState.SAVED, BlockState.RESTORED, BlockState.FILLED}
)
"""It is whole there."""
NEEDS_SLOT: Final = frozenset(BlockState) - ON_GPU | {BlockState.SAVED}
"""What is in its slot is its content, or counts as saved."""
_STAGES: Final[dict[BlockState, Stage]] = {
    BlockState.MAKING: "made",
    BlockState.MADE: "made",
    BlockState.RESTORING: "made",
    BlockState.RESTORED: "made",
    BlockState.FILLED: "filled",
}


class BlockOwner(Protocol):
    """What the pool reports to."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Container, pid, start time."""

    def job_done(self, block: MovedBlock, done: Done) -> None:
        """The copier has ended its job."""

    def save_lost(self, block: MovedBlock) -> None:
        """The copier ended before it had saved the block."""

    def slot_lost(self, block: MovedBlock) -> None:
        """The pool with its content is gone, or has no such slot any more. `block.lost` is set, and the pool knows it no more."""


@dataclass(slots=True, eq=False)
class MovedBlock:
    """One block of a process."""

    owner: BlockOwner
    id: int
    bytes: int
    state: BlockState
    slot: Slot
    charged: bool = True
    """It takes memory of the GPU, or may."""
    doubt: bool = False
    """An answer is missing: it is away, or on the GPU as it was."""
    told_seq: int = 0
    """Of the FILLED that its process was sent."""
    lost: bool = False
    """Its content was in a pool that is gone. Its slot belongs to it no more, and it is forgotten as soon as no order names it."""
    alone: bool = False
    """It is to be named alone, so that the answer is about it."""

    @property
    def leaving(self) -> bool:
        """It is whole on the GPU, or may be, and is to leave."""
        return self.state in LEAVING

    @property
    def key(self) -> Key:
        """Of its record."""
        _, pid, started = self.owner.key
        return pid, started, self.id

    def record(self) -> SwapRecord:
        """The record of it."""
        name, pid, started = self.owner.key
        stage = _STAGES.get(self.state, "away")
        if self.state is BlockState.AWAY and self.charged and not self.doubt:
            stage = "made"
        return SwapRecord(name, pid, started, self.id, self.bytes, self.slot.offset, stage)
