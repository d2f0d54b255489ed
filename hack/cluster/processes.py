"""Start programs that outlive this one, find them again, and stop them.

A process is known by its pid and its start time, so a pid that the kernel has reused is never mistaken for
ours and never killed. Each program has a log under its name; its output from before a restart stays in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hack.cluster.layout import Layout
from vgpu.api.process_stat import process_stat

STOP_TIMEOUT_S: Final = 10.0
"""Guessed: the API server drains for some seconds after SIGTERM."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run; `name` is the name of its log and record."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] | None = None


def start_time_ticks(pid: int) -> int | None:
    """The kernel's time of the process's start; None where there is none, or only its remains."""
    try:
        stat = process_stat(Path(f"/proc/{pid}/stat").read_bytes())
    except OSError:
        return None
    return None if stat is None or stat.ended else stat.started


def _record(layout: Layout, name: str) -> Path:
    return layout.run / f"{name}.json"


def pid_of(layout: Layout, name: str) -> int | None:
    """The pid of the program if it runs."""
    try:
        record = json.loads(_record(layout, name).read_text())
    except FileNotFoundError:
        return None
    return record["pid"] if start_time_ticks(record["pid"]) == record["started_ticks"] else None


def start(layout: Layout, program: Program) -> int:
    """Run the program in a session of its own unless it runs already. Returns the pid."""
    running = pid_of(layout, program.name)
    if running is not None:
        return running
    layout.logs.mkdir(parents=True, exist_ok=True)
    layout.run.mkdir(parents=True, exist_ok=True)
    with log_path(layout, program.name).open("ab") as log:
        process = subprocess.Popen(
            list(program.command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={**os.environ, **(program.environment or {})},
            start_new_session=True,
        )
    process.returncode = 0  # it outlives us: no code waits for it, and Popen need not warn of that
    record = {"pid": process.pid, "started_ticks": start_time_ticks(process.pid)}
    _record(layout, program.name).write_text(json.dumps(record))
    return process.pid


def log_path(layout: Layout, name: str) -> Path:
    return layout.logs / f"{name}.log"


def stop(layout: Layout, name: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Terminate the program, kill it when it takes longer, and return when it is gone."""
    pid = pid_of(layout, name)
    if pid is not None:
        end([pid], timeout_s)
    _record(layout, name).unlink(missing_ok=True)


def end(pids: Iterable[int], timeout_s: float) -> None:
    """SIGTERM, and SIGKILL past the patience (at once for 0), to all of them together."""
    handles: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles[os.pidfd_open(pid)] = pid
    try:
        if timeout_s > 0:
            _signal(handles, signal.SIGTERM)
            _await_end(handles, timeout_s)
        _signal(handles, signal.SIGKILL)
        _await_end(handles, STOP_TIMEOUT_S)
    finally:
        for handle in handles:
            os.close(handle)


def _signal(handles: Iterable[int], number: signal.Signals) -> None:
    for handle in handles:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)


def _await_end(handles: dict[int, int], timeout_s: float) -> None:
    """Wait for all; forget those that ended."""
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    while handles and (left_s := deadline - time.monotonic()) > 0:
        for handle, _ in poll.poll(left_s * 1000):
            poll.unregister(handle)
            os.close(handle)
            del handles[handle]


def wait_until_exists(path: Path, timeout_s: float) -> None:
    """Return when the path exists."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path}: not there after {timeout_s:g} s")
        time.sleep(0.02)
