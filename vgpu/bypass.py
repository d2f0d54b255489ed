"""Does a process go around the library, and is it ended for that? Pure.

A process that holds GPU memory and is not connected to the arbiter is *unconnected*: that has harmless causes (it is stopped, or the arbiter
has just started), so it is reported and nothing more. It is *bypassing* where nothing of Tangram is in it: the library is not in its memory, or the
grant is mounted nowhere that it sees, **and** it has not connected since it started. What nobody knows speaks for the process.

    connected since its start   library mapped   grant mounted    state
    yes, or nobody knows        any              any              unconnected
    no                          no               any              bypassing
    no                          any              no               bypassing
    no                          else                              unconnected

Neither a mapping nor a connection proves that a process keeps its limit: of those that are not bypassing, `vgpu.guard` sees what is over it.

A bypassing process is ended only where its container's memory passes limit, context room and slack in three readings in a row, and the arbiter has
run for a minute: then every process that can connect has.

Units: bytes, seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

READINGS: Final = 3
"""Specified."""
APART_S: Final = 0.5
"""Readings closer together count as one: the arbiter takes more of them while contexts are made. Guessed: half of their period."""
QUIET_S: Final = 60.0
"""After a start of the arbiter nobody is ended for so long. Specified."""

Policy = Literal["report", "evict", "kill"]
POLICIES: Final[tuple[Policy, ...]] = ("report", "evict", "kill")
DEFAULT: Final[Policy] = "kill"


@dataclass(frozen=True, slots=True)
class Traces:
    """What a process that is not connected shows. None = nobody knows."""

    connected: bool | None = None
    """Was it connected since it started?"""
    mapped: bool | None = None
    """Is the library in its memory?"""
    mounted: bool | None = None
    """Does it see a mount of a grant?"""


def bypassing(traces: Traces) -> bool:
    """As the module's table."""
    return traces.connected is False and (traces.mapped is False or traces.mounted is False)


@dataclass(frozen=True, slots=True)
class Share:
    """What one process holds of a GPU of its container."""

    pid: int
    held_bytes: int
    bypassing: bool = False


@dataclass(frozen=True, slots=True)
class Bypass:
    """A GPU on which a container passes its limit by processes that go around the library."""

    uuid: str
    held_bytes: int
    """By all processes of the container."""
    limit_bytes: int
    pids: tuple[int, ...]
    """Those to end, the largest first: without them the container is within its limit, or none that bypasses is left."""


@dataclass(slots=True)
class Patience:
    """Of one container. `beyond_bytes`: context room and slack together, for each GPU."""

    beyond_bytes: int = 0
    _in_a_row: dict[str, int] = field(default_factory=dict)
    _counted_s: dict[str, float] = field(default_factory=dict)

    def look(
        self, at_s: float, limits_bytes: Mapping[str, int], held: Mapping[str, Sequence[Share]]
    ) -> tuple[Bypass, ...]:
        """Take a reading of some GPUs in. What it answers has lasted for `READINGS`, and stands until a reading denies it."""
        found = []
        for uuid in sorted(held.keys() & limits_bytes.keys()):
            most = limits_bytes[uuid] + self.beyond_bytes
            total = sum(one.held_bytes for one in held[uuid])
            self._count(uuid, at_s, over=total > most)
            if self._in_a_row[uuid] >= READINGS and (pids := _enough(held[uuid], total - most)):
                found.append(Bypass(uuid, total, limits_bytes[uuid], pids))
        return tuple(found)

    def _count(self, uuid: str, at_s: float, *, over: bool) -> None:
        if not over:
            self._in_a_row[uuid] = 0
            self._counted_s.pop(uuid, None)
        elif uuid not in self._counted_s or at_s - self._counted_s[uuid] >= APART_S:
            self._in_a_row[uuid] = self._in_a_row.get(uuid, 0) + 1
            self._counted_s[uuid] = at_s


def _enough(processes: Sequence[Share], excess_bytes: int) -> tuple[int, ...]:
    """Bypassing processes that hold more than that together, or all of them."""
    pids: list[int] = []
    for one in sorted((p for p in processes if p.bypassing), key=lambda p: (-p.held_bytes, p.pid)):
        if excess_bytes <= 0:
            break
        pids.append(one.pid)
        excess_bytes -= one.held_bytes
    return tuple(pids)


def action(policy: Policy, *, runs_s: float, visible: bool = True, quiet_s: float = QUIET_S) -> Policy:
    """What follows from a `Bypass` now. `runs_s`: since the arbiter's start; `visible`: are the node's processes seen?"""
    return policy if visible and runs_s >= quiet_s else "report"
