"""Pairs with the shape of models: a transformer that decodes at batch 1 for requests of a Poisson process, beside training or beside
large matrix products. Under the driver's time slicing, under MPS with and without a cap, and held by us."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from bench.gpu_time import mps
from bench.gpu_time.node import Node, rate, request
from bench.gpu_time.results import Requests, Results
from tests.gpu.kit.machine import Lines

REPEATS = 5
UNDER_WAY_S = 0.3
LEAST_S = 1.0
CAP_PERCENT = 50
"""Of the multiprocessors, for MPS's neighbour."""
RATE = 50.0
"""Requests in a second."""


@dataclass(frozen=True)
class Pair:
    name: str
    neighbour: str
    tokens: int = 2
    """Of each request."""
    graph: bool = False


@dataclass(frozen=True)
class Way:
    name: str
    containers: str
    """Of which programs: `free`, `held`, `mps`, `mps capped`."""
    ahead_us: float = 0.0


PAIRS = (
    Pair("decode beside training", "train"),
    Pair("decode beside 16384^3 matmul", "gemm"),
    Pair("decode as a graph beside 16384^3 matmul", "gemm", graph=True),
    Pair("decode of 8 tokens as a graph beside 16384^3 matmul", "gemm", tokens=8, graph=True),
    Pair("decode of 8 tokens as a graph beside kernels of 60 ms in one thread", "idler", tokens=8, graph=True),
)
WAYS = (
    Way("time slicing", "free"),
    Way("MPS", "mps"),
    Way(f"MPS, neighbour capped to {CAP_PERCENT} %", "mps capped"),
    Way("found by the library", "held"),
    Way("announced 1.5 ms ahead", "held", ahead_us=1500),
)
GpuTimeContainers = tuple[Lines, Lines]


def run(node: Node, results: Results, seconds: float) -> None:
    """All ways alternately, REPEATS times. What is alone is the server without a neighbour, and the neighbour without it."""
    if not computes(node, results, "models"):
        return
    end = time.monotonic() + seconds
    node.start_arbiter()
    node.grant_pair()
    requests = Requests(results, "models", "ms")
    with ExitStack() as stack:
        containers = _containers(node, results, stack)
        ways = [way for way in WAYS if way.containers in containers]
        for repeat in range(REPEATS):
            for at, pair in enumerate(PAIRS):
                rounds = (REPEATS - repeat) * len(PAIRS) - at
                window_s = max(LEAST_S, (end - time.monotonic()) / rounds / (len(ways) + 2) - UNDER_WAY_S)
                _round(results, containers, ways, pair, repeat, window_s, requests)
    requests.over_all()
    results.sum_up("models")


def _containers(node: Node, results: Results, stack: ExitStack) -> dict[str, GpuTimeContainers]:
    def pair(lc: str, be: str, env: dict[str, str], be_env: dict[str, str]) -> GpuTimeContainers:
        return node.model("serve", lc, **env), node.model("work", be, **env, **be_env)

    made = {"free": pair("", "", {}, {}), "held": pair("lc", "be", {}, {})}
    try:
        env = stack.enter_context(mps.server(node.machine.folder))
        stack.callback(node.machine.end_containers)
        made["mps"] = pair("", "", env, {})
        made["mps capped"] = pair("", "", env, mps.capped(CAP_PERCENT))
    except (mps.NoMps, RuntimeError) as error:
        results.not_run("models", "MPS", error)
    return made


def _round(
    results: Results,
    containers: dict[str, GpuTimeContainers],
    ways: list[Way],
    pair: Pair,
    repeat: int,
    seconds: float,
    requests: Requests,
) -> None:
    lc, be = containers["free"]
    alone = f"{pair.name}: alone"

    requests.add(alone, repeat, served(lc, pair, seconds, repeat), alone=alone)
    solo, _ = beside(be, pair.neighbour, lambda: time.sleep(seconds))
    results.add("models", f"{pair.name}: neighbour alone", "neighbour's steps", "1/s", repeat, solo)
    for way in ways:
        lc, be = containers[way.containers]
        case = f"{pair.name}: {way.name}"
        kept, took = beside(be, pair.neighbour, lambda lc=lc, way=way: served(lc, pair, seconds, repeat, way.ahead_us))  # type: ignore[misc]
        requests.add(case, repeat, took, alone=alone)
        results.add("models", case, "neighbour's steps of alone", "%", repeat, 100 * kept / solo)


def computes(node: Node, results: Results, part: str) -> bool:
    """Is there a GPU that computes? If not, a row has the reason why the part was not run."""
    if node.machine.fake is False:
        return True
    results.not_run(part, "PyTorch", "the fake driver computes nothing")
    return False


def served(lc: Lines, pair: Pair, seconds: float, seed: int, ahead_us: float = 0.0) -> list[float]:
    """Milliseconds of each request."""
    took: list[float] = request(lc, *requested(pair, seconds, seed, ahead_us))["ms"]
    return took


def requested(pair: Pair, seconds: float, seed: int, ahead_us: float) -> tuple[object, ...]:
    """The command line of torch_models.py that serves requests."""
    return "serve", seconds, RATE, seed, pair.tokens, pair.graph, ahead_us


def beside(be: Lines, neighbour: str, what: Callable[[], Any]) -> tuple[float, Any]:
    """The neighbour's steps in a second meanwhile, and what came out of it."""
    request(be, "start", neighbour)
    time.sleep(UNDER_WAY_S)
    before = request(be, "count")
    found = what()
    after = request(be, "count")
    request(be, "stop")
    return rate(before, after), found
