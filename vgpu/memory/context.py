"""What part of a process's memory on a GPU is its contexts: all that NVML counts and its allocations do not explain.

NVML says how much memory a process has, at a moment. What it has allocated at that moment is not known to the byte: it states it at most
once a second and takes from its lease meanwhile. So a reading alone gives a range: at least what is more than the lease, at
most all of it. Inside the range the measure stays what it was. A reading becomes exact when the process's records stood still
around it for `CALM_S`: a change before it would have been stated by then.

The lower end of the range is always charged. With it, lease and context together are never less than what NVML saw, whatever
a process says of itself.

NVML lists managed memory for no process (measured, H200 and H100 with driver 580). A process states how much of what it allocated that is, and what it
allocated without it is what a reading is compared with. A library of before that statement says none, and no library counts the `__managed__` variables
of images. So a process may have allocated more than is listed, which says nothing of its contexts: they are charged what they took when they were
made at least, as long as they are there.

Before a call whose cost nobody knows yet (code that is loaded late, a stream) a bound is charged in its place. The first reading after the
last such call settles it: what is charged falls to what NVML counts, as far as the statements explain it.

Units: bytes; seconds of any one clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Final

CALM_S: Final = 1.5
"""Longer than the second in which a library states a change (docs/reference/protocol.md)."""


@dataclass(slots=True)
class _Reading:
    measured_bytes: int
    used_bytes: int
    at_s: float


@dataclass(slots=True)
class ContextMeasure:
    """Of one process on one GPU."""

    bytes: int = 0
    """What is charged."""
    counts_from_s: float = 0.0
    """Readings from before then only raise the measure: what is held for a context may not have been there yet."""
    measured_bytes: int | None = None
    """NVML's last figure for all memory of the process."""
    bound_bytes: int = 0
    """What of `bytes` stands for calls that no reading has seen."""
    settles_from_s: float = 0.0
    """Readings from then on settle the bound; inf while such calls may be made."""
    still: bool = False
    """The records have not moved since a reading that was exact."""
    _most_leased: list[int] = field(default_factory=lambda: [0, 0])
    """The largest lease since the reading before last, and since the last: a reading may be that old when it comes."""
    _calm: list[_Reading] = field(default_factory=list)
    """Readings since the records last moved."""

    def moved(self, leased_bytes: int) -> None:
        """The process's lease or its statement changed."""
        self._calm.clear()
        self.still = False
        self._most_leased[1] = max(self._most_leased[1], leased_bytes)

    def bound(self, bound_bytes: int) -> None:
        """The process may make calls that take so much more."""
        self.bytes += bound_bytes
        self.bound_bytes += bound_bytes
        self.settles_from_s = inf

    def read(
        self,
        measured_bytes: int,
        used_bytes: int,
        leased_bytes: int,
        at_s: float,
        *,
        exact: bool = False,
        opened_bytes: int = 0,
        orphaned_bytes: int = 0,
        made_bytes: int = 0,
    ) -> None:
        """NVML counted `measured_bytes` at `at_s`. `used_bytes`: what the process stated last, but for managed memory. `exact`: it is known to
        have allocated nothing meanwhile.

        Memory of another process, `opened_bytes`, NVML counts for its maker, and for one of those that have it open when there is
        no maker: that is `orphaned_bytes`, which may be in the measure or not. Then the measure is a range, and inside it what is
        charged stays. `made_bytes`: its contexts are there, and took so much when they were made; 0 = there are none, or that is not known.
        """
        self.measured_bytes = measured_bytes
        least = max(0, measured_bytes - max(*self._most_leased, leased_bytes) - opened_bytes)
        self._most_leased = [self._most_leased[1], leased_bytes]
        if at_s < self.counts_from_s:
            self.bytes = max(self.bytes, least)
            return
        bounded_bytes = self.bytes
        self.bytes -= self.bound_bytes
        self._calm.append(_Reading(measured_bytes, used_bytes, at_s))
        sure = [reading for reading in self._calm if exact or at_s - reading.at_s >= CALM_S]
        if sure:
            self.still = True
            most = max(sure[-1].measured_bytes - sure[-1].used_bytes, min(made_bytes, sure[-1].measured_bytes))
            self.bytes = min(max(self.bytes, most - orphaned_bytes), most)
            self._calm = self._calm[len(sure) :]
        self.bytes = min(max(self.bytes, least), measured_bytes)
        if self.bound_bytes:
            explained_bytes = measured_bytes - used_bytes if at_s >= self.settles_from_s else bounded_bytes
            seen_bytes, self.bytes = self.bytes, max(self.bytes, min(bounded_bytes, explained_bytes))
            self.bound_bytes = self.bytes - seen_bytes if at_s < self.settles_from_s else 0
