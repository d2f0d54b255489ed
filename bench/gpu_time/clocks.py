"""Why an announced request takes longer beside large matrix products, though the GPU is free when it comes: the GPU's clock, seen at the end of
each request. Beside products of random numbers and of zeros (the same kernels and the same bytes moved, for less power), and beside products that
have less of the time. Announced 1.5 ms ahead where not noted otherwise."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Final

from bench.gpu_time.models import UNDER_WAY_S, Pair, beside, computes, requested
from bench.gpu_time.node import Node, median, request
from bench.gpu_time.results import Requests, Results

REPEATS = 5
LEAST_S = 1.0
REQUEST: Final = Pair("alone, held", "", tokens=8, graph=True)
"""In each way."""
NEIGHBOUR: Final = "neighbour's steps"


@dataclass(frozen=True)
class Way:
    name: str
    neighbour: str
    lead_us: float = 1_500
    limit_percent: int = 0
    """Of the neighbour's time; 0 = none."""
    section: bool = False
    """Is the neighbour off from the announcement on? A hint clears the GPU 1.5 ms before the request, however early it comes."""


WAYS: Final = (
    Way("beside 16384^3 matmul", "gemm"),
    Way("beside 16384^3 matmul, 10 ms ahead", "gemm", lead_us=10_000),
    Way("beside 16384^3 matmul, in a section from 1.5 ms before", "gemm", section=True),
    Way("beside 16384^3 matmul, in a section from 10 ms before", "gemm", lead_us=10_000, section=True),
    Way("beside 16384^3 matmul limited to 70 % of the time", "gemm", limit_percent=70),
    Way("beside 16384^3 matmul limited to 50 % of the time", "gemm", limit_percent=50),
    Way("beside 16384^3 matmul of zeros", "zeros"),
    Way("beside kernels of 60 ms in one thread", "idler"),
    Way("beside kernels of 60 ms in one thread, 10 ms ahead", "idler", lead_us=10_000),
)


def run(node: Node, results: Results, seconds: float) -> None:
    """All ways alternately, REPEATS times."""
    if not computes(node, results, "clocks"):
        return
    end = time.monotonic() + seconds
    node.start_arbiter()
    node.grant_pair()
    lc, be = node.model("serve", "lc"), node.model("work", "be")
    requests = Requests(results, "clocks", "ms")

    def seen(case: str, repeat: int, found: dict[str, list[float]]) -> None:
        requests.add(case, repeat, found["ms"], alone=REQUEST.name)
        results.add("clocks", case, "clock", "MHz", repeat, median(found["mhz"]))

    for repeat in range(REPEATS):
        left_s = (end - time.monotonic()) / (REPEATS - repeat)
        window_s = max(LEAST_S, left_s / (len(WAYS) + 1) - 2 * UNDER_WAY_S)
        seen(REQUEST.name, repeat, request(lc, *requested(REQUEST, window_s, repeat, 0.0), True))
        for way in WAYS:
            node.grant("be", "best-effort", way.limit_percent)
            serve = partial(request, lc, *requested(REQUEST, window_s, repeat, way.lead_us), True, way.section)
            steps, found = beside(be, way.neighbour, serve)
            seen(way.name, repeat, found)
            results.add("clocks", way.name, NEIGHBOUR, "1/s", repeat, steps)
    requests.over_all()
    results.sum_up("clocks")
