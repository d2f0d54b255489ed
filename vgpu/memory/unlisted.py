"""GPU memory that is in use and that NVML lists for no process. Pure.

A program can take memory by the kernel driver's own requests, without a context: the driver counts that memory as used, and NVML names no process for it
(measured, H100 with driver 580.159.04: 2,560 MiB used, no process listed). So no limit counts it, and only the difference shows it.

The difference has harmless parts. Figures of an H200 with driver 580.159.04:

- 0 MiB are used of an idle GPU (H100, the same driver);
- each process with a context takes 5.56 to 5.62 MiB beside what NVML lists for it (tests/gpu/results/paths.csv: 5.56 by one process, 11.19 by two, 44.62 by eight);
- NVML lists managed memory for no process. A process states how much it has, but the driver takes it in steps of 128 MiB,
  and a process keeps what is left of a step (bench/granularity/results-h200.csv; paths.csv: 75.6 MiB beyond what was charged).

So a process explains what NVML lists for it and the managed memory that it states, or what is charged to it if that is more, and `SLACK_BYTES` and
`SLACK_EACH_BYTES` are passed over. The charge is more where a process has `__managed__` variables: they are charged, not listed, and not stated as
managed memory. A lease that is not used yet explains nothing, but it counts as used where that is unknown:

- lease or statement moved lately: what was allocated since is not stated yet;
- the process states no managed memory. Then its library may be of a release before that statement, and contexts that grew beside managed memory are charged
  too little (`vgpu.memory.context`).

What explains memory is an upper bound: managed memory may be in the host's memory, in part or all of it, and as much of others' unlisted memory can
hide behind it. NVML counts memory that processes share for each of them, which hides as much, too. So what is found is at least there, and not all of it need
be found.

A context is used memory before its process is listed, and the memory of a process that ended is used for some time after. So the difference counts once all
readings of `STAYS_S` show it, two at least, and `APART_S` or less apart.

Units: bytes, seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

SLACK_BYTES: Final = 64 * 2**20
"""Of each GPU, for what other drivers take for themselves. Guessed: nothing was measured."""
SLACK_EACH_BYTES: Final = 136 * 2**20
"""For each process with memory there. Measured: a step of managed memory and, rounded up, what a context takes beside what is listed."""
STAYS_S: Final = 1.8
"""Two seconds, and readings that do not begin to the millisecond. Guessed: a context is listed well within a second."""
APART_S: Final = 10.0
"""Readings that are further apart belong to no row: what happened between them is not known. So long a call of NVML may take."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process on one GPU."""

    listed_bytes: int | None
    """By NVML; 0 = it is not listed, None = NVML does not tell how much."""
    charged_bytes: int = 0
    """By the arbiter: its lease, and what its contexts take."""
    managed_bytes: int = 0
    """Of its managed memory, as it stated last; 0 = none, or it does not say."""
    unused_bytes: int = 0
    """Of its lease, as it stated last."""
    still: bool = False
    """Lease and statement stood still around the reading."""

    def explains_bytes(self, listed_bytes: int) -> int:
        """Of the memory in use: so much at most is this process's, where NVML lists `listed_bytes` for it."""
        unused_bytes = self.unused_bytes if self.managed_bytes and self.still else 0
        return max(listed_bytes + self.managed_bytes, self.charged_bytes - unused_bytes)


@dataclass(frozen=True, slots=True)
class Unlisted:
    """Memory of one GPU that no process explains."""

    uuid: str
    bytes: int
    used_bytes: int
    """Of the GPU, by all that use it."""


def difference(used_bytes: int | None, holders: Iterable[Holder], charged_bytes: int = 0) -> int | None:
    """What is used and explained by nobody; never below 0. `charged_bytes`: charged to no process alone. None = it is unknown."""
    if used_bytes is None:
        return None
    rest_bytes = used_bytes - charged_bytes
    for holder in holders:
        if holder.listed_bytes is None:
            return None
        rest_bytes -= holder.explains_bytes(holder.listed_bytes)
    return max(0, rest_bytes)


def slack_bytes(processes: int) -> int:
    """How much of the difference says nothing where so many processes hold memory."""
    return SLACK_BYTES + processes * SLACK_EACH_BYTES


class Lookout:
    """Of the GPUs of one node."""

    def __init__(self) -> None:
        self.found: dict[str, Unlisted] = {}
        """By GPU, as of its last reading."""
        self._row_s: dict[str, tuple[float, float]] = {}
        """When the first and the last reading of an unbroken row began that showed more than the slack."""

    def look(self, at_s: float, seen: Mapping[str, Unlisted | None]) -> None:
        """A reading that began then: what each of some GPUs has beyond its slack, None = nothing, or it is unknown. Others stay as they were."""
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
        """All GPUs but these: nobody reads them any more."""
        kept = set(but)
        for uuid in self._row_s.keys() - kept:
            self.found.pop(uuid, None)
            del self._row_s[uuid]


def suspected(looked: Iterable[tuple[Sequence[str], bool | None]]) -> str | None:
    """The one container whose processes may have it; None where there is none, where there are several, and where it is unknown.

    `looked`: of each process that NVML lists nowhere, the grants that it may belong to, by key, and whether it has a GPU open; None = nobody knows.
    An open GPU is no proof of memory, so one container is named only where no other can be meant.
    """
    possible, sure = set[str](), set[str]()
    for keys, opens in looked:
        if opens is not False:
            possible.update(keys)
        if opens and len(keys) == 1:
            sure.add(keys[0])
    return sure.pop() if len(possible) == 1 and sure else None
