"""When work of a process ended, in a file that its parent reads while it works: times by CLOCK_MONOTONIC, which processes of a machine share.

The file has a count of 64 bits, then that many pairs of (began_ns, ended_ns). A stamp is written before the count that includes it.
"""

from __future__ import annotations

import mmap
import struct
import time
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

CAPACITY: Final = 1 << 20
"""Stamps; guessed: ten minutes of work of half a millisecond. Further ones are dropped, and `Stamps.dropped` counts them."""
_PAIR: Final = struct.Struct("<QQ")
_COUNT: Final = struct.Struct("<Q")


class Stamp(NamedTuple):
    """A piece of work, from before its launch to after its end. Seconds."""

    began_s: float
    ended_s: float


class Stamps:
    """The writer."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(_COUNT.size + CAPACITY * _PAIR.size)
            self._map = mmap.mmap(file.fileno(), 0)
        self._count = self.dropped = 0

    def add(self, began_ns: int) -> int:
        """Work that began then has ended now; now."""
        ended_ns = time.monotonic_ns()
        if self._count == CAPACITY:
            self.dropped += 1
            return ended_ns
        _PAIR.pack_into(self._map, _COUNT.size + self._count * _PAIR.size, began_ns, ended_ns)
        self._count += 1
        _COUNT.pack_into(self._map, 0, self._count)
        return ended_ns


def read(path: Path) -> list[Stamp]:
    """All stamps so far."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as seen:
        (count,) = _COUNT.unpack_from(seen)
        return [
            Stamp(*(number / 1e9 for number in _PAIR.unpack_from(seen, _COUNT.size + at * _PAIR.size)))
            for at in range(count)
        ]


class Change(NamedTuple):
    """One process's work ended for a while, and the other's came."""

    at_s: float
    to: int
    """0 or 1."""
    gap_s: float
    """From the end of the last piece of the one to the end of the first piece of the other."""
    piece_s: float
    """How long a piece of the other takes: the gap is that much too long at most."""


def changes(first: list[Stamp], second: list[Stamp]) -> list[Change]:
    """Where the two change places: maximal runs of pieces of one that end between two pieces of the other."""
    merged = sorted([(one.ended_s, 0) for one in first] + [(one.ended_s, 1) for one in second])
    pieces = [_usual_piece_s(first), _usual_piece_s(second)]
    found = []
    for (before_s, one), (after_s, other) in pairwise(merged):
        if one != other:
            found.append(Change(after_s, other, after_s - before_s, pieces[other]))
    return found


def _usual_piece_s(stamps: list[Stamp]) -> float:
    """The median: pieces that waited for their memory are few."""
    lengths = sorted(one.ended_s - one.began_s for one in stamps)
    return lengths[len(lengths) // 2] if lengths else 0.0
