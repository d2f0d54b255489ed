"""Examines processes that have GPU memory and are not connected: whether they ever connected, whether the library is mapped, whether a grant is mounted.

It has its own thread, because the plugin's answer about maps takes seconds at worst. The thread sleeps until a process connects or such a process exists.
The loop passes the connected and the unconnected processes after each reading, and reads the answers whenever it decides.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

import structlog

from arbiter.memory.known_processes import KnownProcesses
from arbiter.reader_thread import ReaderThread
from nvml.errors import NvmlError
from nvml.messages import MOST_MAPS
from nvml.queries import Nvml
from vgpu.memory.bypass import Traces

AGAIN_S: Final = 0.9
"""How long an answer about a process is valid. Guessed: a reading comes each second."""
SAVED_S: Final = 0.1
"""Time between two writes of the file of known processes. Guessed: some hundred processes may start at once."""
MOST: Final = 64
"""Processes that are examined after one reading. Guessed: others are examined after the next."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Suspect:
    """A process that is not connected."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class _Result:
    of: Suspect
    at_s: float
    """When the examination ended."""
    traces: Traces


class Tracer:
    """See the module. `mounted` returns whether a process has a grant's mount, None if that is no evidence. Only this thread uses `nvml`."""

    def __init__(
        self,
        nvml: Nvml,
        known: KnownProcesses,
        mounted: Callable[[int], bool | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml, self._known, self._mounted, self._clock = nvml, known, mounted, clock
        self._reader = ReaderThread("tracer", self._run)
        self._changed = self._reader.changed
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when processes were examined since the last call of `any_results`."""
        self._connected: set[int] = set()
        """Connected pids; their number is bounded even if no thread processes them."""
        self._suspects: tuple[Suspect, ...] = ()
        self._results: dict[int, _Result] = {}
        """By pid. Only the thread changes it, as a whole, so that the loop may read it at any time."""
        self._trouble = ""

    def start(self) -> None:
        """Begin. Raises RuntimeError if no thread can start."""
        self._reader.start()

    def close(self) -> None:
        """End the thread. If it waits for an answer, it ends with the program."""
        ended = self._reader.close()
        if ended:  # otherwise it might write to a descriptor that has been reused
            os.close(self.fd)

    def connected(self, pid: int) -> None:
        """This process has connected."""
        if pid:
            with self._changed:
                self._connected.add(pid)
                self._changed.notify()

    def suspect(self, suspects: Collection[Suspect]) -> None:
        """Set the unconnected processes of the last reading. All of them, each time."""
        if suspects or self._suspects:
            with self._changed:
                self._suspects = tuple(suspects)
                self._changed.notify()

    def any_results(self) -> bool:
        """Whether any process was examined since the last call."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True

    def traces(self, pid: int, started: int) -> Traces | None:
        """The facts about an unconnected process; None = not examined since its last connection."""
        with self._changed:
            result = self._results.get(pid) if pid not in self._connected else None
        return result.traces if result is not None and result.of.started == started else None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._reader.wait(lambda: self._connected or self._due())
                if self._reader.closing:
                    return
                connected, self._connected = self._connected, set()
                self._results = {pid: result for pid, result in self._results.items() if pid not in connected}
                due = self._due()
            try:
                self._known.add(connected)
                self._examine(due)
            except Exception:  # noqa: BLE001 - without it bypassing processes count as unconnected, which are reported
                _log.exception("processes that are not connected could not be examined")
                self._suspects = ()  # until the next reading
            time.sleep(SAVED_S)

    def _due(self) -> tuple[Suspect, ...]:
        """The processes not examined recently, the longest waiting first. Drops those that are not suspects any more."""
        now_s = self._clock()
        suspects = set(self._suspects)
        if not all(result.of in suspects for result in self._results.values()):
            self._results = {pid: result for pid, result in self._results.items() if result.of in suspects}
        old = [one for one in self._suspects if now_s - self._examined_at_s(one) >= AGAIN_S]
        return tuple(sorted(old, key=self._examined_at_s)[:MOST])

    def _examined_at_s(self, one: Suspect) -> float:
        result = self._results.get(one.pid)
        return result.at_s if result is not None and result.of == one else -inf

    def _examine(self, due: tuple[Suspect, ...]) -> None:
        for at in range(0, len(due), MOST_MAPS):
            batch = due[at : at + MOST_MAPS]
            began_s = self._clock()
            mapped = self._mapped(batch)
            now_s = self._clock()
            self._results = self._results | {
                one.pid: _Result(one, now_s, self._found(one, has, began_s, now_s))
                for one, has in zip(batch, mapped, strict=True)
            }
            os.eventfd_write(self.fd, 1)

    def _found(self, one: Suspect, has: bool | None, began_s: float, now_s: float) -> Traces:
        connected, before = self._known.of(one.pid, one.started), self._results.get(one.pid)
        since_s = before.traces.replaced_s if before is not None and before.of == one else inf
        replaced_s = min(since_s, now_s) if connected and has is False else inf
        return Traces(connected, has, self._mounted(one.pid), replaced_s, began_s)

    def _mapped(self, batch: Iterable[Suspect]) -> tuple[bool | None, ...]:
        processes = tuple((one.pid, one.started) for one in batch)
        try:
            found = self._nvml.mapped(processes)
        except NvmlError as error:
            if str(error) != self._trouble:
                _log.warning("maps of processes that are not connected are not read", reason=str(error))
            self._trouble = str(error)
            return (None,) * len(processes)
        self._trouble = ""
        return found
