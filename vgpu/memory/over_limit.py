"""Is a container over its limit, and which of its processes is it?

The library limits a program to its lease; a program that goes around it is seen only from outside. So what NVML counts for all
processes of a container is compared with the limit. Once may be chance (a reading is not taken at one moment): a container is
over after `READINGS` in a row. Pure: who belongs to a container and what is done about it is the arbiter's.

Units: bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

READINGS: Final = 2
"""Specified: a new reading comes every second, so a container is dealt with within about two."""


@dataclass(frozen=True, slots=True)
class Held:
    """What NVML counts for one process on one GPU."""

    pid: int
    measured_bytes: int
    explained_bytes: int
    """Of it, leased from the arbiter or held for contexts; 0 for a process that never asked."""


@dataclass(frozen=True, slots=True)
class Excess:
    """A GPU on which a container is over."""

    uuid: str
    measured_bytes: int
    limit_bytes: int
    offender: int
    """The pid to deal with."""


@dataclass(slots=True)
class Lookout:
    """Watches one container. `slack_bytes`: this much beyond the limit is passed over."""

    slack_bytes: int = 0
    excesses: tuple[Excess, ...] = ()
    """GPUs that are over now, by UUID."""
    _in_a_row: dict[str, int] = field(default_factory=dict)

    def look(self, limits_bytes: Mapping[str, int], held: Mapping[str, Sequence[Held]]) -> tuple[Excess, ...]:
        """Take a reading of some GPUs in. Returns what is newly over; a GPU that was not read stays as it was."""
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


def _excess(uuid: str, limit_bytes: int, slack_bytes: int, processes: Sequence[Held]) -> Excess | None:
    total_bytes = sum(process.measured_bytes for process in processes)
    if total_bytes <= limit_bytes + slack_bytes:
        return None
    return Excess(uuid, total_bytes, limit_bytes, offender(processes))


def offender(processes: Sequence[Held]) -> int:
    """The process with most memory that nothing explains; among equals the one with most in all, then the lowest pid."""
    return max(processes, key=lambda p: (p.measured_bytes - p.explained_bytes, p.measured_bytes, -p.pid)).pid
