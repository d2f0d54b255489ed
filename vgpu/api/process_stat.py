"""What a line of /proc/<pid>/stat reports of a process: its state, its parent, its start. Pure.

With its pid the start names a process for good: the kernel gives a pid again, and never with the same start within one boot. A program that replaces
itself (execve) keeps both.

Source: proc_pid_stat(5). The second field is the program's name in parentheses, which may contain anything, also `) R 1`: the others begin behind the
last parenthesis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_STATE, _PARENT, _STARTED = 0, 1, 19
"""Fields 3, 4 and 22, counted from behind the name."""
ENDED: Final = frozenset("ZXx")
"""States of a thread that has ended. Other threads of a process whose first one has ended may run."""


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One line."""

    pid: int
    state: str
    """A letter, as R, S, D, T, t, Z, X."""
    parent: int
    """Pid."""
    started: int
    """Clock ticks since boot; 0 = the line ends before."""

    @property
    def ended(self) -> bool:
        """Has the process's first thread ended?"""
        return self.state in ENDED


def process_stat(line: bytes) -> ProcessStat | None:
    """None where there is no line, as of a process that is gone."""
    name_on = line.partition(b" (")
    fields = name_on[2].rpartition(b")")[2].split()
    if len(fields) <= _PARENT or not name_on[0].isdigit():
        return None
    started = int(fields[_STARTED]) if len(fields) > _STARTED else 0
    return ProcessStat(int(name_on[0]), fields[_STATE].decode(), int(fields[_PARENT]), started)
