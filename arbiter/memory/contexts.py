"""The contexts of one container's processes: which processes wait for a measurement, and what the ledger charges by a reading of NVML."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from arbiter import host
from arbiter.connection import Connection
from arbiter.memory.bypass import BypassRules
from arbiter.memory.highest_limits import HighestLimits
from arbiter.memory.meter import MemoryReading, Meter
from arbiter.memory.over_limit import Kills
from arbiter.memory.passing import Passing
from arbiter.memory.tracer import Tracer
from vgpu.memory.ledger import Ledger
from vgpu.memory.over_limit import MeasuredProcess
from vgpu.memory.records import Event
from vgpu.protocol import wire

ENDS_WITHIN_S: Final = 0.8
"""A process that is not connected counts once readings have shown it for this long. Guessed: less than the second between two regular
readings. The connection of a killed process closes at once, and the driver counts its memory for some time after that."""


MEASURED_WITHIN_S: Final = 0.5
"""A library has given up waiting for MEASURED after that, and may have allocated. Specified: protocol.md."""
LEFT_MOST: Final = 1024
"""Processes that disconnected before the first reading, and are stored until it. Guessed: it comes within a second."""


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """A process that sent DONE or GONE and waits for a MEASURED."""

    process: int
    gpu: int
    seq: int
    since_s: float
    exact: bool
    """It allocates nothing until the answer, or until it gives up waiting for that."""
    made: bool
    """DONE: the measured memory is the size of a context."""
    gave_up: bool = False
    """It was to allocate nothing until the answer, and did not wait so long: the measure may be of more or less than a context."""

    def at(self, now_s: float) -> MeasureRequest:
        """As it is at that time."""
        return self if not self.exact or now_s < self.since_s + MEASURED_WITHIN_S else self.given_up()

    def given_up(self) -> MeasureRequest:
        """The process no longer waits."""
        return replace(self, exact=False, gave_up=self.gave_up or self.exact)


@dataclass(slots=True)
class NodeMemory:
    """Facts and rules that all containers of a node share."""

    meter: Meter | None = None
    costs: dict[str, int] = field(default_factory=dict)
    """UUID -> the smallest context made there: no container can raise the estimate for the others."""
    slack_bytes: int = 0
    """How far a container may exceed its limit before that is reported."""
    kills: Kills = field(default_factory=Kills)
    tracer: Tracer | None = None
    rules: BypassRules = field(default_factory=BypassRules)
    """The rules for processes that bypass the library."""
    passing: Passing = field(default_factory=Passing)
    highest: HighestLimits = field(default_factory=HighestLimits)

    def learn(self, uuid: str, context_bytes: int) -> None:
        """A context was made and measured."""
        self.costs[uuid] = min(context_bytes, self.costs.get(uuid, context_bytes))

    @property
    def works(self) -> bool:
        """Whether NVML is read."""
        return self.meter is not None and not self.meter.trouble

    @property
    def awaitable(self) -> bool:
        """Whether a reading, or a notice that there is none, will come. True also while NVML is still being opened."""
        return self.meter is not None and (self.works or not self.meter.tried)


class Contexts:
    """See the module."""

    def __init__(self) -> None:
        self.unconnected_usage: dict[str, dict[int, int]] = {}
        """UUID -> pid -> bytes of processes of this container that are not connected, in the last reading."""
        self._shown_from_s: dict[int, float] = {}
        """The beginning of the first reading in the unbroken row that shows each of them; -inf for those in the arbiter's first reading."""
        self._read_s = -inf
        """When the last reading began."""
        self.starts: dict[int, int] = {}
        """The host's facts about each of them."""
        self._first = True
        self._left: deque[int] = deque(maxlen=LEFT_MOST)
        """Pids that disconnected before the arbiter's first reading."""
        self._waiting: dict[tuple[int, int], MeasureRequest] = {}
        """By process and GPU: a repeated request replaces the last one."""

    def wait(self, waiting: MeasureRequest) -> None:
        """Answer this request from a reading that begins after it."""
        self._waiting[waiting.process, waiting.gpu] = waiting

    def allocates(self, process: int, gpu: int) -> None:
        """The process requests memory: it no longer waits for its answer."""
        if (waiting := self._waiting.get((process, gpu))) is not None:
            self._waiting[process, gpu] = waiting.given_up()

    def forget(self, process: int, pid: int) -> None:
        """The process disconnected."""
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if waiting.process != process}
        if self._first:
            self._left.append(pid)

    def answered(self, reading: MemoryReading) -> list[MeasureRequest]:
        """The requests that can be answered now."""
        due = {key: waiting for key, waiting in self._waiting.items() if waiting.since_s <= reading.at_s}
        for key in due:
            del self._waiting[key]
        return list(due.values())

    @property
    def restless(self) -> bool:
        """Whether a process waits for a reading, or is not connected."""
        return bool(self._waiting or self._shown_from_s or any(self.unconnected_usage.values()))

    def measure(
        self,
        ledger: Ledger,
        uuids: list[str],
        connections: Iterable[Connection],
        reading: MemoryReading,
        now_s: float,
        away_bytes: Callable[[int, int], int] = lambda *_: 0,
    ) -> list[Event]:
        """Charge the memory of each connected process to the ledger. A pid with two connections counts once: the older connection gets all of it.
        `away_bytes`: of a pid on a GPU, what is in host memory now."""
        self._waiting = {key: waiting.at(now_s) for key, waiting in self._waiting.items()}
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
                    away = away_bytes(connection.pid, gpu)
                    events += ledger.measure(
                        connection.number, gpu, measured, reading.at_s, now_s, exact=sure, away_bytes=away
                    )
        return events

    def held(
        self, key: str, ledger: Ledger, uuids: list[str], connections: Iterable[Connection], reading: MemoryReading
    ) -> dict[str, list[MeasuredProcess]]:
        """NVML's count for the processes of this container, to compare with its limit: the connected ones and those with its mount."""
        by_pid = {connection.pid: connection.number for connection in reversed(list(connections))}
        found: dict[str, list[MeasuredProcess]] = {}
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
                found[uuid].append(MeasuredProcess(pid, measured, explained))
            for pid, part_bytes in reading.parts.get(key, {}).get(uuid, {}).items():
                self.unconnected_usage[uuid][pid] = part_bytes
                found[uuid].append(MeasuredProcess(pid, part_bytes, 0))
        self._count(reading)
        return found

    def _count(self, reading: MemoryReading) -> None:
        """Count the unconnected processes of a reading. It may include a process that is ending, whose connection is closed already; so may the next
        reading, if a container requests an early one. At the arbiter's start one reading is enough for a process that did not connect: nothing is leased
        yet, and the process is older. An MPS server runs the work of others; only its name identifies it, which any process of a pod can use."""
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
        """Host pids of processes of this container that have GPU memory and are not connected."""
        return tuple(
            sorted(pid for pid, since_s in self._shown_from_s.items() if self._read_s - since_s >= ENDS_WITHIN_S)
        )

    def suspects(self) -> frozenset[int]:
        """Unconnected processes of the last reading alone, which may include one that was ending."""
        return frozenset(self._shown_from_s)

    def unconnected_bytes(self, uuid: str) -> int:
        """Their memory on a GPU."""
        return sum(self.unconnected_usage.get(uuid, {}).get(pid, 0) for pid in self.unconnected())

    def met(self, pid: int) -> bool:
        """The process has connected. Returns whether readings had shown it as unconnected."""
        for held in self.unconnected_usage.values():
            held.pop(pid, None)
        return self._shown_from_s.pop(pid, None) is not None

    def listed(
        self, ledger: Ledger, gpu: int, uuid: str, connections: Iterable[Connection]
    ) -> list[wire.ListedProcess]:
        """The processes of this container with memory of a GPU, also while it is in host memory, for nvidia-smi in the container."""
        listed = []
        for other in connections:
            part = ledger.part_of(other.number, gpu)
            measured_bytes = part.measured_bytes + part.away_bytes if part.measured_bytes is not None else 0
            held = measured_bytes or part.used_bytes + part.context_bytes
            listed.append(wire.ListedProcess(other.pid_in_container, held))
        listed += [
            wire.ListedProcess(host.pid_inside(pid), measured)
            for pid, measured in self.unconnected_usage.get(uuid, {}).items()
        ]
        return [process for process in listed if process.used_bytes and process.pid]
