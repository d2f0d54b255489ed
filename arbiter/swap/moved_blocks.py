"""The blocks of one process on one GPU that are not simply on the GPU, and what of them is certain.

A process states how many of its bytes are away: all that have not their content back. With that, doubts are resolved: a block whose UNMAP was not answered when
a connection ended is away, or on the GPU as it was. Until then it counts as using memory of the GPU, and its content stays in the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import structlog

from arbiter.swap.block import BlockOwner, BlockState, MovedBlock
from arbiter.swap.host_pool import HostPool
from vgpu.memory.swap_records import SwapRecord
from vgpu.memory.swap_slots import Slot

_MADE: Final = frozenset({BlockState.MAKING, BlockState.MADE, BlockState.RESTORING, BlockState.RESTORED})
_log = structlog.get_logger()


class MovedBlocks:
    """By their numbers in the process. `lost`: why some memory of the process can never come back."""

    def __init__(self, owner: BlockOwner, pool: HostPool) -> None:
        self.lost = ""
        self.known: dict[int, MovedBlock] = {}
        self.unreturned_lease_bytes = 0
        """Of blocks that the process discarded and still has leased: they are neither on the GPU nor in the pool."""
        self._owner, self._pool = owner, pool

    def __iter__(self) -> Iterator[MovedBlock]:
        return iter(self.known.values())

    def __getitem__(self, id_: int) -> MovedBlock:
        return self.known[id_]

    def add(self, id_: int, size_bytes: int, slot: Slot) -> MovedBlock:
        """A block that is to leave."""
        self.known[id_] = block = MovedBlock(self._owner, id_, size_bytes, BlockState.CHOSEN, slot)
        return block

    def adopt(self, record: SwapRecord) -> None:
        """A block of the records file. An UNMAP of it may not have been carried out."""
        state = BlockState.FILLED if record.stage == "filled" else BlockState.AWAY
        block = MovedBlock(self._owner, record.block, record.bytes, state, Slot(record.offset, record.bytes))
        block.doubt = record.stage == "away"
        self.known[block.id] = block
        self._pool.adopt(block)

    def drop(self, block: MovedBlock) -> None:
        """It is simply on the GPU, or gone with its process."""
        del self.known[block.id]
        self._pool.free(block)

    def discard(self, block: MovedBlock) -> None:
        """The process does not make it again. What is leased for it counts as away until it is returned."""
        if not block.charged:
            self.unreturned_lease_bytes += block.bytes
        self.drop(block)

    def drop_lost(self) -> bool:
        """Whether there were any whose content is gone with a pool."""
        lost = [block for block in self if block.lost]
        for block in lost:
            self.drop(block)
        return bool(lost)

    def in_state(self, state: BlockState) -> list[MovedBlock]:
        """All that are."""
        return [block for block in self if block.state is state]

    def leaving(self) -> list[MovedBlock]:
        """Those of a SWAP_OUT that no UNMAPPED has named."""
        return [block for block in self if block.leaving]

    def unreturned(self) -> list[MovedBlock]:
        """Those that have not their content on the GPU, or may not have it."""
        return [block for block in self if not block.leaving and block.state is not BlockState.FILLED]

    def made(self) -> list[MovedBlock]:
        """Those that are made, or about to be."""
        return [block for block in self if block.state in _MADE]

    @property
    def away_bytes(self) -> int:
        """What does not use memory of the GPU."""
        return sum(block.bytes for block in self if not block.charged) + self.unreturned_lease_bytes

    @property
    def moved_bytes(self) -> int:
        """What is chosen, away or not back: it has, or will have, a slot."""
        return sum(block.bytes for block in self if block.state is not BlockState.FILLED)

    def detach(self) -> None:
        """The connection ended. What was chosen stays; what was made is made again, and uses memory of the GPU meanwhile."""
        for block in list(self):
            if block.state is BlockState.UNMAPPING:
                block.state, block.doubt = BlockState.AWAY, True
            elif block.leaving:
                self.drop(block)
            elif block.state in _MADE:
                self._pool.forget(block)
                block.state = BlockState.AWAY

    def acknowledge(self, before_seq: int | None) -> None:
        """The process has read every FILLED of a lower number; None: every one."""
        for block in self.in_state(BlockState.FILLED):
            if before_seq is None or block.told_seq < before_seq:
                self.drop(block)

    def compare(self, away_bytes: int) -> None:
        """The process states how much is away, and no order to it is unanswered."""
        if away_bytes == 0:
            self._none_away()
            return
        filled_bytes = sum(block.bytes for block in self.in_state(BlockState.FILLED))
        doubted = [block for block in self.unreturned() if block.doubt]
        doubt_bytes = sum(block.bytes for block in doubted)
        certain_bytes = sum(block.bytes for block in self.unreturned()) - doubt_bytes
        most_bytes = certain_bytes + doubt_bytes + filled_bytes
        if away_bytes > most_bytes:
            self.lost = (
                f"{away_bytes - most_bytes} bytes of process {self._owner.key[1]} are away, and no record names them"
            )
            _log.error("memory that is away is lost", grant=self._owner.key[0], reason=self.lost)
        if away_bytes == certain_bytes or (not doubt_bytes and away_bytes < certain_bytes):
            self.acknowledge(None)
            for block in doubted:
                self.drop(block)
        elif away_bytes >= most_bytes:
            for block in doubted:
                block.doubt = block.charged = False
                self._pool.record(block)

    def _none_away(self) -> None:
        """It has the content of all, or the program was replaced by another, whose blocks these are not."""
        self.lost = ""
        for block in [block for block in self if not block.leaving]:
            self.drop(block)
