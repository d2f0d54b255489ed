"""The memory that NVML lists for each process, read once a second and whenever a container waits for it.

NVML's child answers within milliseconds, on a sick GPU within seconds: a thread of its own reads it, and the loop gets finished readings
through a descriptor that it polls. Without NVML there are no readings, `trouble` says why, and leases go on without measured contexts.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Final

import structlog

from arbiter import host
from nvml.errors import NvmlError, NvmlOpening
from nvml.messages import ProcessUsage
from nvml.queries import Nvml
from vgpu.api.cgroup import NOWHERE, Place

PERIOD_S: Final = 1.0
"""Specified."""
HURRIED_S: Final = 0.05
"""Between the beginnings of two readings, however many wait for one: a container's messages begin them. Guessed."""
OPENING_S: Final = 3.0
"""While NVML is being opened, who waits for a reading goes on waiting, so long after the start. Guessed."""
SETTLED: Final = 5
"""After so many readings alike a measure stays as it is: it needs those of 1.5 s without a report (`vgpu.memory.context`) and two for a lease."""
CLOSE_S: Final = 1.0
"""So long an end waits for an answer of NVML. Guessed: it takes milliseconds."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Seen:
    """A process with memory of a GPU, as the host knows it."""

    started: int
    key: str | None
    """Of the grant directory mounted in its namespace; else, for an arbiter of runs, of the one it was started with. Once it is attributed: of
    the grant that it belongs to; None = of none, or of one of several."""
    pid_inside: int
    mps_server: bool = False
    """The work of its clients runs on its channels."""
    place: Place = NOWHERE
    """By its cgroup."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the GPUs. A GPU that did not answer is not in it."""

    at_s: float
    """When it began."""
    gpus: Mapping[str, Mapping[int, int | None]] = field(default_factory=dict)
    """UUID -> host pid -> bytes; None where the driver does not tell."""
    seen: Mapping[int, Seen] = field(default_factory=dict)
    """Every pid of `gpus`."""
    mps_clients: frozenset[int] = frozenset()
    """Of those pids, the ones that NVML lists as clients of an MPS server."""
    parts: Mapping[str, Mapping[str, Mapping[int, int]]] = field(default_factory=dict)
    """Key -> UUID -> host pid -> bytes: what counts against a grant of processes that belong to one of several."""
    before_s: float = -inf
    """When the reading began that `unchanged` compares with."""
    unchanged: frozenset[str] = frozenset()
    """Those of `gpus` that were then as they are now: the processes and their bytes. Once they are attributed: and each belongs to the grant that it
    belonged to."""
    used: Mapping[str, int | None] = field(default_factory=dict)
    """UUID -> bytes of the GPU that are in use, whoever has them; None where the driver does not tell."""

    def after(self, before: Reading) -> Reading:
        """The same, compared with this one."""
        sure = self.mps_clients == before.mps_clients
        same = frozenset(
            uuid
            for uuid, held in self.gpus.items()
            if sure and before.gpus.get(uuid) == held and all(self.seen[pid] is before.seen.get(pid) for pid in held)
        )
        return replace(self, before_s=before.at_s, unchanged=same)


class UnchangedReadings:
    """Which readings say nothing new of one container: nearly all, on a node at rest.

    What a reading does to a container depends on what was read, on what its processes reported, and on the readings just before. If all of
    it has been the same for `SETTLED` readings, one more changes nothing.
    """

    def __init__(self) -> None:
        self._taken_s = -inf
        self._alike = 0

    def moved(self) -> None:
        """A process came, went or reported something, or the limits changed."""
        self._alike = 0

    def lasts(self, reading: Reading, uuids: Iterable[str]) -> bool:
        """Is this reading of these GPUs one of many alike, with nothing reported between them? Called for each reading, in order."""
        alike = reading.before_s == self._taken_s and all(uuid in reading.unchanged for uuid in uuids)
        self._alike = self._alike + 1 if alike else 0
        self._taken_s = reading.at_s
        return self._alike > SETTLED


class Meter:
    """Reads the GPUs that `want` named. `fd` is readable when `taken` has something. `nvml` is for this thread alone.

    `grants`: the grants folder. `named_in`: a grants folder whose directories processes name in their environment, where nothing is mounted.
    """

    def __init__(
        self,
        nvml: Nvml,
        grants: Path,
        clock: Callable[[], float] = time.monotonic,
        named_in: Path | None = None,
    ) -> None:
        self.trouble = "NVML was not asked yet"
        """Why there are no readings; empty when there are."""
        self.tried = False
        """NVML answered once, or it was seen that it does not. Until then a reading may still come."""
        self.fd, self._bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._nvml, self._grants, self._clock, self._named_in = nvml, grants, clock, named_in
        self._changed = threading.Condition()
        self._read_s: dict[str, float] = {}
        """GPUs that are wanted -> when the last reading of each began, or when it was wanted first."""
        self._hurry = self._closing = False
        self._readings: deque[Reading] = deque(maxlen=64)
        self._known: dict[int, Seen] = {}
        self._last = Reading(-inf)
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)

    def start(self) -> None:
        """Begin reading."""
        self._thread.start()

    def want(self, uuids: Iterable[str]) -> None:
        """These GPUs from the next reading on."""
        with self._changed:
            now_s = self._clock()
            self._read_s = {uuid: self._read_s.get(uuid, now_s) for uuid in sorted(set(uuids))}

    def age_s(self, uuids: Iterable[str]) -> float:
        """Of the oldest of the last readings of these GPUs."""
        with self._changed:
            read_s = [self._read_s[uuid] for uuid in uuids if uuid in self._read_s]
        return self._clock() - min(read_s) if read_s else 0.0

    def hurry(self) -> None:
        """Somebody waits for a reading that begins from now on."""
        with self._changed:
            self._hurry = True
            self._changed.notify()

    def taken(self) -> list[Reading]:
        """Readings since this was called last."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            return []
        return [self._readings.popleft() for _ in range(len(self._readings))]

    def close(self) -> None:
        """End the thread, unless it waits for NVML: then it ends with the program."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)
        if not self._thread.is_alive():  # else it would write to whatever has these numbers by then
            os.close(self.fd)
            os.close(self._bell)

    def _run(self) -> None:
        begun_s = self._clock()
        while not self._closing:
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
                self._report(Reading(began_s))  # who waits learns that nothing is known
                self._wait(PERIOD_S, hurried=False)
                continue
            if self.trouble:
                _log.info("NVML is open", was=self.trouble)
            self.trouble, self.tried = "", True
            self._report(reading)
            took_s = self._clock() - began_s
            self._wait(max(0.0, HURRIED_S - took_s), hurried=False)
            self._wait(max(0.0, PERIOD_S - max(took_s, HURRIED_S)), hurried=True)

    def _read(self, began_s: float) -> Reading:
        """Raises NvmlError when no GPU answers."""
        listed: dict[str, tuple[ProcessUsage, ...]] = {}
        used: dict[str, int | None] = {}
        failed = None
        wanted = list(self._read_s)
        for uuid, held in self._nvml.held_of(wanted).items():
            if isinstance(held, NvmlError):
                failed = held
            else:
                listed[uuid], used[uuid] = held.processes, held.used_bytes
        if failed is not None and not listed:
            raise failed
        if not wanted:
            self._nvml.count()
        gpus = {uuid: {process.pid: process.used_bytes for process in held} for uuid, held in listed.items()}
        clients = frozenset(process.pid for held in listed.values() for process in held if process.mps)
        seen = self._look_up(pid for held in gpus.values() for pid in held)
        return Reading(began_s, gpus, seen, clients, used=used)

    def _look_up(self, pids: Iterable[int]) -> dict[int, Seen]:
        """What the host knows of them; what was known of the same process is not asked again."""
        seen = {}
        for pid in pids:
            before, started = self._known.get(pid), host.started_at(pid)
            if before is None or before.started != started or (before.key is None and not before.place.pod):
                key = host.key_shown(pid, self._grants, self._named_in)
                before = Seen(started, key, host.pid_inside(pid), host.is_mps_server(pid), host.place(pid))
            seen[pid] = before
        self._known = seen
        return seen

    def _report(self, reading: Reading) -> None:
        with self._changed:
            self._read_s |= {uuid: reading.at_s for uuid in reading.gpus if uuid in self._read_s}
        self._last, reported = reading, reading.after(self._last)
        self._readings.append(reported)
        try:
            os.write(self._bell, b"r")
        except BlockingIOError:
            return  # the loop has not come round for thousands of readings: the bell rings already

    def _wait(self, seconds: float, *, hurried: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or (hurried and self._hurry), seconds)
            if hurried:
                self._hurry = False
