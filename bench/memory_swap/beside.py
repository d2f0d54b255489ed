"""A latency-critical server beside best-effort training that is not announced: first token, time per token, and what training keeps. Nothing has to move.

The server is torch_server.py, the training bench/gpu_time's; both may burst and have room for all. For each rate of requests: the server alone, beside
the training, and alone once more. "Solo's own" is the second time alone against the first: a difference within it cannot be told from none.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Final

from bench.memory_swap.figures import Figure
from bench.memory_swap.no_pressure import MODELS, has_torch, model, request, training_rate
from bench.memory_swap.session import Session
from bench.memory_swap.swap_node import HERE
from tests.gpu.kit.machine import Lines

SERVER_MIB: Final = 36 * 1024
"""Limit of the server: 16 GB of weights, 6.6 GiB of keys and values, and what PyTorch needs to compute and for its graphs."""
WINDOWS_S: Final = {1: 40.0, 5: 15.0, 20: 15.0}
"""By requests in a second: long enough for 2,000 tokens of 64 a request."""
TRAIN_S: Final = 10.0
NEEDS_S: Final = 3 * sum(WINDOWS_S.values()) + TRAIN_S + 90
"""One measurement. Guessed: 90 s for two starts of PyTorch and the last requests of each window."""
GOALS: Final = {"first token": 1.05, "per token": 1.02}
KEPT_GOAL: Final = 0.9


@dataclass(frozen=True, slots=True)
class Served:
    """What one window saw."""

    first_ms: list[float]
    token_ms: list[float]
    busy: float
    """Part of the time in which the server had work."""


def run(session: Session) -> None:
    """One measurement a repeat. Needs PyTorch and a GPU."""
    if session.fake or not has_torch():
        return
    for repeat in range(session.repeat):
        with session.measuring("beside", "16 GB", repeat, NEEDS_S) as wanted:
            if wanted:
                _measure(session, repeat)


def _measure(session: Session, seed: int) -> None:
    server = model(session, "burst", HERE / "torch_server.py", service_class="latency-critical", mib=SERVER_MIB)
    trainer = model(session, "burst", MODELS, "work", service_class="best-effort")
    trains = training_rate(trainer, TRAIN_S)
    session.add({"training alone": Figure(trains, "steps/s")}, complete=False)
    for rate, seconds in WINDOWS_S.items():
        alone = _window(server, seconds, rate, seed)
        request(trainer, "start", "train")
        before = request(trainer, "count")
        beside = _window(server, seconds, rate, seed)
        after = request(trainer, "stop")
        again = _window(server, seconds, rate, seed)
        did = (after["done"] - before["done"]) / (after["ended_at_s"] - before["ended_at_s"])
        session.add(rows(rate, alone, beside, again, did / trains), complete=False)
    session.add({})
    for lines in (server, trainer):
        lines.end()


def _window(server: Lines, seconds: float, rate: float, seed: int) -> Served:
    answer: dict[str, Any] = request(server, "serve", seconds, rate, seed)
    return Served(answer["first_ms"], answer["token_ms"], answer["busy"])


def rows(rate: int, alone: Served, beside: Served, again: Served, kept: float) -> dict[str, Figure]:
    """Of one rate. `kept`: the training's speed of its speed alone."""
    found = {
        f"{rate}/s: tokens": Figure(len(beside.token_ms)),
        f"{rate}/s: server's work alone": Figure(100 * alone.busy, "%"),
        f"{rate}/s: training keeps of what is left": Figure(kept / (1 - alone.busy), "", f"goal >= {KEPT_GOAL}"),
    }
    for name, of in (("first token", "first_ms"), ("per token", "token_ms")):
        for part in (50, 99):
            base, other, second = (percentile(getattr(one, of), part) for one in (alone, beside, again))
            found[f"{rate}/s: {name} p{part} alone"] = Figure(base, "ms")
            found[f"{rate}/s: {name} p{part} beside"] = Figure(
                other / base, "", f"goal <= {GOALS[name]}; solo's own {second / base:.3f}"
            )
    return found


def percentile(values: list[float], part: int) -> float:
    """Of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[part - 1]
