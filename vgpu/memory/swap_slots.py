"""Slots of a host pool: where in it each block that is away has its content.

A slot is one range of the pool, as large as its block, so that one copy moves it. Best fit: the smallest free range that is large enough, the first of
several, so that large ranges stay for large blocks. Pure; bytes. Which block of which process a slot belongs to is the arbiter's record.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Final

from vgpu.api.errors import Refused

GRAIN_BYTES: Final = 2 * 2**20
"""Slots begin and end at multiples of it: a GPU's page and the host's huge page. The copier requires it."""


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A range of the pool."""

    offset: int
    bytes: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.bytes


class SwapSlots:
    """See the module. Ranges that are free and touch are one range."""

    def __init__(self, pool_bytes: int) -> None:
        """Raises ValueError if the size is no positive multiple of the grain."""
        _check_size(pool_bytes, "a pool")
        self.pool_bytes = pool_bytes
        self.free_bytes = pool_bytes
        """Of all free ranges; the largest single one may be smaller."""
        self._sizes = [(pool_bytes, 0)]
        """Free ranges as (bytes, offset), sorted."""
        self._by_offset = {0: pool_bytes}
        self._by_end = {pool_bytes: 0}
        self._used: dict[int, int] = {}

    def slots(self) -> list[Slot]:
        """Those in use, in order."""
        return [Slot(*one) for one in sorted(self._used.items())]

    def take(self, wanted_bytes: int) -> Slot | None:
        """A slot of that size; None if no free range is large enough. Raises ValueError for a size that is no positive multiple of the grain."""
        _check_size(wanted_bytes, "a slot")
        at = bisect_left(self._sizes, (wanted_bytes, 0))
        if at == len(self._sizes):
            return None
        found_bytes, offset = self._sizes[at]
        return self._use(Slot(offset, wanted_bytes), Slot(offset, found_bytes))

    def take_at(self, slot: Slot) -> None:
        """This slot, which the pool had in use before a restart. Raises Refused if part of it is in use or outside the pool, ValueError as `take`."""
        _check_size(slot.bytes, "a slot")
        if slot.offset % GRAIN_BYTES:
            raise ValueError(f"a slot at {slot.offset}: it must be a multiple of {GRAIN_BYTES}")
        for found_bytes, offset in self._sizes:
            free = Slot(offset, found_bytes)
            if free.offset <= slot.offset and slot.end <= free.end:
                self._use(slot, free)
                return
        raise Refused(
            f"slot of {slot.bytes} bytes at {slot.offset} is not free in the pool of {self.pool_bytes}: the free ranges are "
            f"{', '.join(f'{offset}-{end}' for end, offset in sorted(self._by_end.items())) or 'none'}"
        )

    def release(self, slot: Slot) -> None:
        """Its content is needed no more. Raises Refused for a slot that is not in use."""
        if self._used.get(slot.offset) != slot.bytes:
            raise Refused(f"slot of {slot.bytes} bytes at {slot.offset} is not in use")
        del self._used[slot.offset]
        self.free_bytes += slot.bytes
        start, end = slot.offset, slot.end
        if start in self._by_end:
            start = self._by_end[start]
            self._remove_free(start)
        if end in self._by_offset:
            end += self._by_offset[end]
            self._remove_free(slot.end)
        self._add_free(start, end - start)

    def _use(self, slot: Slot, free: Slot) -> Slot:
        """Cut a slot out of a free range."""
        self._remove_free(free.offset)
        self._add_free(free.offset, slot.offset - free.offset)
        self._add_free(slot.end, free.end - slot.end)
        self._used[slot.offset] = slot.bytes
        self.free_bytes -= slot.bytes
        return slot

    def _add_free(self, offset: int, size_bytes: int) -> None:
        if size_bytes:
            insort(self._sizes, (size_bytes, offset))
            self._by_offset[offset] = size_bytes
            self._by_end[offset + size_bytes] = offset

    def _remove_free(self, offset: int) -> None:
        size_bytes = self._by_offset.pop(offset)
        del self._by_end[offset + size_bytes]
        del self._sizes[bisect_left(self._sizes, (size_bytes, offset))]


def _check_size(size_bytes: int, what: str) -> None:
    if size_bytes <= 0 or size_bytes % GRAIN_BYTES:
        raise ValueError(f"{what} of {size_bytes} bytes: it must be a positive multiple of {GRAIN_BYTES}")
