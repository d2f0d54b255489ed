"""Signals to processes, and waiting until a process that is stopped has stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

STOPPED: Final = frozenset("TtZX")
"""States of a thread that does nothing (proc(5))."""
LIMIT_S: Final = 10.0


def send_signal(pid: int, number: int) -> None:
    """Returns when the process has stopped, if that is what the signal does.

    SIGSTOP stops a process when one of its threads next runs in order to take it. Until then the others go on, on a busy
    machine for milliseconds.
    """
    os.kill(pid, number)
    end = time.monotonic() + LIMIT_S
    while number == signal.SIGSTOP and not _is_stopped(pid):
        assert time.monotonic() < end, f"process {pid} has not stopped within {LIMIT_S} s"
        time.sleep(0.0002)


def _is_stopped(pid: int) -> bool:
    return all(_state(task) in STOPPED for task in Path(f"/proc/{pid}/task").iterdir())


def _state(task: Path) -> str:
    """A thread that has gone in the meantime is dead."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
