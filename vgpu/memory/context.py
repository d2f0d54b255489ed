"""The part of a process's GPU memory that its contexts use: all that NVML counts and its allocations do not explain.

NVML lists how much memory a process has at a moment. The size of its allocations at that moment is not known to the byte: the process states it at
most once a second and allocates from its lease meanwhile. So a single reading leads to a range: at least the excess over the lease, at
most all of it. Inside the range the measure stays unchanged. A reading becomes exact if the process's records did not change
for `CALM_S` around it: the process would have stated a change before it by then.

The lower end of the range is always charged. With it, lease and context together are never less than NVML's count, whatever
the process states.

NVML lists managed memory for no process (measured, H200 and H100 with driver 580). A process states how much of its allocations is managed, and a reading
is compared with the rest. A library of a release before that statement states none, and no library counts the `__managed__` variables of images.
So a process may have allocated more than is listed, which shows nothing about its contexts: while they exist, they are charged at least their size when
they were made.

Before a call of unknown cost (code that is loaded late, a stream) a bound is charged instead. The first reading after the last such call
settles it: the charge falls to NVML's count, as far as the statements explain it.

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
    """The measure of one process on one GPU."""

    bytes: int = 0
    """The charged size."""
    counts_from_s: float = 0.0
    """Earlier readings only raise the measure: the context may not have existed yet."""
    measured_bytes: int | None = None
    """NVML's last figure for all memory of the process."""
    bound_bytes: int = 0
    """The part of `bytes` for calls that no reading covers yet."""
    settles_from_s: float = 0.0
    """Readings from then on settle the bound; inf while such calls may be made."""
    still: bool = False
    """The records have not changed since an exact reading."""
    _most_leased: list[int] = field(default_factory=lambda: [0, 0])
    """The largest lease since the reading before last, and since the last: a reading may be that old when it arrives."""
    _calm: list[_Reading] = field(default_factory=list)
    """Readings since the records last changed."""

    def moved(self, leased_bytes: int) -> None:
        """The process's lease or its statement changed."""
        self._calm.clear()
        self.still = False
        self._most_leased[1] = max(self._most_leased[1], leased_bytes)

    def bound(self, bound_bytes: int) -> None:
        """The process may make calls that use `bound_bytes` more."""
        self.bytes += bound_bytes
        self.bound_bytes += bound_bytes
        self.settles_from_s = inf

    def unbound(self, unneeded_bytes: int) -> None:
        """For so much of the bound no call was made."""
        cut_bytes = min(unneeded_bytes, self.bound_bytes)
        self.bytes -= cut_bytes
        self.bound_bytes -= cut_bytes

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
        """NVML counted `measured_bytes` at `at_s`. `used_bytes`: the last stated size, without managed memory. `exact`: the process has certainly
        allocated nothing meanwhile.

        NVML counts the memory of another process, `opened_bytes`, for its maker, and without a maker for one of the processes that have it open:
        that is `orphaned_bytes`, which may be in the measure or not. Then the measure is a range, and inside it the charge stays unchanged.
        `made_bytes`: the size of its contexts when they were made; 0 = there are none, or it is unknown.
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
