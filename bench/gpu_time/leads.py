"""How far ahead should a request be announced beside a neighbour that keeps the card at its power cap? The GPU is free after a millisecond;
its clock takes longer to rise. Requests announced by several leads, and the clock after the neighbour was stopped."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Final

from bench.gpu_time.book import Book, Requests
from bench.gpu_time.models import UNDER_WAY_S, Pair, beside, served
from bench.gpu_time.node import Node, ask, median
from tests.gpu.kit.machine import Lines

REPEATS = 5
LEADS_US: Final = (1_500, 5_000, 10_000)
PAIR: Final = Pair("8 tokens as a graph beside 16384^3 matmul", "gemm", tokens=8, graph=True)
ALONE: Final = f"{PAIR.name}: alone, held"
CLOCK_MS: Final = (1.5, 3.0, 6.0, 12.0, 25.0, 50.0)
"""The clock is seen between each two of these, after a section is asked for that stops the neighbour."""
LEAST_S = 1.0


def run(node: Node, book: Book, seconds: float) -> None:
    """All leads in turns, REPEATS times."""
    if node.machine.fake is not False:
        book.not_run("leads", "PyTorch", "the fake driver computes nothing")
        return
    end = time.monotonic() + seconds
    node.start_arbiter()
    node.grant("lc", "latency-critical")
    node.grant("be", "best-effort")
    lc, be = node.model("serve", "lc"), node.model("work", "be")
    requests = Requests(book, "leads", "ms")
    for repeat in range(REPEATS):
        left_s = (end - time.monotonic()) / (REPEATS - repeat)
        window_s = max(LEAST_S, left_s / (len(LEADS_US) + 2) - 2 * UNDER_WAY_S)
        _round(book, lc, be, repeat, window_s, requests)
        _clocks(book, lc, be, repeat)
    requests.over_all()
    book.sum_up("leads")


def _round(book: Book, lc: Lines, be: Lines, repeat: int, seconds: float, requests: Requests) -> None:
    requests.add(ALONE, repeat, served(lc, PAIR, seconds, repeat), alone=ALONE)
    solo, _ = beside(be, PAIR, lambda: time.sleep(seconds))
    for lead_us in LEADS_US:
        case = f"{PAIR.name}: announced {lead_us / 1000:g} ms ahead"
        kept, took = beside(be, PAIR, lambda lead_us=lead_us: served(lc, PAIR, seconds, repeat, lead_us))  # type: ignore[misc]
        requests.add(case, repeat, took, alone=ALONE)
        book.add("leads", case, "neighbour's steps of alone", "%", repeat, 100 * kept / solo)


def _clocks(book: Book, lc: Lines, be: Lines, repeat: int) -> None:
    time.sleep(UNDER_WAY_S)
    _clock(book, lc, "clock alone", repeat)
    ask(be, "start", PAIR.neighbour)
    time.sleep(2 * UNDER_WAY_S)
    _clock(book, lc, f"clock after {PAIR.neighbour}", repeat)
    ask(be, "stop")


def _clock(book: Book, lc: Lines, case: str, repeat: int) -> None:
    seen = ask(lc, "clocks", CLOCK_MS[-1])["seen"]
    for since, until in pairwise(CLOCK_MS):
        mhz = [one for at_ms, one in seen if since <= at_ms < until]
        if mhz:  # a suspend can take that long
            book.add("leads", case, f"{since:g} to {until:g} ms", "MHz", repeat, median(mhz), f"{len(mhz)} times")
