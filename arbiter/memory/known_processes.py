"""Which processes have connected since they started, stored across restarts of the arbiter. In a file beside its status socket.

The file states since when it is complete: for a process that started before, the answer is unknown. If the file is missing, damaged or of another boot,
a new file is complete from now on. If the file cannot be written, it is removed, so that a later arbiter does not treat it as complete.

Units: clock ticks since boot, as /proc/<pid>/stat counts a process's start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from arbiter import host
from arbiter.stored_file import StoredFile

FILE: Final = "connected.json"
PRUNED_FROM: Final = 256
"""Number of processes. Above it, the ones that have ended are dropped whenever the number has doubled. Guessed."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    boot: str
    since: int
    processes: tuple[tuple[int, int], ...]
    version: int = 1


def ticks_now() -> int:
    """Since boot."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


class KnownProcesses:
    """See the module. For one thread. `path` None = nothing is stored across restarts."""

    def __init__(
        self,
        path: Path | None,
        boot: str,
        now: Callable[[], int] = ticks_now,
        started_at: Callable[[int], int] = host.started_at,
    ) -> None:
        self._boot, self._started_at = boot, started_at
        self._file = StoredFile(
            path,
            _File,
            unread="which processes were connected before is not known",
            unwritten="which processes are connected is forgotten at a restart",
        )
        self._next = PRUNED_FROM
        accounts = self._read()
        self.since = now() if accounts is None else accounts.since
        self._known = set(accounts.processes) if accounts is not None else set[tuple[int, int]]()
        self._prune()
        self._save()

    def add(self, pids: Iterable[int]) -> None:
        """These processes are connected."""
        fresh = {(pid, started) for pid in pids if (started := self._started_at(pid))} - self._known
        if fresh:
            self._known |= fresh
            if len(self._known) >= self._next:
                self._prune()
            self._save()

    def of(self, pid: int, started: int) -> bool | None:
        """Whether it has connected since its start. None = unknown."""
        if (pid, started) in self._known:
            return True
        return False if started > self.since else None

    def _prune(self) -> None:
        self._known = {(pid, started) for pid, started in self._known if self._started_at(pid) == started}
        self._next = max(PRUNED_FROM, 2 * len(self._known))

    def _read(self) -> _File | None:
        accounts = self._file.read()
        if accounts is None or accounts.boot != self._boot or not self._boot:
            return None
        return accounts

    def _save(self) -> None:
        if not self._file.write(_File(self._boot, self.since, tuple(sorted(self._known)))):
            self._file.remove()
