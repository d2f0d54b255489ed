"""A client of NVIDIA's MPS: how the arbiter finds it out, what it reports, and that the container's work is held back all the same.

The control daemon is the check's own, with folders of its own, and ends with it; no setting of the GPU is changed. What NVML and the
kernel show of the client and of the server are facts for the reader.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pynvml

from bench.gpu_time import mps
from tests.gpu.guard import status
from tests.gpu.kit.machine import Container, Machine
from tests.gpu.kit.results import NotRun, Results

PART = "mps"
PROGRAM = Path(__file__).parent / "programs/idle.py"
CORE_PERCENT = 30
VISIBLE_S = 5.0
"""Specified."""
WINDOW_S = 4.0
ENOUGH = 0.45
"""Of what it does without a limit, at most, for a container that requested 30 % and is gated: how exactly it is held is a fact. Guessed."""
LISTS = ("ComputeRunningProcesses", "MPSComputeRunningProcesses", "GraphicsRunningProcesses")
SERVER_PID, SERVER_MIB = "4711", "30"
"""On the fake driver."""


@contextmanager
def _server(machine: Machine) -> Iterator[dict[str, str]]:
    """The environment of its clients. Raises NotRun."""
    if machine.fake:
        _ctl(machine, "process", "0", SERVER_PID, SERVER_MIB, "nvidia-cuda-mps-server")
        try:
            yield {}
        finally:
            _ctl(machine, "gone", SERVER_PID)
        return
    try:
        with mps.server(machine.folder) as env:
            yield env
    except mps.NoMps as error:
        raise NotRun(str(error)) from None


def _ctl(machine: Machine, *words: str) -> None:
    program, socket = machine.build / "fake/nvidia-fake-driverd", machine.folder / "driver.sock"
    subprocess.run([program, "ctl", "--socket", socket, *words], check=True, stdout=subprocess.DEVNULL)


def _program(machine: Machine, **env: str) -> Container:
    key = machine.grant(4096, core_percent=CORE_PERCENT)
    made = Container([sys.executable, str(PROGRAM)], machine.env(key, **env))
    machine.adopt(made)
    made.request("start")
    return made


def _reasons(machine: Machine, of: Container) -> set[str]:
    return {one["reason"] for one in status(machine, of.key)["unenforced"]}


def _steps_per_s(of: Container) -> float:
    """The first second is left out: a container begins with credit."""
    threading.Event().wait(1.0)
    before, began = of.request("count")
    threading.Event().wait(WINDOW_S)
    after, ended = of.request("count")
    return float((after - before) / (ended - began))


def _unlimited(machine: Machine) -> float:
    """Steps in a second of the program without a limit and without MPS. Its kernels are small: a real GPU runs several at a time."""
    free = Container([sys.executable, str(PROGRAM)], machine.env())
    machine.adopt(free)
    free.request("start")
    free.request("work")
    try:
        return _steps_per_s(free)
    finally:
        machine.end_containers()


def _named(pid: int, client: int) -> str:
    if pid == client:
        return "client"
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "a process that /proc does not show"


def _nvml_lists(uuid: str, client: int) -> dict[str, str]:
    """The processes in each of NVML's lists, seen from outside the container."""
    pynvml.nvmlInit()  # type: ignore[no-untyped-call]
    try:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        found = {}
        for name in LISTS:
            try:
                listed = getattr(pynvml, f"nvmlDeviceGet{name}")(gpu)
            except pynvml.NVMLError as error:
                found[name] = str(error)
                continue
            listing = (f"{_named(one.pid, client)} {(one.usedGpuMemory or 0) >> 20} MiB" for one in listed)
            found[name] = ", ".join(listing) or "nobody"
        return found
    finally:
        pynvml.nvmlShutdown()  # type: ignore[no-untyped-call]


def _device_files(pid: int) -> str:
    """Of the driver's, that it has open, each with how often."""
    names = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            names.append(str(fd.readlink()))
    counts = {name: names.count(name) for name in sorted(set(names)) if name.startswith("/dev/nvidia")}
    return ", ".join(f"{name} x {count}" for name, count in counts.items()) or "none"


def _client(machine: Machine, results: Results) -> None:
    free = _unlimited(machine)
    with _server(machine) as env:
        client = _program(machine, **env)
        began = time.monotonic()
        client.request("work")
        machine.wait_for(lambda: "mps" in _reasons(machine, client), "the reason mps", 20)
        results.at_most("reported as mps after, s", VISIBLE_S, round(time.monotonic() - began, 2))
        machine.wait_for(lambda: "gated" in _reasons(machine, client), "the reason gated", VISIBLE_S)
        seen = status(machine, client.key)
        results.check("reasons", "gated mps", " ".join(sorted(_reasons(machine, client))))
        results.check("state of GPU time", "unenforced", seen["gpu_time_state"])
        results.check("launches are delayed", "gate", (seen["turn"] or {}).get("mode"))
        results.fact("processes whose channels are known", (seen["turn"] or {}).get("processes"))
        results.fact("memory that NVML measured of it, MiB", seen["processes"][0]["cards"][0]["measured_bytes"] >> 20)
        results.fact("device files that the client has open", _device_files(client.pid))
        if not machine.fake:  # its NVML is in another folder than this process loads from
            for name, listing in _nvml_lists(machine.uuid, client.pid).items():
                results.fact(f"NVML's {name}", listing)
        part = _steps_per_s(client) / free
        results.check(f"part of its steps at {CORE_PERCENT} %, gated", f"<= {ENOUGH}", round(part, 3), part <= ENOUGH)
        machine.end_containers()


def _afterwards(machine: Machine, results: Results) -> None:
    """A container that is no client is enforced, also on a GPU that had a server before."""
    with _server(machine) as env:
        _program(machine, **env)
        machine.end_containers()
    other = _program(machine)
    other.request("work")
    machine.wait_for(
        lambda: (status(machine, other.key)["turn"] or {}).get("processes") == 1, "its channels", VISIBLE_S
    )
    machine.wait_for(lambda: not _reasons(machine, other), "no reason any more", VISIBLE_S)
    seen = status(machine, other.key)
    results.check("state of GPU time", "enforced", seen["gpu_time_state"])
    results.check("it is suspended", "suspend", seen["turn"]["mode"])


CASES: dict[str, Callable[[Machine, Results], None]] = {"a client": _client, "no client": _afterwards}


def run_case(machine: Machine, results: Results, name: str) -> None:
    """Rows of the CSV."""
    with results.one(PART, name):
        CASES[name](machine, results)
    machine.end_containers()
