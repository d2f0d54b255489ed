"""Start the keeper when none is there, wait until a socket of its arbiter answers, find it, stop it."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tangramctl.errors import Broken
from tangramctl.machine import StateRoot, try_lock
from tangramctl.proc import start_ticks

WAIT_S: Final = 30.0
"""For a socket to answer. Guessed: a start takes half a second, 16 at once on a busy machine some more."""
CHECK_S: Final = 0.02
ANSWER_S: Final = 2.0
"""For a connection to the status socket, which waits only where many do. Guessed."""
STARTS: Final = 2
"""Keepers that a run starts before it reports that none stays alive."""
STOP_S: Final = 15.0
IDLE_S: Final = 60.0
"""How long a keeper stays after the last run, unless set otherwise. Guessed: the next run saves the start, half a second."""
_PASSED_ON: Final = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TZ")
"""Of a run's environment. Not its LD_PRELOAD, grant or visible GPUs: the arbiter outlives it and serves others."""


@dataclass(frozen=True, slots=True)
class Keepers:
    """The keeper that runs now."""

    pid: int
    idle_s: float
    bursts: bool = False
    """Its arbiter serves bursts."""


def ensure(machine: StateRoot, idle_s: float) -> bool:
    """Start a keeper unless there is one. True when this call started it; what an earlier one left has ended by then."""
    lock = try_lock(machine.keeper_lock)
    if lock is None:
        return False
    try:
        machine.trouble.unlink(missing_ok=True)
        programs = [] if machine.programs is None else [str(machine.programs)]
        command = [
            sys.executable,
            "-P",
            "-m",
            "tangramctl.keeper",
            str(machine.root),
            str(lock),
            str(idle_s),
            *programs,
        ]
        with open(machine.log, "w", opener=_private) as log:
            os.fchmod(log.fileno(), 0o600)  # of an earlier version
            starter = subprocess.Popen(
                command, env=_environment(), cwd="/", pass_fds=[lock], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
            code = starter.wait()
    finally:
        os.close(lock)  # the keeper's copy keeps it
    if code != 0:
        raise Broken(f"the keeper of {machine.root} does not start: {_tail(machine.log)}")
    return True


def await_socket(machine: StateRoot, path: Path, idle_s: float) -> None:
    """Return when a process accepts connections there; start a keeper when none runs. Raises Broken."""
    pause = threading.Event()
    until_s = time.monotonic() + WAIT_S
    started = int(ensure(machine, idle_s))  # also where an arbiter answers: without its keeper it is about to end
    while not answers(path):
        if started >= STARTS and (lock := try_lock(machine.keeper_lock)) is not None:
            os.close(lock)
            raise Broken(_why(machine))
        if started < STARTS:
            started += ensure(machine, idle_s)
        if time.monotonic() >= until_s:
            raise Broken(f"no arbiter answers at {path} after {WAIT_S:.0f} s: {_tail(machine.log)}")
        pause.wait(CHECK_S)


def await_bursts(machine: StateRoot, path: Path) -> bool:
    """Return once the arbiter that listens there serves bursts: a program that starts before has its guarantee alone. False: it does not in time."""
    pause, until_s = threading.Event(), time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        if (keeper := running(machine)) is not None and keeper.bursts and answers(path):
            return True
        pause.wait(CHECK_S)
    return False


def answers(path: Path) -> bool:
    """Does a process accept connections on this socket?"""
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        with socket.socket(socket.AF_UNIX, kind) as sock:
            try:
                sock.connect(str(path))
            except OSError:
                continue
            return True
    return False


def running(machine: StateRoot) -> Keepers | None:
    """The keeper that runs now, or None."""
    try:
        reported = json.loads(machine.keeper_file.read_text())
        if start_ticks(reported["pid"]) == reported["start_ticks"]:
            return Keepers(reported["pid"], reported["idle_s"], reported.get("bursts", False))
    except (OSError, ValueError, KeyError, TypeError):  # TypeError: it is no object
        return None
    return None


def arbiter_pid(machine: StateRoot) -> int | None:
    """Of the arbiter that listens now; None where none does. keeper.json may name a former one: the disk may be full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ANSWER_S)
        try:
            sock.connect(str(machine.status_socket))
            pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return None
    return int(pid)


def stop(machine: StateRoot) -> Keepers | None:
    """End the keeper and what it keeps; which it was, or None when there was none. Raises Broken when it does not end."""
    found = running(machine)
    if found is None:
        return None
    try:
        os.kill(found.pid, signal.SIGTERM)
    except ProcessLookupError:
        return found
    pause = threading.Event()
    until_s = time.monotonic() + STOP_S
    while time.monotonic() < until_s:
        lock = try_lock(machine.keeper_lock)
        if lock is not None:
            os.close(lock)
            return found
        pause.wait(CHECK_S)
    raise Broken(f"the keeper, process {found.pid}, does not end within {STOP_S:.0f} s")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # it names grants


def _environment() -> dict[str, str]:
    passed = {
        name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith("TANGRAM_ARBITER_")
    }
    searched = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return passed | {"PYTHONPATH": os.pathsep.join(filter(None, searched))}


def _why(machine: StateRoot) -> str:
    try:
        text = machine.trouble.read_text(errors="replace").strip()
    except FileNotFoundError:
        text = ""
    return text or f"the arbiter of {machine.root} does not stay up: {_tail(machine.log)}"


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else f"nothing is in {log}"
