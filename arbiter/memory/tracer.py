"""What processes that hold GPU memory and are not connected show: whether they ever were, the library in their memory, a grant's mount.

A thread of its own, since the plugin answers about their maps within seconds at worst. It sleeps until a process connects or such a process is there. The
loop hands over which are connected and which are not after each reading, and reads the answers whenever it decides.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

import structlog

from arbiter.memory.known_processes import Acquaintance
from nvml.errors import NvmlError
from nvml.messages import MOST_MAPS
from nvml.queries import Nvml
from vgpu.memory.bypass import Traces

AGAIN_S: Final = 0.9
"""So long an answer about a process stands. Guessed: a reading comes each second."""
SAVED_S: Final = 0.1
"""Between two times that the memory is written. Guessed: some hundred processes may start at once."""
MOST: Final = 64
"""Processes that are looked at after one reading. Guessed: others are looked at after the next."""
CLOSE_S: Final = 1.0
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Suspect:
    """A process that is not connected."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class _Look:
    of: Suspect
    at_s: float
    """When it was over."""
    traces: Traces


class Tracer:
    """See the module. `mounted` answers whether a process sees a grant's mount, None where that says nothing. `nvml` is for this thread alone."""

    def __init__(
        self,
        nvml: Nvml,
        known: Acquaintance,
        mounted: Callable[[int], bool | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml, self._known, self._mounted, self._clock = nvml, known, mounted, clock
        self._changed = threading.Condition()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when processes were looked at since `heard` was called."""
        self._connected: set[int] = set()
        """Pids, of which there are only so many, also where no thread takes them."""
        self._suspects: tuple[Suspect, ...] = ()
        self._looks: dict[int, _Look] = {}
        """By pid. Changed by the thread alone, and replaced as a whole, so that the loop may read it at any time."""
        self._closing = self._busy = False
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="tracer", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, unless it waits for an answer: then it ends with the program."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)
        if not self._thread.is_alive():  # else it would write to whatever has this number by then
            os.close(self.fd)

    def connected(self, pid: int) -> None:
        """This process was welcomed."""
        if pid:
            with self._changed:
                self._connected.add(pid)
                self._changed.notify()

    def suspect(self, suspects: Collection[Suspect]) -> None:
        """These are not connected, as far as the last reading shows. All of them, each time."""
        if suspects or self._suspects:
            with self._changed:
                self._suspects = tuple(suspects)
                self._changed.notify()

    def heard(self) -> bool:
        """Were any looked at since this was called last?"""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True

    def traces(self, pid: int, started: int) -> Traces | None:
        """Of a process that is not connected; None = nobody looked yet, since it connected last."""
        with self._changed:
            look = self._looks.get(pid) if pid not in self._connected else None
        return look.traces if look is not None and look.of.started == started else None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._connected or self._due())
                if self._closing:
                    return
                connected, self._connected = self._connected, set()
                self._looks = {pid: look for pid, look in self._looks.items() if pid not in connected}
                due = self._due()
            try:
                self._known.add(connected)
                self._look(due)
            except Exception:  # noqa: BLE001 - without it bypassing processes count as unconnected, which are reported
                _log.exception("processes that are not connected could not be looked at")
                self._suspects = ()  # until the next reading
            time.sleep(SAVED_S)

    def _due(self) -> tuple[Suspect, ...]:
        """Those not looked at lately, who waited longest first. Forgets those that are not suspects any more."""
        now_s = self._clock()
        suspects = set(self._suspects)
        if not all(look.of in suspects for look in self._looks.values()):
            self._looks = {pid: look for pid, look in self._looks.items() if look.of in suspects}
        old = [one for one in self._suspects if now_s - self._looked_at_s(one) >= AGAIN_S]
        return tuple(sorted(old, key=self._looked_at_s)[:MOST])

    def _looked_at_s(self, one: Suspect) -> float:
        look = self._looks.get(one.pid)
        return look.at_s if look is not None and look.of == one else -inf

    def _look(self, due: tuple[Suspect, ...]) -> None:
        for at in range(0, len(due), MOST_MAPS):
            batch = due[at : at + MOST_MAPS]
            began_s = self._clock()
            mapped = self._mapped(batch)
            now_s = self._clock()
            self._looks = self._looks | {
                one.pid: _Look(one, now_s, self._found(one, has, began_s, now_s))
                for one, has in zip(batch, mapped, strict=True)
            }
            os.eventfd_write(self.fd, 1)

    def _found(self, one: Suspect, has: bool | None, began_s: float, now_s: float) -> Traces:
        connected, before = self._known.of(one.pid, one.started), self._looks.get(one.pid)
        since_s = before.traces.replaced_s if before is not None and before.of == one else inf
        replaced_s = min(since_s, now_s) if connected and has is False else inf
        return Traces(connected, has, self._mounted(one.pid), replaced_s, began_s)

    def _mapped(self, batch: Iterable[Suspect]) -> tuple[bool | None, ...]:
        who = tuple((one.pid, one.started) for one in batch)
        try:
            found = self._nvml.mapped(who)
        except NvmlError as error:
            if str(error) != self._trouble:
                _log.warning("maps of processes that are not connected are not read", reason=str(error))
            self._trouble = str(error)
            return (None,) * len(who)
        self._trouble = ""
        return found
