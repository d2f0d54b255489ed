"""Does a process go around the library, and is it ended for that? Pure.

A process that has GPU memory and is not connected to the arbiter is *unconnected*: that has harmless causes (it is stopped, or the arbiter
has just started), so it is reported and nothing more. It is *bypassing* where nothing of Tangram is in it: the library is not in its memory, or the
grant is mounted nowhere that it sees, **and** it has not connected since it started. What is unknown counts in favour of the process.

    connected since its start   library mapped   grant mounted    state
    no                          no               any              bypassing
    no                          any              no               bypassing
    no                          else                              unconnected
    yes                         no, as below     any              bypassing
    yes                         else                              unconnected
    unknown                     any              any              unconnected

A program that replaces itself (execve) keeps its process and its start, so it was connected although what runs now never was. The kernel takes the
library out of its memory and closes its connection, and no library is ever unloaded otherwise. A process that was connected, is not, and has no
library, is another program since: it counts as started anew. (So does a program without the library that speaks the protocol itself and hangs up.)
For a moment every program is without the library, before the loader has mapped it, and a reading may still show what its former program had. So such a
process bypasses only where it was seen without the library both before and after a reading that found GPU memory. If it connects, it is connected.

Neither a mapping nor a connection proves that a process keeps its limit: of those that are not bypassing, `vgpu.memory.over_limit` sees what is over it.

A bypassing process is ended only where its container's memory passes limit, context room and slack, and the arbiter has run for a minute: then every
process that can connect has. What the limit is passed by is judged of the container, as programs may come and go faster than readings: in three
readings in a row it must have passed, and each of them must have found a process that bypasses, be it another one each time. From then on the
container is *known to bypass*, and the first reading in which it passes its limit kills the processes that bypass then. That lasts until no such reading has
come for a minute. A reading of which it is unknown whether a process in it bypasses, as all are gone already, neither counts nor breaks the row, but
not more than three of them.

A program may start another one for each that is ended, and so hold the memory nearly all the time. So where processes of a container were ended by three
readings within a minute, whatever starts them is ended, too: all processes of the container. The kubelet starts the container again, later each time.

Units: bytes, seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal

READINGS: Final = 3
"""Specified."""
APART_S: Final = 0.5
"""Readings closer together count as one: the arbiter takes more of them while contexts are made. Guessed: half of their period."""
QUIET_S: Final = 60.0
"""After a start of the arbiter no process is killed for so long. Specified."""
KNOWN_S: Final = 60.0
"""So long after the last reading that showed it, a container is known to bypass. Guessed: a process that waits longer between two attempts has the memory
for three seconds of each minute."""

RETURNS: Final = 3
"""Readings by which processes were ended, within `KNOWN_S`: then all of the container is. Guessed: two may be a program that is started once more by hand."""

Policy = Literal["report", "evict", "kill"]
POLICIES: Final[tuple[Policy, ...]] = ("report", "evict", "kill")
DEFAULT: Final[Policy] = "kill"


@dataclass(frozen=True, slots=True)
class Traces:
    """What a process that is not connected shows. None = unknown."""

    connected: bool | None = None
    """Was it connected since it started?"""
    mapped: bool | None = None
    """Is the library in its memory?"""
    mounted: bool | None = None
    """Does it see a mount of a grant?"""
    replaced_s: float = inf
    """Of one that was connected: since when it has been seen without the library, and has not connected again."""
    looked_s: float = -inf
    """When this was looked for."""


def bypassing(traces: Traces | None, reading_s: float = inf) -> bool | None:
    """As the module's table, of a process that a reading found that began then; None = it is unknown, now or ever."""
    if traces is None:
        return None
    if traces.connected is not False:
        return traces.connected is True and traces.mapped is False and traces.replaced_s < reading_s < traces.looked_s
    if traces.mapped is False or traces.mounted is False:
        return True
    return None if traces.mapped is None else False


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The memory of one process on a GPU of its container."""

    pid: int
    held_bytes: int
    bypassing: bool | None = False
    """None = it is unknown."""


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
class _Row:
    """Readings of one GPU that show the container beyond its limit by processes that bypass."""

    at_s: float = -inf
    """The reading that is judged."""
    before: tuple[int, int] = 0, 0
    """As `now`, before that reading."""
    now: tuple[int, int] = 0, 0
    """How many they are, and how many since then of which nothing is known."""
    counted_s: float = -inf
    """The last of them."""
    before_s: float = -inf
    """The last of them before that reading."""
    known_s: float = -inf
    """The last one that found a container that is known to bypass."""


@dataclass(slots=True)
class Patience:
    """Of one container. `beyond_bytes`: context room and slack together, for each GPU."""

    beyond_bytes: int = 0
    _rows: dict[str, _Row] = field(default_factory=dict)

    def look(
        self, at_s: float, limits_bytes: Mapping[str, int], held: Mapping[str, Sequence[ProcessMemory]]
    ) -> tuple[Bypass, ...]:
        """Take a reading of some GPUs in, or the last one again, of whose processes more is known by now. What it answers stands until a reading
        denies it."""
        found = []
        for uuid in sorted(held.keys() & limits_bytes.keys()):
            most = limits_bytes[uuid] + self.beyond_bytes
            total = sum(one.held_bytes for one in held[uuid])
            row = self._rows.setdefault(uuid, _Row())
            if _judge(row, at_s, held[uuid], over=total > most):
                found.append(Bypass(uuid, total, limits_bytes[uuid], _enough(held[uuid], total - most)))
        return tuple(found)


@dataclass(slots=True)
class Returns:
    """Of one container: when processes that bypass were ended."""

    _ended_s: list[float] = field(default_factory=list)

    def ended(self, at_s: float) -> bool:
        """By a reading that began then, at least one was. Is the container ended with it? A reading that is judged again counts once."""
        self._ended_s = [then_s for then_s in self._ended_s if at_s - KNOWN_S <= then_s < at_s] + [at_s]
        return len(self._ended_s) >= RETURNS


def _judge(row: _Row, at_s: float, processes: Sequence[ProcessMemory], *, over: bool) -> bool:
    """Does this reading kill a process?"""
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
