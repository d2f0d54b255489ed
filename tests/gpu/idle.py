"""An idle container does not block the GPU: a latency-critical container leaves work behind that no program waits for, and its
best-effort neighbour has the GPU again within seconds.

Each way is a case of its own, with two fresh containers. The neighbour's steps are counted alone, and from 4 to 6 seconds after the other
one's last call.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from tests.gpu.guard import status
from tests.gpu.kit.machine import Container, Machine
from tests.gpu.kit.results import Results

PART = "idle"
PROGRAM = Path(__file__).parent / "programs/idle.py"
LEFT = ("thread ended", "streams destroyed")
"""The work is under way when the call returns."""
CASES = (*LEFT, "many streams", "sticky error", "green destroyed")
WORK_US = 200_000
SOON_S, WINDOW_S, ENOUGH = 4.0, 2.0, 0.95
"""Of what the neighbour does alone. Guessed: within the noise of two seconds."""


def _program(machine: Machine, service_class: str) -> Container:
    made = Container([sys.executable, str(PROGRAM)], machine.env(machine.grant(4096, service_class=service_class)))
    machine.adopt(made)
    made.request("start")
    return made


def _per_second(of: Container, seconds: float) -> float:
    before, began = of.request("count")
    threading.Event().wait(seconds)
    after, ended = of.request("count")
    return float((after - before) / (ended - began))


def _works(machine: Machine, key: str) -> bool:
    gpu_time = status(machine, key)["turn"]
    return bool(gpu_time and gpu_time["working"])


def run_case(machine: Machine, results: Results, name: str) -> None:
    """Rows of the CSV."""
    with results.one(PART, name):
        neighbour, idle = _program(machine, "best-effort"), _program(machine, "latency-critical")
        neighbour.request("work")
        _per_second(neighbour, 1.0)
        alone = _per_second(neighbour, WINDOW_S)
        error = idle.request(name.replace(" ", "_"), WORK_US)
        began = time.monotonic()
        if name in LEFT:
            machine.wait_for(lambda: _works(machine, idle.key), "the arbiter to count it as working", 3)
        if name == "sticky error":
            results.check("the error stays", "not 0", error, error != 0)
        machine.wait_for(lambda: not _works(machine, idle.key), "the arbiter to count it as idle", 30)
        took_s = time.monotonic() - began
        results.at_most("counted as idle after, s", SOON_S, round(took_s, 2))
        threading.Event().wait(max(0.0, SOON_S - took_s))
        beside = _per_second(neighbour, WINDOW_S)
        results.check("neighbour's steps, of alone", f">= {ENOUGH}", round(beside / alone, 3), beside >= ENOUGH * alone)
    machine.end_containers()
