"""A program that goes past the library: the arbiter notices, reports, and kills it where the grant's policy is `kill`.

The program stands in a root of its own with the grant directory at /.tangram, as a container has it; needs root. What the
arbiter knows is read from its status socket.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.kit.machine import MIB, Machine, Watcher
from tests.gpu.kit.results import NotRun, Results
from tests.mounting import with_grant
from vgpu.api.contract import CONTAINER_DIR

PART = "guard"
PROGRAMS = Path(__file__).parent / "programs"
LIMIT_MIB = 2048
SOON_S = 5.0
"""Specified as 'within seconds': two readings a second apart, and what they take."""
KILLED_S = 10.0
"""Specified."""
CALM_S = 4.0


def built(machine: Machine, name: str, static: bool) -> str:
    """A program of programs/, built here: one linked statically elsewhere cannot load this machine's libraries."""
    made = machine.folder / f"{name}-{'static' if static else 'dynamic'}"
    if not made.exists():
        source = str(PROGRAMS / f"{name}.c")
        words = ["gcc", "-O1", "-w", *(["-static"] if static else []), "-o", str(made), source, "-ldl"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotRun(f"{' '.join(words[:4])}: {done.stderr.strip()[-200:]}")
    return str(made)


class Inside:
    """A process in the mount namespace of a container."""

    def __init__(self, machine: Machine, key: str, *words: str, library: bool = False) -> None:
        env = machine.base | ({"LD_PRELOAD": machine.preload} if library else {})
        self.process = subprocess.Popen(
            with_grant(machine.folder / "grants" / key, CONTAINER_DIR, *words),
            env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def whole_status(machine: Machine) -> dict[str, Any]:
    """The whole status of the arbiter."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(5)
        sock.connect(str(machine.status_socket))
        document: dict[str, Any] = json.loads(b"".join(iter(lambda: sock.recv(65536), b"")))
    return document


def status(machine: Machine, key: str) -> dict[str, Any]:
    """One container in the arbiter's status."""
    found = [one for one in whole_status(machine)["containers"] if one["key"] == key]
    if len(found) != 1:
        raise LookupError(f"status document: {len(found)} containers with key {key}, expected 1")
    one: dict[str, Any] = found[0]
    return one


def stays(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it is true for so long: checked ten times a second."""
    end, pause = time.monotonic() + seconds, threading.Event()
    while time.monotonic() < end:
        if not condition():
            return False
        pause.wait(0.1)
    return True


def _reported(machine: Machine, results: Results, how: str) -> None:
    key = machine.grant(LIMIT_MIB, "guard report")
    words = [built(machine, "bypass", static=how == "static"), str(LIMIT_MIB + 512)]
    if how == "static launcher":
        words.insert(0, built(machine, "launcher", static=True))
    bypass = Inside(machine, key, *words, library=how != "LD_PRELOAD unset")
    try:
        line = bypass.line()
        if not line and how == "static":
            raise NotRun(f"a static program that loads the driver ended with {bypass.process.wait(5)}")
        if line == "refused 304" and how == "static":
            raise NotRun("CUDA does not start in a static program here: 304, an error of the operating system")
        results.check("the program past its grant", f"held {LIMIT_MIB + 512}", line)
        if line.startswith("held"):
            took = machine.wait_for(lambda: status(machine, key)["over"], "the status over", 20)
            results.at_most("seconds until the arbiter says over", SOON_S, round(took, 2))
            listed = [one for one in status(machine, key)["processes"] if one["pid"] == bypass.process.pid]
            measured = listed[0]["cards"][0]["measured_bytes"] // MIB if listed else 0
            results.check(
                "its MiB in the status document", f">= {LIMIT_MIB + 512}", measured, measured >= LIMIT_MIB + 512
            )
            results.check("lives on when it is only reported", True, bypass.process.poll() is None)
    finally:
        bypass.end()
    if not line.startswith("held"):
        return
    took = machine.wait_for(lambda: not status(machine, key)["over"], "the end of the status over", 20)
    results.at_most("seconds until it is over no more after the end", SOON_S, round(took, 2))


def _unlisted(machine: Machine, results: Results) -> None:
    """The kernel driver's own requests: memory without a context, which NVML lists for no process."""
    key = machine.grant(LIMIT_MIB, "guard report")
    held_mib = LIMIT_MIB + 512

    def found() -> list[dict[str, Any]]:
        return [one for one in whole_status(machine)["unlisted"] if one["gpu"] == machine.uuid]

    results.check("unlisted before, MiB", [], [one["held_bytes"] // MIB for one in found()])
    program = Inside(machine, key, built(machine, "raw_ioctl", static=True), str(held_mib))
    try:
        line = program.line()
        if line == "refused: no device node":
            raise NotRun("the kernel driver's own requests need a real driver")
        results.check("the program past its grant", f"held {held_mib}", line)
        if not line.startswith("held"):
            return
        took = machine.wait_for(lambda: bool(found()), "the status unlisted", 20)
        results.at_most("seconds until the arbiter says unlisted", SOON_S, round(took, 2))
        results.within("unlisted, MiB", held_mib - 256, held_mib + 64, found()[0]["held_bytes"] // MIB)
        results.fact("the container that is named", found()[0]["container"] or "none: the arbiter sees no pods here")
        listed = [one["pid"] for one in status(machine, key)["processes"]]
        results.check("the program is listed for its container", False, program.process.pid in listed)
        results.check("lives on when it is only reported", True, program.process.poll() is None)
    finally:
        program.end()
    took = machine.wait_for(lambda: not found(), "the end of the status unlisted", 20)
    results.at_most("seconds until nothing is unlisted after the end", SOON_S, round(took, 2))


def _killed(machine: Machine, results: Results) -> None:
    key = machine.grant(LIMIT_MIB, "guard kill")
    program = built(machine, "bypass", static=False)
    sibling = Inside(machine, key, program, "256", library=True)
    bypass = None
    try:
        results.check("a sibling with the library", "held 256", sibling.line())
        bypass = Inside(machine, key, program, str(LIMIT_MIB + 512))
        results.check("the program past its grant", f"held {LIMIT_MIB + 512}", bypass.line())
        began = time.monotonic()
        code = bypass.process.wait(20)
        results.at_most("seconds until it is killed", SOON_S, round(time.monotonic() - began, 2))
        results.check("its exit", -signal.SIGKILL, code)
        alive = stays(lambda: sibling.process.poll() is None, 1.5)
        results.check("the sibling lives", True, alive)
    finally:
        for one in (sibling, bypass):
            if one is not None:
                one.end()


def _bypass_killed(machine: Machine, results: Results) -> None:
    """By the arbiter's own rule, where the grant's policy is `report`. This arbiter waits for no minute after its start."""
    machine.stop_arbiter()
    machine.start_arbiter(bypass="kill", bypass_quiet_s="0")
    bypass = None
    try:
        key = machine.grant(LIMIT_MIB, "guard report")
        program = built(machine, "bypass", static=False)
        sibling = Inside(machine, key, program, "256", library=True)
        try:
            results.check("a sibling with the library", "held 256", sibling.line())
            bypass = Inside(machine, key, program, str(LIMIT_MIB + 512))
            results.check("the program past its grant", f"held {LIMIT_MIB + 512}", bypass.line())
            began = time.monotonic()

            def reported() -> bool:
                return any(one["reason"] == "bypassing" for one in status(machine, key)["unenforced"])

            took = machine.wait_for(reported, "the status bypassing", 20)
            results.at_most("seconds until it is reported", SOON_S, round(took, 2))
            code = bypass.process.wait(20)
            results.at_most("seconds until it is killed", KILLED_S, round(time.monotonic() - began, 2))
            results.check("its exit", -signal.SIGKILL, code)
            results.check("the sibling lives", True, stays(lambda: sibling.process.poll() is None, 1.5))
        finally:
            for one in (sibling, bypass):
                if one is not None:
                    one.end()
    finally:
        machine.stop_arbiter()
        machine.start_arbiter()


def _calm(machine: Machine, results: Results, watch: Watcher) -> None:
    """A program of the library that stands at its limit is not over it."""
    key = machine.grant(LIMIT_MIB, "guard kill")
    inside = Inside(machine, key, built(machine, "bypass", static=False), str(LIMIT_MIB + 512), library=True)
    try:
        results.check("refused at the limit", "refused 2", inside.line())
        calm = stays(lambda: not status(machine, key)["over"] and inside.process.poll() is None, CALM_S)
        results.check(f"not called over, and alive, for {CALM_S:g} s at the brim", True, calm)
        used = watch.request("now")["processes"].get(str(inside.process.pid), 0) / MIB
        results.within("in the driver's records, MiB", LIMIT_MIB - 128 - LIMIT_MIB // 16, LIMIT_MIB, used)
    finally:
        inside.end()


CASES: dict[str, Callable[[Machine, Results, Watcher], None]] = {
    "bypass, static": lambda machine, results, _: _reported(machine, results, "static"),
    "bypass, static launcher": lambda machine, results, _: _reported(machine, results, "static launcher"),
    "bypass, LD_PRELOAD unset": lambda machine, results, _: _reported(machine, results, "LD_PRELOAD unset"),
    "bypass, raw ioctl": lambda machine, results, _: _unlisted(machine, results),
    "bypass, killed": lambda machine, results, _: _killed(machine, results),
    "bypass, killed by the arbiter's rule": lambda machine, results, _: _bypass_killed(machine, results),
    "at the brim with the library": _calm,
}


def run_case(machine: Machine, watch: Watcher, results: Results, name: str) -> None:
    """As root only: a mount namespace needs it."""
    with results.one(PART, name):
        if os.geteuid() != 0:
            raise NotRun("needs root for a mount namespace")
        CASES[name](machine, results, watch)
