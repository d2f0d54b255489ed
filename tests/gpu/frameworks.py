"""What frameworks do at a limit below their preference: their own error, life after it, and never past the limit in the driver's records.

Each case is a program of programs/ in a container of its own. A framework that this machine lacks is a row `not run`. Cases run
several at a time, since most of their time is import; a machine's cores decide how many.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.kit.machine import MIB, Lines, Machine, Watcher
from tests.gpu.kit.results import NotRun, Results

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_MIB = 8192
ROOM_MIB = 192
"""Kept beside a context for its growth after its container is full. The arbiter's default; 72 to 168 MiB were seen under PyTorch."""
PART = "frameworks"
CASE_S = 150


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    words: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    breaks: bool = False
    """PyTorch breaks off here without the library, too (seen with 2.11): then it must be at the same place."""


class BrokeOff(RuntimeError):
    """A program ended early; the text is its output."""


def _torch(name: str, configuration: str) -> Case:
    return Case(name, ("torch_fill.py",), {"PYTORCH_CUDA_ALLOC_CONF": configuration} if configuration else {})


CASES = (
    _torch("torch caching allocator", ""),
    _torch("torch expandable segments", "expandable_segments:True"),
    _torch("torch cudaMallocAsync", "backend:cudaMallocAsync"),
    Case("torch graphs", ("torch_graphs.py",)),
    Case("torch graphs, cudaMallocAsync", ("torch_graphs.py",), {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
         breaks=True),
    Case("torch DataParallel", ("torch_parallel.py",)),
    Case("torch NCCL, one rank", ("torch_nccl.py", "one")),
    Case("torch NCCL, two ranks", ("torch_nccl.py", "two")),
    Case("torch DataLoader, fork server", ("torch_loader.py",)),
    Case("jax preallocated", ("jax_fill.py",)),
    Case("jax growing", ("jax_fill.py",), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}),
    Case("jax platform allocator", ("jax_fill.py",), {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}),
    Case("cupy default pool", ("cupy_fill.py", "default")),
    Case("cupy managed pool", ("cupy_fill.py", "managed")),
    Case("cupy async pool", ("cupy_fill.py", "async")),
)  # fmt: skip


def run_case(machine: Machine, watch: Watcher, case: Case) -> Results:
    """The rows of one case."""
    results = Results()
    with results.one(PART, case.name):
        key = machine.grant(LIMIT_MIB)
        child = _start(machine, case, key)
        try:
            _follow(child, lambda line: _row(results, watch, child, line))
            results.check("exit status", 0, child.process.wait(30))
        except BrokeOff as error:
            if not case.breaks:
                raise
            results.fact("how it broke off", str(error)[-600:])
            results.check("where it broke off, as without the library", _alone(machine, case), _place(str(error)))
        except NotRun:
            watch.request("peak", key)
            raise
        finally:
            child.end()
        peak = watch.request("peak", key)["bytes"] / MIB
        results.within("peak by process in the driver's records, MiB", 1, LIMIT_MIB, peak)
        results.fact("MiB past the limit", max(0.0, peak - LIMIT_MIB))
    return results


def _start(machine: Machine, case: Case, key: str) -> Lines:
    python = os.environ.get("TANGRAM_TEST_PYTHON", sys.executable)
    program, *words = case.words
    return machine.lines(
        [python, str(PROGRAMS / program), *words], key, TANGRAM_TEST_LIMIT_MIB=str(LIMIT_MIB), **case.env
    )


def _alone(machine: Machine, case: Case) -> str:
    """Where the program breaks off without the library, whose limit it never meets then; "" = it does not."""
    child = _start(machine, case, "")
    try:
        _follow(child, lambda line: child.send("go on") if "brim" in line else None)
    except BrokeOff as error:
        return _place(str(error))
    finally:
        child.end()
    return ""


def _place(output: str) -> str:
    """PyTorch names the line of its source; of others the last line of output."""
    named = re.search(r"Exception raised from \S+ at \S+", output)
    return named[0] if named else output.strip().splitlines()[-1]


def _follow(child: Lines, each: Callable[[dict[str, Any]], None]) -> None:
    """Each line of the program. Raises BrokeOff."""
    printed = False
    while True:
        try:
            line = child.receive(CASE_S)
        except RuntimeError as error:
            if not printed or child.process.returncode != 0:
                raise BrokeOff(str(error)) from None
            return
        printed = True
        each(line)


def _row(results: Results, watch: Watcher, child: Lines, line: dict[str, Any]) -> None:
    if "not_run" in line:
        raise NotRun(line["not_run"])
    if "check" in line:
        results.check(line["check"], line["wanted"], line["seen"], line["ok"])
    elif "fact" in line:
        results.fact(line["fact"], line["seen"])
    elif "brim" in line:
        used = watch.now(child) / MIB
        results.within(
            "in the driver's records at the refusal, MiB", LIMIT_MIB - line["brim"] - ROOM_MIB, LIMIT_MIB, used
        )
        child.send("go on")


def run(machine: Machine, watch: Watcher, results: Results, until: Callable[[], bool] = lambda: False) -> None:
    """All cases; the rows of each as it ends. `until`: whether the time is up, for the cases not begun."""
    at_once = max(1, min(5, (os.cpu_count() or 1) // 3))

    def one(case: Case) -> Results:
        if until():
            late = Results(part=PART, case=case.name)
            late.not_run("the case", "no time left in the budget")
            return late
        return run_case(machine, watch, case)

    with ThreadPoolExecutor(at_once) as pool:
        for made in pool.map(one, CASES):
            results.extend(made)
