"""Does a process have the library in its memory? By /proc/<pid>/maps, which only a process that may trace it can read.

The plugin's container has that right where it is privileged; the arbiter's has not. So the plugin answers the arbiter, through the socket at which it
answers for NVML. None = unknown: no right, a process that is gone or ending, or one whose maps cannot be read in time.

Reading waits for a lock of the process that is examined, and a process may keep its own for long. So each read has a thread and a time limit; a
thread that waits longer is left to itself and ends with the plugin or with its wait (the kernel's wait can be killed). There are few.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Final

from vgpu.api.contract import LIBRARY
from vgpu.api.process_stat import process_stat

WAIT_S: Final = 1.0
"""For all processes of one request. The arbiter waits 3 s for its answer. Guessed: a read takes milliseconds."""
STUCK: Final = 8
"""Threads that wait beyond that, at most. Guessed: more processes than that are not examined, and are unknown."""
LONGEST: Final = 32 * 2**20
"""Bytes that are read of one process. A program of thousands of libraries has some 2 MiB, and libraries lie at the end; the kernel's limit of 65,530
mappings is some 6 MiB of plain ones. A process that shows no library in so many bytes shows none."""
CHUNK: Final = 2**16
THREADS: Final = 16
"""That are tried where the first thread has ended. Guessed: all that run show the same memory."""

Process = tuple[int, int]
"""Host pid and start, in clock ticks since boot."""


def mapped_in(pid: int, proc: Path = Path("/proc")) -> bool | None:
    """Is a file of the library's name mapped there? A file that was removed since counts.

    Where the first thread has ended and others run, the kernel shows the memory by the others only.
    """
    process = proc / str(pid)
    found = _mapped_in(process / "maps")
    if found is not None:
        return found
    try:
        with os.scandir(process / "task") as tasks:
            threads = [process / "task" / task.name for task in islice(tasks, THREADS) if task.name != process.name]
    except OSError:
        return None
    return next((has for thread in threads if (has := _mapped_in(thread / "maps")) is not None), None)


def _mapped_in(maps_file: Path) -> bool | None:
    end, read, rest = f"/{LIBRARY}".encode(), 0, b""
    try:
        with maps_file.open("rb", buffering=0) as maps:
            while (part := maps.read(CHUNK)) and read < LONGEST:
                read += len(part)
                lines = (rest + part).split(b"\n")
                rest = lines.pop()
                if any(line.removesuffix(b" (deleted)").endswith(end) for line in lines):
                    return True
    except OSError:
        return None
    return None if read == 0 else False  # of a process that is ending the kernel shows nothing


def started_at(pid: int, proc: Path = Path("/proc")) -> int:
    """Its start; 0 = it is gone."""
    try:
        stat = process_stat((proc / str(pid) / "stat").read_bytes())
    except OSError:
        return 0
    return stat.started if stat is not None else 0


class MapsCheck:
    """Examines processes. `read` and `started` are for tests."""

    def __init__(
        self,
        read: Callable[[int], bool | None] = mapped_in,
        started: Callable[[int], int] = started_at,
        wait_s: float = WAIT_S,
    ) -> None:
        self._read, self._started, self._wait_s = read, started, wait_s
        self._lock = threading.Lock()
        self._reading: set[Process] = set()

    def of(self, processes: Iterable[Process]) -> tuple[bool | None, ...]:
        """One answer for each. Returns in time."""
        until_s = time.monotonic() + self._wait_s
        begun = [self._begin(process) for process in processes]
        return tuple(found.by(until_s) if found is not None else None for found in begun)

    def _begin(self, process: Process) -> _Found | None:
        found = _Found()
        with self._lock:
            if process in self._reading or len(self._reading) >= STUCK:
                return None
            self._reading.add(process)
        try:
            threading.Thread(target=self._run, args=(process, found), name=f"maps-{process[0]}", daemon=True).start()
        except RuntimeError:
            self._end(process)
            return None
        return found

    def _run(self, process: Process, found: _Found) -> None:
        pid, started = process
        try:
            answer = self._read(pid)
            found.answer(answer if self._started(pid) == started else None)
        finally:
            self._end(process)

    def _end(self, process: Process) -> None:
        with self._lock:
            self._reading.discard(process)


class _Found:
    def __init__(self) -> None:
        self._done = threading.Event()
        self._answer: bool | None = None

    def answer(self, answer: bool | None) -> None:
        self._answer = answer
        self._done.set()

    def by(self, until_s: float) -> bool | None:
        return self._answer if self._done.wait(max(0.0, until_s - time.monotonic())) else None
