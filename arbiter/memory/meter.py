"""The memory that NVML lists for each process, read once a second and whenever a container waits for it.

NVML's child answers within milliseconds, on a faulty GPU within seconds: a separate thread reads it, and the loop gets finished readings
through a descriptor that it polls. Without NVML there are no readings, `trouble` has the reason, and leases continue without measured contexts.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Final

import structlog

from arbiter import host
from arbiter.reader_thread import ReaderThread
from nvml.errors import NvmlError, NvmlOpening
from nvml.messages import ProcessUsage
from nvml.queries import Nvml
from vgpu.api.cgroup import NOWHERE, CgroupOwner

PERIOD_S: Final = 1.0
"""Specified."""
HURRIED_S: Final = 0.05
"""Between the beginnings of two readings, however many wait for one: a container's messages begin them. Guessed."""
OPENING_S: Final = 3.0
"""While NVML is being opened, a process waits for a reading until this long after the start. Guessed."""
SETTLED: Final = 5
"""After this many equal readings a measure does not change: it needs those of 1.5 s without a report (`vgpu.memory.context`) and two for a lease."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SeenProcess:
    """The host's facts about a process with memory of a GPU."""

    started: int
    key: str | None
    """Key of the grant directory mounted in its namespace; otherwise, for an arbiter of runs, of the one with which it was started. After attribution: of
    the grant to which it belongs; None = of none, or of one of several."""
    pid_inside: int
    mps_server: bool = False
    """It is an MPS server: the work of its clients runs on its channels."""
    place: CgroupOwner = NOWHERE
    """Its pod and container, by its cgroup."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """One reading of the GPUs. It does not include a GPU that did not answer."""

    at_s: float
    """When it began."""
    gpus: Mapping[str, Mapping[int, int | None]] = field(default_factory=dict)
    """UUID -> host pid -> bytes; None if the driver does not report it."""
    seen: Mapping[int, SeenProcess] = field(default_factory=dict)
    """Every pid of `gpus`."""
    mps_clients: frozenset[int] = frozenset()
    """Of those pids, the ones that NVML lists as clients of an MPS server."""
    parts: Mapping[str, Mapping[str, Mapping[int, int]]] = field(default_factory=dict)
    """Key -> UUID -> host pid -> bytes: what counts against a grant of processes that belong to one of several."""
    before_s: float = -inf
    """The beginning of the reading with which `unchanged` compares."""
    unchanged: frozenset[str] = frozenset()
    """Those of `gpus` that have not changed since then: the processes and their bytes. After attribution: and the grant of each process."""
    used: Mapping[str, int | None] = field(default_factory=dict)
    """UUID -> bytes of the GPU that are in use by any process; None if the driver does not report it."""
    usable: Mapping[str, int] = field(default_factory=dict)
    """UUID -> all bytes of the GPU without what the driver reserves. It does not include a GPU whose driver does not report it."""

    def after(self, before: MemoryReading) -> MemoryReading:
        """This reading, compared with the one before."""
        sure = self.mps_clients == before.mps_clients
        same = frozenset(
            uuid
            for uuid, held in self.gpus.items()
            if sure and before.gpus.get(uuid) == held and all(self.seen[pid] is before.seen.get(pid) for pid in held)
        )
        return replace(self, before_s=before.at_s, unchanged=same)


class UnchangedReadings:
    """Detects the readings that change nothing for one container: nearly all, on an idle node.

    The effect of a reading on a container depends on the reading, on the reports of its processes, and on the readings just before. If all of
    them have been the same for `SETTLED` readings, one more changes nothing.
    """

    def __init__(self) -> None:
        self._taken_s = -inf
        self._alike = 0

    def moved(self) -> None:
        """A process came, went or reported something, or the limits changed."""
        self._alike = 0

    def lasts(self, reading: MemoryReading, uuids: Iterable[str]) -> bool:
        """Whether this reading of these GPUs equals the ones before, with no report between them. Call it for each reading, in order."""
        alike = reading.before_s == self._taken_s and all(uuid in reading.unchanged for uuid in uuids)
        self._alike = self._alike + 1 if alike else 0
        self._taken_s = reading.at_s
        return self._alike > SETTLED


class Meter:
    """Reads the GPUs that `want` set. `fd` is readable when `taken` has a reading. Only this thread uses `nvml`.

    `grants`: the grants folder. `named_in`: a grants folder whose directories processes name in their environment, where nothing is mounted.
    """

    def __init__(
        self,
        nvml: Nvml,
        grants: Path,
        clock: Callable[[], float] = time.monotonic,
        named_in: Path | None = None,
    ) -> None:
        self.trouble = "NVML was not read yet"
        """Why there are no readings; empty when there are."""
        self.tried = False
        """NVML has answered or failed once. Until then a first reading may still come."""
        self.fd, self._bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._nvml, self._grants, self._clock, self._named_in = nvml, grants, clock, named_in
        self._reader = ReaderThread("meter", self._run)
        self._changed = self._reader.changed
        self._read_s: dict[str, float] = {}
        """Wanted GPUs -> when the last reading of each began, or since when it has been wanted."""
        self._hurry = False
        self._readings: deque[MemoryReading] = deque(maxlen=64)
        self._known: dict[int, SeenProcess] = {}
        self._last = MemoryReading(-inf)

    def start(self) -> None:
        """Begin reading. Raises RuntimeError if no thread can start."""
        self._reader.start()

    def want(self, uuids: Iterable[str]) -> None:
        """Set the GPUs to read from the next reading on."""
        with self._changed:
            now_s = self._clock()
            self._read_s = {uuid: self._read_s.get(uuid, now_s) for uuid in sorted(set(uuids))}

    def age_s(self, uuids: Iterable[str]) -> float:
        """The age of the oldest of the last readings of these GPUs."""
        with self._changed:
            read_s = [self._read_s[uuid] for uuid in uuids if uuid in self._read_s]
        return self._clock() - min(read_s) if read_s else 0.0

    def hurry(self) -> None:
        """A container waits for a reading that begins from now on."""
        with self._changed:
            self._hurry = True
            self._changed.notify()

    def taken(self) -> list[MemoryReading]:
        """Readings since the last call."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            return []
        return [self._readings.popleft() for _ in range(len(self._readings))]

    def close(self) -> None:
        """End the thread. If it waits for NVML, it ends with the program."""
        if self._reader.close():  # otherwise it might write to descriptors that have been reused
            os.close(self.fd)
            os.close(self._bell)

    def _run(self) -> None:
        begun_s = self._clock()
        while not self._reader.closing:
            began_s = self._clock()
            try:
                reading = self._read(began_s)
            except NvmlError as error:
                if isinstance(error, NvmlOpening) and not self.tried and began_s - begun_s < OPENING_S:
                    self._wait(PERIOD_S / 20, hurried=False)
                    continue
                if str(error) != self.trouble:
                    _log.warning("contexts are not measured", reason=str(error), retry_s=PERIOD_S)
                self.trouble, self.tried = str(error), True
                self._report(MemoryReading(began_s))  # waiting processes get an answer without a measurement
                self._wait(PERIOD_S, hurried=False)
                continue
            if self.trouble:
                _log.info("NVML is open", was=self.trouble)
            self.trouble, self.tried = "", True
            self._report(reading)
            took_s = self._clock() - began_s
            self._wait(max(0.0, HURRIED_S - took_s), hurried=False)
            self._wait(max(0.0, PERIOD_S - max(took_s, HURRIED_S)), hurried=True)

    def _read(self, began_s: float) -> MemoryReading:
        """Raises NvmlError when no GPU answers."""
        listed: dict[str, tuple[ProcessUsage, ...]] = {}
        used: dict[str, int | None] = {}
        usable: dict[str, int] = {}
        failed = None
        wanted = list(self._read_s)
        for uuid, held in self._nvml.held_of(wanted).items():
            if isinstance(held, NvmlError):
                failed = held
            else:
                listed[uuid], used[uuid] = held.processes, None
                if held.memory is not None:
                    used[uuid], usable[uuid] = held.memory.used_bytes, held.memory.usable_bytes
        if failed is not None and not listed:
            raise failed
        if not wanted:
            self._nvml.count()
        gpus = {uuid: {process.pid: process.used_bytes for process in held} for uuid, held in listed.items()}
        clients = frozenset(process.pid for held in listed.values() for process in held if process.mps)
        seen = self._look_up(pid for held in gpus.values() for pid in held)
        return MemoryReading(began_s, gpus, seen, clients, used=used, usable=usable)

    def _look_up(self, pids: Iterable[int]) -> dict[int, SeenProcess]:
        """The host's facts about them; a known process is not looked up again."""
        seen = {}
        for pid in pids:
            before, started = self._known.get(pid), host.started_at(pid)
            if before is None or before.started != started or (before.key is None and not before.place.pod):
                key = host.key_shown(pid, self._grants, self._named_in)
                before = SeenProcess(started, key, host.pid_inside(pid), host.is_mps_server(pid), host.place(pid))
            seen[pid] = before
        self._known = seen
        return seen

    def _report(self, reading: MemoryReading) -> None:
        with self._changed:
            self._read_s |= {uuid: reading.at_s for uuid in reading.gpus if uuid in self._read_s}
        self._last, reported = reading, reading.after(self._last)
        self._readings.append(reported)
        try:
            os.write(self._bell, b"r")
        except BlockingIOError:
            return  # the loop has not read thousands of readings: its descriptor is readable already

    def _wait(self, seconds: float, *, hurried: bool) -> None:
        with self._changed:
            self._reader.wait(lambda: hurried and self._hurry, seconds)
            if hurried:
                self._hurry = False
