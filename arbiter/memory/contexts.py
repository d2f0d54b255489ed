"""The contexts of one container's processes: who waits for a measure, and what a reading of NVML means for the ledger."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Final

from arbiter import host
from arbiter.connection import Connection
from arbiter.memory.bypass import Rules
from arbiter.memory.meter import Meter, Reading
from arbiter.memory.over_limit import Kills
from arbiter.memory.tracer import Tracer
from vgpu.memory.ledger import Ledger
from vgpu.memory.over_limit import Held
from vgpu.memory.records import Event
from vgpu.protocol import wire

ENDS_WITHIN_S: Final = 0.8
"""A process that is not connected counts once readings have shown it for so long. Guessed: less than the second between two readings of which none
was hurried. A killed process hangs up at once, and the driver counts it for some time after that."""


LEFT_MOST: Final = 1024
"""Processes that hung up before the first reading, and are remembered until it. Guessed: it comes within a second."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A process that said DONE or GONE and is owed a MEASURED."""

    process: int
    gpu: int
    seq: int
    since_s: float
    exact: bool
    """It allocates nothing until it is answered."""
    made: bool
    """DONE: what is found is what a context takes."""


@dataclass(slots=True)
class Measuring:
    """What all containers of a node share."""

    meter: Meter | None = None
    costs: dict[str, int] = field(default_factory=dict)
    """UUID -> the least that a context made there took: nobody can make it dearer for the others."""
    slack_bytes: int = 0
    """How far a container may be beyond its limit before the guard minds."""
    kills: Kills = field(default_factory=Kills)
    tracer: Tracer | None = None
    rules: Rules = field(default_factory=Rules)
    """About processes that go around the library."""

    def learn(self, uuid: str, context_bytes: int) -> None:
        """A context was made and measured."""
        self.costs[uuid] = min(context_bytes, self.costs.get(uuid, context_bytes))

    @property
    def works(self) -> bool:
        """Is NVML read?"""
        return self.meter is not None and not self.meter.trouble

    @property
    def awaitable(self) -> bool:
        """Does a reading come, or the word that there is none? True also while NVML is still being opened."""
        return self.meter is not None and (self.works or not self.meter.tried)


class Contexts:
    """See the module."""

    def __init__(self) -> None:
        self.unconnected_usage: dict[str, dict[int, int]] = {}
        """UUID -> pid -> bytes of processes of this container that are not connected, in the last reading."""
        self._shown_from_s: dict[int, float] = {}
        """When the first reading of an unbroken row that shows each of them began; -inf for those of the arbiter's first one."""
        self._read_s = -inf
        """When the last reading began."""
        self.starts: dict[int, int] = {}
        """Of each of them, as far as the host knows."""
        self._first = True
        self._left: deque[int] = deque(maxlen=LEFT_MOST)
        """Pids that hung up before the arbiter's first reading."""
        self._waiting: dict[tuple[int, int], Waiting] = {}
        """By process and GPU: a repeated request has the answer to the last."""

    def wait(self, waiting: Waiting) -> None:
        """Answer this one from a reading that begins after it asked."""
        self._waiting[waiting.process, waiting.gpu] = waiting

    def forget(self, process: int, pid: int) -> None:
        """It hung up."""
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if waiting.process != process}
        if self._first:
            self._left.append(pid)

    def answered(self, reading: Reading) -> list[Waiting]:
        """Who can be answered now."""
        due = {key: waiting for key, waiting in self._waiting.items() if waiting.since_s <= reading.at_s}
        for key in due:
            del self._waiting[key]
        return list(due.values())

    @property
    def restless(self) -> bool:
        """Is there a process that waits for a reading, or one that is not connected?"""
        return bool(self._waiting or self._shown_from_s or any(self.unconnected_usage.values()))

    def measure(
        self, ledger: Ledger, uuids: list[str], connections: Iterable[Connection], reading: Reading, now_s: float
    ) -> list[Event]:
        """Bring the memory of each connected process into the ledger. A pid that connected twice counts once: the older has it all."""
        exact = {(w.process, w.gpu) for w in self._waiting.values() if w.exact and w.since_s <= reading.at_s}
        events: list[Event] = []
        pids: set[int] = set()
        for connection in connections:
            if connection.pid in pids or connection.pid == 0:
                continue
            pids.add(connection.pid)
            for gpu, uuid in enumerate(uuids):
                measured = reading.gpus[uuid].get(connection.pid, 0) if uuid in reading.gpus else None
                if measured is not None:
                    sure = (connection.number, gpu) in exact
                    events += ledger.measure(connection.number, gpu, measured, reading.at_s, now_s, exact=sure)
        return events

    def held(
        self, key: str, ledger: Ledger, uuids: list[str], connections: Iterable[Connection], reading: Reading
    ) -> dict[str, list[Held]]:
        """What NVML counts for this container's processes, for the guard: the connected ones and those that have its mount."""
        by_pid = {connection.pid: connection.number for connection in reversed(list(connections))}
        found: dict[str, list[Held]] = {}
        for gpu, uuid in enumerate(uuids):
            if uuid not in reading.gpus:
                continue
            found[uuid] = []
            self.unconnected_usage[uuid] = {}
            for pid, measured in reading.gpus[uuid].items():
                of = reading.seen[pid].key
                if measured is None or (of != key if of is not None else pid not in by_pid):
                    continue
                explained = 0
                if pid in by_pid:
                    part = ledger.part_of(by_pid[pid], gpu)
                    explained = part.leased_bytes + part.context_bytes
                else:
                    self.unconnected_usage[uuid][pid] = measured
                found[uuid].append(Held(pid, measured, explained))
            for pid, part_bytes in reading.parts.get(key, {}).get(uuid, {}).items():
                self.unconnected_usage[uuid][pid] = part_bytes
                found[uuid].append(Held(pid, part_bytes, 0))
        self._count(reading)
        return found

    def _count(self, reading: Reading) -> None:
        """A reading may know of a process that is just ending, whose connection is closed by then; so may the next, if somebody hurries it. At an
        arbiter's start one is enough for who was not met: nothing is lent yet, and it is here for longer. An MPS server runs the work of others; it is known by its
        name alone, which any process of a pod can take."""
        ending = set(self._left)
        since_s = -inf if self._first else reading.at_s
        if reading.gpus:
            self._first = False
            self._left.clear()
        self._read_s = reading.at_s
        fresh = {
            pid: reading.seen[pid].started
            for held in self.unconnected_usage.values()
            for pid in held
            if pid in reading.seen
        }
        self.starts = {pid: at for pid, at in self.starts.items() if pid in self._shown_from_s} | fresh
        self._shown_from_s = {
            pid: self._shown_from_s.get(pid, reading.at_s if pid in ending else since_s)
            for held in self.unconnected_usage.values()
            for pid in held
            if pid not in reading.seen or not reading.seen[pid].mps_server or reading.seen[pid].place.pod
        }

    def unconnected(self) -> tuple[int, ...]:
        """Host pids of processes of this container that hold GPU memory and are not connected."""
        return tuple(
            sorted(pid for pid, since_s in self._shown_from_s.items() if self._read_s - since_s >= ENDS_WITHIN_S)
        )

    def suspects(self) -> frozenset[int]:
        """Those of the last reading alone, among them perhaps one that was ending."""
        return frozenset(self._shown_from_s)

    def unconnected_bytes(self, uuid: str) -> int:
        """What they hold of a GPU."""
        return sum(self.unconnected_usage.get(uuid, {}).get(pid, 0) for pid in self.unconnected())

    def met(self, pid: int) -> bool:
        """It is connected from now on. Whether it was not before, as far as readings go."""
        for held in self.unconnected_usage.values():
            held.pop(pid, None)
        return self._shown_from_s.pop(pid, None) is not None

    def listed(
        self, ledger: Ledger, gpu: int, uuid: str, connections: Iterable[Connection]
    ) -> list[wire.ListedProcess]:
        """Who of this container is on a GPU, for nvidia-smi in it; those that hold nothing are left out."""
        listed = []
        for other in connections:
            part = ledger.part_of(other.number, gpu)
            held = part.measured_bytes or part.used_bytes + part.context_bytes
            listed.append(wire.ListedProcess(other.pid_in_container, held))
        listed += [
            wire.ListedProcess(host.pid_inside(pid), measured)
            for pid, measured in self.unconnected_usage.get(uuid, {}).items()
        ]
        return [process for process in listed if process.used_bytes and process.pid]
