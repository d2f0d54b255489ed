"""Requests of a latency-critical container beside kernels that fill the GPU."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

from bench.gpu_time import mps
from bench.gpu_time.node import Node, by_kind, quantile, rate, request
from bench.gpu_time.results import QUANTILES, Requests, Results
from tests.gpu.kit.machine import Lines

LAUNCHES, KERNEL_US, PERIOD_US, LONG_US = 5, 48, 10_000, 59_500
REPEATS = 5
HELD = -1
ASLEEP = {"awake_ms": "0"}
UNDER_WAY_S = 0.4
"""Until the neighbour is up to speed."""


@dataclass(frozen=True)
class Way:
    """One row of the table."""

    name: str
    requests: bool = True
    neighbour: bool = True
    held: bool = True
    """By library and arbiter."""
    asleep: bool = False
    """The arbiter sleeps between the requests."""
    ahead_us: int = 0
    mps_percent: int = 0
    """Both are clients of MPS, and the neighbour has so many of the multiprocessors; 0 = they are not."""


WAYS = (
    Way("alone", neighbour=False, held=False),
    Way("neighbour alone", requests=False, held=False),
    Way("time slicing", held=False),
    Way("MPS", held=False, mps_percent=100),
    Way("MPS, neighbour capped to 50 %", held=False, mps_percent=50),
    Way("alone, held", neighbour=False),
    Way("found by the library"),
    Way("announced 1.0 ms ahead", ahead_us=1000),
    Way("announced 1.5 ms ahead", ahead_us=1500),
    Way("found by the library, arbiter asleep", asleep=True),
    Way("announced 1.0 ms ahead, arbiter asleep", asleep=True, ahead_us=1000),
    Way("announced 1.5 ms ahead, arbiter asleep", asleep=True, ahead_us=1500),
)


class Pair:
    """The two containers, held and not."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.asleep: bool | None = None
        self.start_arbiter(False)
        node.grant_pair()
        free_lc, free_be = node.load(), node.load()
        self.per_us = free_lc_rate(free_lc)
        self.programs = {0: (free_lc, free_be), HELD: (node.load("lc"), node.load("be"))}

    def use_mps(self, env: dict[str, str]) -> None:
        """Start the clients of MPS."""
        for percent in {way.mps_percent for way in WAYS if way.mps_percent}:
            self.programs[percent] = (self.node.load(**env), self.node.load(**env, **mps.capped(percent)))

    def start_arbiter(self, asleep: bool) -> None:
        if self.asleep != asleep:
            first, self.asleep = self.asleep is None, asleep
            self.node.start_arbiter(**ASLEEP if asleep else {})
            if not first:
                self.node.wait_for_turns("lc", "be")

    def run(self, way: Way, seconds: float) -> tuple[list[float], float, int]:
        """Microseconds of the requests, the neighbour's kernels in a second, its suspends."""
        if way.held:
            self.start_arbiter(way.asleep)
        lc, be = self.programs[HELD if way.held else way.mps_percent]
        before = after = {"done": 0.0}
        took: list[float] = []
        suspends = self._suspends() if way.held else 0
        if way.neighbour:
            request(be, "start", LONG_US, self.per_us)
            time.sleep(UNDER_WAY_S)
            before = request(be, "count")
        if way.requests:
            count = max(10, int(seconds * 1e6 / PERIOD_US))
            took = request(lc, "lc", count, PERIOD_US, LAUNCHES, KERNEL_US, self.per_us, way.ahead_us)["us"]
        else:
            time.sleep(seconds)
        if way.neighbour:
            after = request(be, "count")
            request(be, "stop")
        return took, rate(before, after), (self._suspends() - suspends) if way.held else 0

    def _suspends(self) -> int:
        return self.node.gpu_times()["be"].suspends


def free_lc_rate(lc: Lines) -> int:
    """Steps of the kernel in a microsecond, on a GPU of its own."""
    return int(request(lc, "calibrate")["per_us"])


def run(node: Node, results: Results, seconds: float) -> None:
    """All ways alternately, REPEATS times; the ways that need the other arbiter stand together."""
    end = time.monotonic() + seconds
    pair = Pair(node)
    requests = Requests(results, "lc", "us")
    with ExitStack() as stack:
        try:
            env = stack.enter_context(mps.server(node.machine.folder))
            stack.callback(node.machine.end_containers)
            pair.use_mps(env)
        except (mps.NoMps, RuntimeError) as error:
            results.not_run("lc", "MPS", error)
        _repeats(pair, results, end, requests)
    requests.over_all(way.name for way in WAYS)
    results.sum_up("lc")
    for what, times in by_kind(node.stop_arbiter()).items():
        for name, part in QUANTILES:
            results.over_all(
                "lc", f"the last arbiter's {what}", name, "us", quantile(times, part), f"{len(times)} calls"
            )


def _repeats(pair: Pair, results: Results, end: float, requests: Requests) -> None:
    there = [way for way in WAYS if way.held or way.mps_percent in pair.programs]
    for repeat in range(REPEATS):
        ways = sorted(there, key=lambda way: way.asleep is (repeat % 2 == 0))
        for number, way in enumerate(ways):
            left = (REPEATS - repeat) * len(ways) - number
            window_s = max(0.5, (end - time.monotonic()) / left - UNDER_WAY_S - 0.4)
            took, beside, suspends = pair.run(way, window_s)
            if way.requests:
                requests.add(way.name, repeat, took, alone="alone")
            if way.neighbour:
                results.add("lc", way.name, "neighbour's kernels", "1/s", repeat, beside, f"{suspends} suspends")
