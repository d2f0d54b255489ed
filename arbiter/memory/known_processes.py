"""Which processes have connected since they started, stored across restarts of the arbiter. In a file beside its status socket.

The file states since when it is complete: for a process that started before, the answer is unknown. If the file is missing, damaged or of another boot,
a new file is complete from now on. If the file cannot be written, it is removed, so that a later arbiter does not treat it as complete.

Units: clock ticks since boot, as /proc/<pid>/stat counts a process's start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from arbiter import host

FILE: Final = "connected.json"
LONGEST: Final = 16 * 2**20
"""Largest size of the file in bytes. A process needs some 20 of them."""
PRUNED_FROM: Final = 256
"""Number of processes. Above it, the ones that have ended are dropped whenever the number has doubled. Guessed."""
_log = structlog.get_logger()


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
        self._path, self._boot, self._started_at = path, boot, started_at
        self._failed = ""
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
        if self._path is None:
            return None
        try:
            with self._path.open("rb") as file:
                accounts = msgspec.json.decode(file.read(LONGEST), type=_File)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            _log.warning(
                "which processes were connected before is not known", file=str(self._path), reason=str(error)[:200]
            )
            return None
        return accounts if accounts.boot == self._boot and accounts.version == 1 and self._boot else None

    def _save(self) -> None:
        if self._path is None:
            return
        beside = self._path.with_name(f".{self._path.name}.new")
        try:
            beside.write_bytes(msgspec.json.encode(_File(self._boot, self.since, tuple(sorted(self._known)))))
            beside.replace(self._path)
        except OSError as error:
            if str(error) != self._failed:
                _log.error(
                    "which processes are connected is forgotten at a restart", file=str(self._path), reason=str(error)
                )
            self._failed = str(error)
            for path in (beside, self._path):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            return
        self._failed = ""
