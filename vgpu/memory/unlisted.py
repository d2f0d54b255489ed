"""GPU memory that is in use and that NVML lists for no process. Pure.

A program can allocate memory by the kernel driver's own requests, without a context: the driver counts that memory as used, and NVML lists it for no
process (measured, H100 with driver 580.159.04: 2,560 MiB used, no process listed). So no limit counts it, and only the difference shows it.

The difference has harmless parts. Figures of an H200 with driver 580.159.04:

- 0 MiB are used of an idle GPU (H100, the same driver);
- each process with a context takes 5.56 to 5.62 MiB beside what NVML lists for it (tests/gpu/results/paths.csv: 5.56 by one process, 11.19 by two, 44.62 by eight);
- NVML lists managed memory for no process. A process states its size, but the driver allocates it in steps of 128 MiB,
  and a process keeps the rest of a step (bench/granularity/results-h200.csv; paths.csv: 75.6 MiB beyond the charge).

So a process explains the memory that NVML lists for it plus its stated managed memory, or its charge if that is more; `TOLERANCE_BYTES` and
`TOLERANCE_EACH_BYTES` are tolerated. The charge is more if a process has `__managed__` variables: they are charged, not listed, and not stated as
managed memory. An unused lease explains nothing, but it counts as used if its use is unknown:

- lease or statement changed recently: later allocations are not stated yet;
- the process states no managed memory. Then its library may be of a release before that statement, and contexts that grew beside managed memory are charged
  too little (`vgpu.memory.context`).

The explained memory is an upper bound: managed memory may be in the host's memory, in part or all of it, and as much unlisted memory of other processes
can hide behind it. NVML counts shared memory for each of its processes, which hides as much, too. So the reported memory is a lower bound.

A context is used memory before its process is listed, and the memory of a process that ended is used for some time after. So the difference counts once all
readings of `STAYS_S` show it, two at least, and `APART_S` or less apart.

Units: bytes, seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

TOLERANCE_BYTES: Final = 64 * 2**20
"""For each GPU, for memory that other drivers use themselves. Guessed: nothing was measured."""
TOLERANCE_EACH_BYTES: Final = 136 * 2**20
"""For each process with memory there. Measured: a step of managed memory and, rounded up, the unlisted part of a context."""
STAYS_S: Final = 1.8
"""Two seconds, and readings that do not begin to the millisecond. Guessed: a context is listed well within a second."""
APART_S: Final = 10.0
"""Readings that are further apart belong to no row: events between them are unknown. A call of NVML may take this long."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process on one GPU."""

    listed_bytes: int | None
    """By NVML; 0 = it is not listed, None = NVML does not report the size."""
    charged_bytes: int = 0
    """By the arbiter: its lease and its contexts."""
    managed_bytes: int = 0
    """Its managed memory, by its last statement; 0 = none, or not stated."""
    unused_bytes: int = 0
    """The used part of its lease, by its last statement."""
    still: bool = False
    """Lease and statement did not change around the reading."""

    def explains_bytes(self, listed_bytes: int) -> int:
        """Upper bound of this process's part of the memory in use, if NVML lists `listed_bytes` for it."""
        unused_bytes = self.unused_bytes if self.managed_bytes and self.still else 0
        return max(listed_bytes + self.managed_bytes, self.charged_bytes - unused_bytes)


@dataclass(frozen=True, slots=True)
class Unlisted:
    """Memory of one GPU that no process explains."""

    uuid: str
    bytes: int
    used_bytes: int
    """Memory of the GPU in use by all processes."""


def difference(used_bytes: int | None, holders: Iterable[Holder], charged_bytes: int = 0) -> int | None:
    """Used memory that no process explains; never below 0. `charged_bytes`: charged to no single process. None = unknown."""
    if used_bytes is None:
        return None
    rest_bytes = used_bytes - charged_bytes
    for holder in holders:
        if holder.listed_bytes is None:
            return None
        rest_bytes -= holder.explains_bytes(holder.listed_bytes)
    return max(0, rest_bytes)


def tolerance_bytes(processes: int) -> int:
    """The tolerated difference if this many processes have memory."""
    return TOLERANCE_BYTES + processes * TOLERANCE_EACH_BYTES


class UnlistedDetector:
    """The detector for the GPUs of one node."""

    def __init__(self) -> None:
        self.found: dict[str, Unlisted] = {}
        """By GPU, by its last reading."""
        self._row_s: dict[str, tuple[float, float]] = {}
        """When the first and the last reading of an unbroken row began that showed more than the tolerance."""

    def evaluate(self, at_s: float, seen: Mapping[str, Unlisted | None]) -> None:
        """A reading that began at `at_s`. `seen`: the memory of some GPUs beyond the tolerance, None = none, or unknown. Other GPUs stay unchanged."""
        for uuid, one in seen.items():
            if one is None:
                self._row_s.pop(uuid, None)
                self.found.pop(uuid, None)
                continue
            first_s, last_s = self._row_s.get(uuid, (at_s, at_s))
            if uuid not in self.found and at_s - last_s > APART_S:
                first_s = at_s
            self._row_s[uuid] = first_s, at_s
            if at_s - first_s >= STAYS_S:
                self.found[uuid] = one

    def forget(self, but: Iterable[str]) -> None:
        """Forget all GPUs but these: they are not read any more."""
        kept = set(but)
        for uuid in self._row_s.keys() - kept:
            self.found.pop(uuid, None)
            del self._row_s[uuid]


def suspected(looked: Iterable[tuple[Sequence[str], bool | None]]) -> str | None:
    """The one container whose processes may have the memory; None if there is none, if there are several, or if it is unknown.

    `looked`: for each process that NVML lists nowhere, the keys of the grants that it may belong to, and whether it has a GPU open; None = unknown.
    An open GPU is no proof of memory, so a container is named only if it is the only candidate.
    """
    possible, sure = set[str](), set[str]()
    for keys, opens in looked:
        if opens is not False:
            possible.update(keys)
        if opens and len(keys) == 1:
            sure.add(keys[0])
    return sure.pop() if len(possible) == 1 and sure else None
