"""What bursts cost where nothing has to move: the same program in a container that may burst, in one that may not, and without the library.

    steps       additions to all of 16 GB
    training, decode    bench/gpu_time's models: steps of training, and requests of 8 tokens at batch 1 (PyTorch)

The three programs are there at once and work by turns, ROUNDS times. A ratio is the median of the rounds, each of which has its own baseline.
The pair of cuMemAlloc and cuMemFree is in allocations.py, serving beside training in beside.py.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.memory_swap.figures import Figure
from bench.memory_swap.session import Session
from bench.memory_swap.swap_node import HERE, PYTHON, Job
from tests.gpu.kit import burst
from tests.gpu.kit.machine import Lines

MODEL_BYTES = 16_000_000_000
STEPS, FAKE_STEPS = 100, 3
"""Of a round."""
ROUNDS = 9
TRAIN_S, SERVE_S, RATE = 1.5, 1.5, 20.0
NEEDS_S = 110.0
"""One measurement. Guessed: three starts of PyTorch, and ROUNDS windows of each way."""
TOKENS = 8
UNDER_WAY_S = 0.5
MODELS = HERE.parents[1] / "bench/gpu_time/torch_models.py"
MODEL_MIB = 16384
"""Guarantee, or limit, of a container with one of those models: far more than it needs."""
GUARANTEE_MIB = 4096
WAYS = ("driver", "library", "burst")


def run(session: Session) -> None:
    """One measurement for each program and repeat; the ways alternate."""
    for repeat in range(session.repeat):
        with session.measuring("idle", "steps of 16 GB", repeat, NEEDS_S) as wanted:
            if wanted:
                session.add(_steps(session))
        if session.fake or not has_torch():
            continue
        for name, measure in (("training", _training), ("decode", _decode)):
            with session.measuring("idle", name, repeat, NEEDS_S) as wanted:
                if wanted:
                    session.add(measure(session))


def has_torch() -> bool:
    """Whether PYTHON has PyTorch."""
    done = subprocess.run([PYTHON, "-c", "import torch"], capture_output=True, check=False)
    return done.returncode == 0


def _by_turns(windows: Mapping[str, Callable[[], float]], unit: str) -> dict[str, Figure]:
    """Each way's median window, and its ratio to the driver alone of the same round."""
    rounds = [{way: windows[way]() for way in WAYS} for _ in range(ROUNDS)]
    rows = {way: Figure(statistics.median(one[way] for one in rounds), unit) for way in WAYS}
    for way in WAYS[1:]:
        ratios = [one[way] / one["driver"] for one in rounds]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        rows[f"{way} of driver"] = Figure(statistics.median(ratios), "", f"goal <= 1.01; rounds {spread}")
    return rows


def _steps(session: Session) -> dict[str, Figure]:
    node, total_bytes = session.node, session.scaled(MODEL_BYTES)
    jobs: dict[str, Job] = {
        "driver": node.outside(),
        "library": node.alone(total_bytes),
        "burst": node.roomy(total_bytes),
    }
    made = {way: job.request("make", "segments", total_bytes) for way, job in jobs.items()}

    def window(job: Job) -> float:
        seen = job.request("steps", FAKE_STEPS if session.fake else STEPS)
        return float((seen["last_s"] - seen["began_s"]) / seen["steps"])

    rows = _by_turns({way: partial(window, job) for way, job in jobs.items()}, "s")
    for job in jobs.values():
        job.end()
    return rows | {"elastic": Figure(100 * made["burst"]["elastic"] / made["burst"]["bytes"], "%")}


def model(
    session: Session, way: str, program: Path, *words: str, service_class: str = "standard", mib: int = MODEL_MIB
) -> Lines:
    """A program of PyTorch, ready: without the library (`driver`), in a container that is guaranteed so much (`library`), or that may burst to it (`burst`)."""
    here = session.node.machine
    key = ""
    if way == "library":
        key = here.grant(mib, service_class=service_class)
    elif way == "burst":
        guarantee_mib = GUARANTEE_MIB if burst.served() else mib
        key = here.grant(guarantee_mib, service_class=service_class, burst_mib=mib)
    lines = here.lines([PYTHON, str(program), *words], key, CUDA_VISIBLE_DEVICES="0")
    lines.receive(120)
    return lines


def request(lines: Lines, *words: object) -> dict[str, Any]:
    """Its answer."""
    lines.send(*words)
    return lines.receive(300)


def training_rate(lines: Lines, seconds: float) -> float:
    """Steps of training in a second."""
    request(lines, "start", "train")
    time.sleep(UNDER_WAY_S)
    before = request(lines, "count")
    time.sleep(seconds)
    after = request(lines, "stop")
    return float((after["done"] - before["done"]) / (after["ended_at_s"] - before["ended_at_s"]))


def _served_ms(lines: Lines) -> float:
    """The median of a request."""
    return statistics.median(request(lines, "serve", SERVE_S, RATE, 1, TOKENS, True, 0)["ms"])


def _measured(session: Session, kind: str, window: Callable[[Lines], float], unit: str) -> dict[str, Figure]:
    programs = {way: model(session, way, MODELS, kind) for way in WAYS}
    rows = _by_turns({way: partial(window, lines) for way, lines in programs.items()}, unit)
    for lines in programs.values():
        lines.end()
    return rows


def _training(session: Session) -> dict[str, Figure]:
    return _measured(session, "work", lambda lines: 1 / training_rate(lines, TRAIN_S), "s")


def _decode(session: Session) -> dict[str, Figure]:
    return _measured(session, "serve", _served_ms, "ms")
