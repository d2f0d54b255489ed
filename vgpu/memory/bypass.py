"""Whether a process bypasses the library, and whether the arbiter kills it for that. Pure.

A process that has GPU memory and is not connected to the arbiter is *unconnected*: that has harmless causes (it is stopped, or the arbiter
has just started), so it is only reported. It is *bypassing* if it has no part of Tangram: the library is not mapped, or its mount namespace has no
grant, **and** it has not connected since it started. Unknown facts count in favour of the process.

    connected since its start   library mapped   grant mounted    state
    no                          no               any              bypassing
    no                          any              no               bypassing
    no                          else                              unconnected
    yes                         no, as below     any              bypassing
    yes                         else                              unconnected
    unknown                     any              any              unconnected

A program that replaces itself (execve) keeps its process and its start time, so the process was connected although the new program never was. The
kernel unmaps the library and closes its connection, and no library is ever unloaded otherwise. So a process that was connected, is not now, and has no
library, runs another program: it counts as newly started. (So does a program without the library that uses the protocol itself and disconnects.)
For a moment every program is without the library, before the loader has mapped it, and a reading may still show the memory of the former program. So
such a process bypasses only if it had no library both before and after a reading that found GPU memory. If it connects, it is connected.

Neither a mapping nor a connection proves that a process stays within its limit: `vgpu.memory.over_limit` detects the excess of the others.

The arbiter kills a bypassing process only if its container's memory exceeds limit, context room and slack, and the arbiter has run for a minute: then
every process that can connect has connected. The excess is judged by container, because programs may start and end faster than readings: the
container must exceed the limit in three readings in a row, and each must find a bypassing process, perhaps a different one each time. From then on the
container is *known to bypass*, and the first reading in which it exceeds its limit kills the processes that bypass then. That lasts until no such reading
has come for a minute. If all processes of a reading have ended, it is unknown whether one of them bypassed. Such a reading neither counts nor breaks
the row, up to three of them.

A program may start another one for each that is killed, and so use the memory nearly all the time. So if three readings within a minute killed processes
of a container, the arbiter kills all processes of the container, and with them the one that starts the others. The kubelet restarts the container, with
a longer delay each time.

Units: bytes, seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from vgpu.api.names import OverLimitAction

READINGS: Final = 3
"""Specified."""
APART_S: Final = 0.5
"""Readings closer together count as one: the arbiter reads more often while contexts are made. Guessed: half of their period."""
QUIET_S: Final = 60.0
"""For this long after its start the arbiter kills no process. Specified."""
KNOWN_S: Final = 60.0
"""A container is known to bypass for this long after the last reading that showed it. Guessed: a process that waits longer between two attempts uses the
memory for three seconds of each minute."""

RETURNS: Final = 3
"""Readings within `KNOWN_S` that killed processes, after which the arbiter kills the whole container. Guessed: two may be a program that is restarted once
by hand."""

DEFAULT_ACTION: Final[OverLimitAction] = "kill"
"""The action on a process that bypasses the library."""


@dataclass(frozen=True, slots=True)
class Traces:
    """Facts about a process that is not connected. None = unknown."""

    connected: bool | None = None
    """Whether it has connected since it started."""
    mapped: bool | None = None
    """Whether the library is mapped in its memory."""
    mounted: bool | None = None
    """Whether its mount namespace has a grant."""
    replaced_s: float = inf
    """If it was connected: since when it has been without the library and a new connection."""
    examined_s: float = -inf
    """When these facts were read."""


def bypassing(traces: Traces | None, reading_s: float = inf) -> bool | None:
    """The module's table for a process in a reading that began at `reading_s`; None = unknown, now or for ever."""
    if traces is None:
        return None
    if traces.connected is not False:
        return traces.connected is True and traces.mapped is False and traces.replaced_s < reading_s < traces.examined_s
    if traces.mapped is False or traces.mounted is False:
        return True
    return None if traces.mapped is None else False


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The memory of one process on a GPU of its container."""

    pid: int
    held_bytes: int
    bypassing: bool | None = False
    """None = unknown."""


@dataclass(frozen=True, slots=True)
class Bypass:
    """A GPU on which a container exceeds its limit by processes that bypass the library."""

    uuid: str
    held_bytes: int
    """By all processes of the container."""
    limit_bytes: int
    pids: tuple[int, ...]
    """The processes to kill, the largest first: without them the container is within its limit, or no bypassing process is left."""


@dataclass(slots=True)
class _Streak:
    """Readings of one GPU in which the container exceeds its limit by bypassing processes."""

    at_s: float = -inf
    """The present reading."""
    before: tuple[int, int] = 0, 0
    """As `now`, before that reading."""
    now: tuple[int, int] = 0, 0
    """The number of these readings, and the number of undecided readings since the last of them."""
    counted_s: float = -inf
    """The last of them."""
    before_s: float = -inf
    """The last of them before that reading."""
    known_s: float = -inf
    """The last reading that found the container known to bypass."""


@dataclass(slots=True)
class BypassDetector:
    """The detector of one container. `beyond_bytes`: context room and slack together, for each GPU."""

    beyond_bytes: int = 0
    _rows: dict[str, _Streak] = field(default_factory=dict)

    def evaluate(
        self, at_s: float, limits_bytes: Mapping[str, int], held: Mapping[str, Sequence[ProcessMemory]]
    ) -> tuple[Bypass, ...]:
        """Evaluate a reading of some GPUs, or the last reading again once more facts about its processes are known. The result is valid until a
        reading contradicts it."""
        found = []
        for uuid in sorted(held.keys() & limits_bytes.keys()):
            most = limits_bytes[uuid] + self.beyond_bytes
            total = sum(one.held_bytes for one in held[uuid])
            row = self._rows.setdefault(uuid, _Streak())
            if _judge(row, at_s, held[uuid], over=total > most):
                found.append(Bypass(uuid, total, limits_bytes[uuid], _enough(held[uuid], total - most)))
        return tuple(found)


@dataclass(slots=True)
class RepeatedKills:
    """The times at which bypassing processes of one container were killed."""

    _ended_s: list[float] = field(default_factory=list)

    def ended(self, at_s: float) -> bool:
        """A reading that began at `at_s` killed at least one process. Returns whether to kill the whole container. A reading that is evaluated again
        counts once."""
        self._ended_s = [then_s for then_s in self._ended_s if at_s - KNOWN_S <= then_s < at_s] + [at_s]
        return len(self._ended_s) >= RETURNS


def _judge(row: _Streak, at_s: float, processes: Sequence[ProcessMemory], *, over: bool) -> bool:
    """Whether this reading kills a process."""
    if at_s != row.at_s:
        row.at_s, row.before, row.before_s = at_s, row.now, row.counted_s
    count, blanks = row.before
    again = at_s - row.before_s < APART_S
    row.now, row.counted_s = (0, 0), row.before_s
    if not over:
        return False
    if any(one.bypassing for one in processes):
        row.now, row.counted_s = (count + (not again), 0), row.before_s if again else at_s
        if row.now[0] < READINGS and at_s - row.known_s > KNOWN_S:
            return False
        row.known_s = at_s
        return True
    if any(one.bypassing is None for one in processes) and blanks < READINGS:
        row.now = count, blanks + (not again)
    return False


def _enough(processes: Sequence[ProcessMemory], excess_bytes: int) -> tuple[int, ...]:
    """Bypassing processes that use more than `excess_bytes` together, or all of them."""
    pids: list[int] = []
    for one in sorted((p for p in processes if p.bypassing), key=lambda p: (-p.held_bytes, p.pid)):
        if excess_bytes <= 0:
            break
        pids.append(one.pid)
        excess_bytes -= one.held_bytes
    return tuple(pids)


def action_now(
    configured: OverLimitAction, *, runs_s: float, visible: bool = True, quiet_s: float = QUIET_S
) -> OverLimitAction:
    """The action on a `Bypass` now. `runs_s`: time since the arbiter's start; `visible`: whether the arbiter can see the node's processes."""
    return configured if visible and runs_s >= quiet_s else "report"
