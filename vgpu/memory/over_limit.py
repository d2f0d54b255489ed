"""Whether a container is over its limit, and which of its processes causes it.

The library limits a program to its lease; a program that bypasses it can be seen only from outside. So NVML's count for all
processes of a container is compared with the limit. A single excess may be chance (a reading covers more than one moment): a container is
over its limit after `READINGS` in a row. Pure: the arbiter decides which processes belong to a container, and acts.

Units: bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

READINGS: Final = 2
"""Specified: a new reading comes every second, so the arbiter acts within about two."""


@dataclass(frozen=True, slots=True)
class MeasuredProcess:
    """NVML's count for one process on one GPU."""

    pid: int
    measured_bytes: int
    explained_bytes: int
    """The part of it that is leased from the arbiter or charged for contexts; 0 for a process that never requested a lease."""


@dataclass(frozen=True, slots=True)
class Excess:
    """A GPU on which a container is over its limit."""

    uuid: str
    measured_bytes: int
    limit_bytes: int
    offender: int
    """The pid of the process to act on."""


@dataclass(slots=True)
class OverLimitDetector:
    """Checks one container. `slack_bytes`: tolerated excess over the limit."""

    slack_bytes: int = 0
    excesses: tuple[Excess, ...] = ()
    """GPUs on which the container is over its limit now, by UUID."""
    _in_a_row: dict[str, int] = field(default_factory=dict)

    def evaluate(
        self, limits_bytes: Mapping[str, int], held: Mapping[str, Sequence[MeasuredProcess]]
    ) -> tuple[Excess, ...]:
        """Evaluate a reading of some GPUs. Returns the new excesses; the state of a GPU that was not read stays unchanged."""
        before = {excess.uuid for excess in self.excesses}
        now = {excess.uuid: excess for excess in self.excesses if excess.uuid in limits_bytes}
        for uuid, processes in held.items():
            if uuid not in limits_bytes:
                continue
            excess = _excess(uuid, limits_bytes[uuid], self.slack_bytes, processes)
            self._in_a_row[uuid] = self._in_a_row.get(uuid, 0) + 1 if excess else 0
            now.pop(uuid, None)
            if excess is not None and self._in_a_row[uuid] >= READINGS:
                now[uuid] = excess
        self.excesses = tuple(now[uuid] for uuid in sorted(now))
        return tuple(excess for excess in self.excesses if excess.uuid not in before)


def _excess(uuid: str, limit_bytes: int, slack_bytes: int, processes: Sequence[MeasuredProcess]) -> Excess | None:
    total_bytes = sum(process.measured_bytes for process in processes)
    if total_bytes <= limit_bytes + slack_bytes:
        return None
    return Excess(uuid, total_bytes, limit_bytes, offender(processes))


def offender(processes: Sequence[MeasuredProcess]) -> int:
    """The process with the most unexplained memory; among equals the one with the most in all, then the lowest pid."""
    return max(processes, key=lambda p: (p.measured_bytes - p.explained_bytes, p.measured_bytes, -p.pid)).pid
