"""What bursts cost where nothing has to move: the same program in a container that may burst, in one that may not, and without the library.

    steps       additions to all of 16 GB
    training, decode    bench/gpu_time's models: steps of training, and requests of 8 tokens at batch 1 (PyTorch)
    serving beside training     the decoder latency-critical, the training best-effort, each with room for all: first token, and time per token

The pair of cuMemAlloc and cuMemFree is in allocations.py.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from typing import Any

from bench.memory_swap.figures import Figure
from bench.memory_swap.session import Session
from bench.memory_swap.swap_node import HERE, PYTHON, Job
from tests.gpu.kit import burst
from tests.gpu.kit.machine import Lines

MODEL_BYTES = 16_000_000_000
STEPS, FAKE_STEPS = 400, 3
TRAIN_S, SERVE_S, RATE = 12.0, 12.0, 20.0
NEEDS_S = 110.0
"""One measurement. Guessed: three starts of PyTorch, and four windows."""
TOKENS = 8
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
        if session.fake or not _has_torch():
            continue
        for name, measure in (("training", _training), ("decode", _decode), ("serving beside training", _beside)):
            with session.measuring("idle", name, repeat, NEEDS_S) as wanted:
                if wanted:
                    session.add(measure(session))


def _has_torch() -> bool:
    done = subprocess.run([PYTHON, "-c", "import torch"], capture_output=True, check=False)
    return done.returncode == 0


def _of_driver(values: dict[str, float], unit: str, goal: str) -> dict[str, Figure]:
    """Each way's figure, and its ratio to the driver alone."""
    rows = {way: Figure(value, unit) for way, value in values.items()}
    ratios = {f"{way} of driver": Figure(values[way] / values["driver"], "", goal) for way in WAYS[1:]}
    return rows | ratios


def _steps(session: Session) -> dict[str, Figure]:
    node, total_bytes = session.node, session.scaled(MODEL_BYTES)
    took: dict[str, float] = {}
    elastic = 0.0
    for way in WAYS:
        job: Job = {
            "driver": node.outside,
            "library": lambda: node.alone(total_bytes),
            "burst": lambda: node.roomy(total_bytes),
        }[way]()
        made = job.request("make", "segments", total_bytes)
        job.request("steps", 3)
        seen = job.request("steps", FAKE_STEPS if session.fake else STEPS)
        took[way] = (seen["last_s"] - seen["began_s"]) / seen["steps"]
        elastic = made["elastic"] / made["bytes"]
        job.end()
    return _of_driver(took, "s", "goal <= 1.01") | {"elastic": Figure(100 * elastic, "%")}


def _model(session: Session, way: str, kind: str, service_class: str = "standard") -> Lines:
    here = session.node.machine
    key = ""
    if way == "library":
        key = here.grant(MODEL_MIB, service_class=service_class)
    elif way == "burst":
        guarantee_mib = GUARANTEE_MIB if burst.served() else MODEL_MIB
        key = here.grant(guarantee_mib, service_class=service_class, burst_mib=MODEL_MIB)
    lines = here.lines([PYTHON, str(MODELS), kind], key, CUDA_VISIBLE_DEVICES="0")
    lines.receive(120)
    return lines


def _request(lines: Lines, *words: object) -> dict[str, Any]:
    lines.send(*words)
    return lines.receive(120)


def _rate(lines: Lines) -> float:
    """Steps of training in a second."""
    _request(lines, "start", "train")
    time.sleep(1.0)
    before = _request(lines, "count")
    time.sleep(TRAIN_S)
    after = _request(lines, "stop")
    return float((after["done"] - before["done"]) / (after["ended_at_s"] - before["ended_at_s"]))


def _training(session: Session) -> dict[str, Figure]:
    seconds: dict[str, float] = {}
    for way in WAYS:
        lines = _model(session, way, "work")
        seconds[way] = 1 / _rate(lines)
        lines.end()
    return _of_driver(seconds, "s", "goal <= 1.01")


def _served_ms(lines: Lines, tokens: int) -> float:
    """The median of a request."""
    answer = _request(lines, "serve", SERVE_S, RATE, 1, tokens, True, 0)
    return statistics.median(answer["ms"])


def _decode(session: Session) -> dict[str, Figure]:
    ms: dict[str, float] = {}
    for way in WAYS:
        lines = _model(session, way, "serve")
        ms[way] = _served_ms(lines, TOKENS)
        lines.end()
    return _of_driver(ms, "ms", "goal <= 1.01")


def _beside(session: Session) -> dict[str, Figure]:
    """Both containers may burst and have all that they need."""
    server = _model(session, "burst", "serve", "latency-critical")
    alone = {tokens: _served_ms(server, tokens) for tokens in (1, TOKENS + 1)}
    trainer = _model(session, "burst", "work", "best-effort")
    _request(trainer, "start", "train")
    beside = {tokens: _served_ms(server, tokens) for tokens in (1, TOKENS + 1)}
    _request(trainer, "stop")
    for lines in (server, trainer):
        lines.end()

    def per_token(ms: dict[int, float]) -> float:
        return (ms[TOKENS + 1] - ms[1]) / TOKENS

    return {
        "first token alone": Figure(alone[1], "ms"),
        "first token beside training": Figure(beside[1] / alone[1], "", "of alone; goal <= 1.05"),
        "per token alone": Figure(per_token(alone), "ms"),
        "per token beside training": Figure(per_token(beside) / per_token(alone), "", "of alone; goal <= 1.02"),
        "as JSON": Figure(0, "", json.dumps({"alone": alone, "beside": beside})),
    }
