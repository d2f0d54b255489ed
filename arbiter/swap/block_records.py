"""Which blocks of one GPU may be away, for the file of its records: what the next write changes.

What is recorded counts once `write` has returned True.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from arbiter.swap.block import MovedBlock
from arbiter.swap.records_file import RecordsFile
from vgpu.memory.swap_records import SwapRecord

WRITE_AGAIN_S: Final = 1.0
"""After a write that failed. Guessed."""


class BlockRecords:
    """See the module."""

    def __init__(self, file: RecordsFile, clock: Callable[[], float]) -> None:
        self._file, self._clock = file, clock
        self.pool = ""
        """The identity of the pool's file that has what was saved; empty: nothing was."""
        self.unwritten = False
        """Whether the file is not as it is to be."""
        self._recorded: dict[MovedBlock, None] = {}
        self._rewritten: dict[MovedBlock, None] = {}
        """Whose records are to be written, or removed, by the next write."""
        self._write_at_s = -inf

    def __contains__(self, block: MovedBlock) -> bool:
        return block in self._recorded

    def stored(self) -> Sequence[SwapRecord]:
        """The records of an earlier arbiter."""
        stored = self._file.read()
        self.pool = stored.pool
        return stored.records

    def adopt(self, block: MovedBlock) -> None:
        """A block whose record the file has."""
        self._recorded[block] = None

    def put(self, block: MovedBlock) -> None:
        """It may be away from the next write on; again: its stage changed. One that is lost has no record."""
        if not block.lost:
            self._recorded[block] = self._rewritten[block] = None
        self.unwritten = True

    def remove(self, block: MovedBlock) -> None:
        """It is not away."""
        self._recorded.pop(block, None)
        self._rewritten[block] = None
        self.unwritten = True

    def write(self) -> bool:
        """Whether the file has the present records."""
        if not self.unwritten:
            return True
        now_s = self._clock()
        if now_s < self._write_at_s:
            return False
        drop = [block.key for block in self._rewritten if block not in self._recorded]
        put = [block.record() for block in self._rewritten if block in self._recorded]
        if not self._file.write(drop, put, self.pool):
            self._write_at_s = now_s + WRITE_AGAIN_S
            return False
        self._rewritten.clear()
        self.unwritten = False
        return True

    def deadline_s(self) -> float:
        """When `write` is due; inf: nothing is unwritten."""
        return self._write_at_s if self.unwritten else inf
