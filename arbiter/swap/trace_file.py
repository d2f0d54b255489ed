"""The swap policy's events in a file, so that a wrong decision can be reported and made again (`vgpu.memory.swap.trace`).

Two files of a bounded size, the newer one under the given name. Each begins with events that bring a policy to the state of that moment, as far as events can: turns and
waiting times begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import structlog

from vgpu.memory.swap.events import Decided, Event
from vgpu.memory.swap.trace import to_lines

LIMIT_BYTES: Final = 8 * 2**20
"""Of each of the two files. Guessed: some 60,000 events, hours of a busy node."""
WRITTEN_S: Final = 1.0
KEPT_BYTES: Final = 2**16
_log = structlog.get_logger()


class TraceFile:
    """Written once a second. A failure is logged once, and ends the trace."""

    def __init__(self, path: Path | None, state: Callable[[], Iterable[Event]]) -> None:
        self._path, self._state = path, state
        self._lines = bytearray()
        self._size = LIMIT_BYTES
        self._due_s: float | None = None

    def add(self, event: Event | Decided) -> None:
        """After its effect on what `state` answers."""
        if self._path is None:
            return
        self._lines += to_lines([event])
        self._due_s = event.at_s + WRITTEN_S if self._due_s is None else self._due_s

    def deadline_s(self) -> float | None:
        """When `write` is due."""
        return self._due_s

    def write(self, now_s: float) -> None:
        """If it is due, or much is unwritten."""
        if self._path is None or self._due_s is None or (now_s < self._due_s and len(self._lines) < KEPT_BYTES):
            return
        try:
            if self._size + len(self._lines) > LIMIT_BYTES:
                self._begin(self._path)
            else:
                with self._path.open("ab") as file:
                    file.write(self._lines)
                self._size += len(self._lines)
        except OSError as error:
            _log.error("the trace of the swap policy cannot be written", path=str(self._path), reason=str(error))
            self._path = None
        self._lines.clear()
        self._due_s = None

    def _begin(self, path: Path) -> None:
        """What is unwritten has led to the state with which the new file begins."""
        if path.exists():
            with path.open("ab") as file:
                file.write(self._lines[: LIMIT_BYTES // 8])
            path.replace(path.with_name(f"{path.name}.1"))
        content = to_lines(self._state())
        path.write_bytes(content)
        self._size = len(content)
