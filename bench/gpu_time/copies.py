"""What a best-effort container's copies do to a latency-critical one, and what stopping its copy channels does about that.

A request copies 1 MiB in, computes for 48 us and copies 1 MiB out. The neighbour copies 64 MiB in both directions all the time and
computes nothing, so that whatever it costs is the copies. The ways that need the option stand together in each repeat, as it takes
another arbiter. A driver that refuses to stop copy channels shows by `trouble` in the note of the last way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.gpu_time.latency import KERNEL_US, PERIOD_US, free_lc_rate
from bench.gpu_time.node import Node, by_kind, quantile, rate, request
from bench.gpu_time.results import QUANTILES, Requests, Results

KIB, NEIGHBOUR_MIB = 1024, 64
REPEATS = 5
UNDER_WAY_S = 0.3


@dataclass(frozen=True)
class Way:
    name: str
    requests: bool = True
    neighbour: bool = True
    held: bool = True
    stopped: bool = False
    """The arbiter stops the copies of best-effort containers."""
    ahead_us: int = 0


WAYS = (
    Way("copies: alone", neighbour=False, held=False),
    Way("copies: neighbour alone", requests=False, held=False),
    Way("copies: time slicing", held=False),
    Way("copies: alone, held", neighbour=False),
    Way("copies: found by the library, copies go on"),
    Way("copies: announced 1.5 ms ahead, copies go on", ahead_us=1500),
    Way("copies: found by the library, copies stopped", stopped=True),
    Way("copies: announced 1.5 ms ahead, copies stopped", stopped=True, ahead_us=1500),
)


class Pair:
    """The two containers, held and not."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.stopped: bool | None = None
        self.start_arbiter(False)
        node.grant_pair()
        free = node.load(), node.load()
        self.per_us = free_lc_rate(free[0])
        self.programs = {False: free, True: (node.load("lc"), node.load("be"))}

    def start_arbiter(self, stopped: bool) -> None:
        if self.stopped != stopped:
            first, self.stopped = self.stopped is None, stopped
            self.node.start_arbiter(suspend_copies=str(stopped).lower())
            if not first:
                self.node.wait_for_turns("lc", "be")

    def run(self, way: Way, seconds: float) -> tuple[list[float], float, str]:
        """Microseconds of the requests, GB/s of the neighbour in each direction, and a note."""
        if way.held:
            self.start_arbiter(way.stopped)
        lc, be = self.programs[way.held]
        took: list[float] = []
        before = after = {"done": 0.0}
        suspends = self.node.gpu_times()["be"].suspends if way.held else 0
        if way.neighbour:
            request(be, "copy", NEIGHBOUR_MIB)
            time.sleep(UNDER_WAY_S)
            before = request(be, "count")
        if way.requests:
            count = max(10, int(seconds * 1e6 / PERIOD_US))
            took = request(lc, "moves", count, PERIOD_US, KIB, KERNEL_US, self.per_us, way.ahead_us)["us"]
        else:
            time.sleep(seconds)
        if way.neighbour:
            after = request(be, "count")
            request(be, "stop")
        return took, rate(before, after) * NEIGHBOUR_MIB * 2**20 / 1e9, self._note(suspends) if way.held else ""

    def _note(self, suspends: int) -> str:
        gpu_time = self.node.gpu_times()["be"]
        return f"{gpu_time.suspends - suspends} suspends" + (
            f", trouble: {gpu_time.trouble}" if gpu_time.trouble else ""
        )


def run(node: Node, results: Results, seconds: float) -> None:
    """All ways alternately, REPEATS times."""
    end = time.monotonic() + seconds
    pair = Pair(node)
    requests = Requests(results, "copies", "us")
    for repeat in range(REPEATS):
        ways = sorted(WAYS, key=lambda way: way.stopped is (repeat % 2 == 0))
        for number, way in enumerate(ways):
            left = (REPEATS - repeat) * len(ways) - number
            took, beside, note = pair.run(way, max(0.5, (end - time.monotonic()) / left - UNDER_WAY_S - 0.2))
            if way.requests:
                requests.add(way.name, repeat, took, alone="copies: alone")
            if way.neighbour:
                results.add("copies", way.name, "neighbour copies in each direction", "GB/s", repeat, beside, note)
    requests.over_all(way.name for way in WAYS)
    results.sum_up("copies")
    for what, times in by_kind(node.stop_arbiter()).items():
        for name, part in QUANTILES:
            results.over_all(
                "copies", f"the last arbiter's {what}", name, "us", quantile(times, part), f"{len(times)} calls"
            )
