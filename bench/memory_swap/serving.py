"""A server whose memory is away when a request comes: how long its first token takes.

The server is latency-critical and answers one request at a time; a request touches all of its memory once, which stands for the first token. Requests are a Poisson
process. Its neighbour is best-effort and has as much memory, and the GPU has room for one of the two.

    alone                     the server is guaranteed all of its memory, and has no neighbour
    neighbour idle            between two requests the neighbour works once and is idle again
    neighbour works           the neighbour works all the time
"""

from __future__ import annotations

import random
import time

from bench.memory_swap.figures import Figure
from bench.memory_swap.session import Session
from bench.memory_swap.swap_node import Job

GOAL_S = 0.6
"""Above what a request takes alone, at p99."""
MODEL_BYTES = 16_000_000_000
REQUESTS, MEAN_GAP_S, LEAST_GAP_S = 15, 2.0, 0.5
NEEDS_S = 2.7 * REQUESTS * (MEAN_GAP_S + LEAST_GAP_S) + 9 * REQUESTS + 40
"""One measurement: two series of requests, and the neighbour's work goes on for half of one; in the third the neighbour waits 9 s until the server has been
idle for a quantum (measured, H200)."""
FAKE_REQUESTS, FAKE_MEAN_GAP_S, FAKE_LEAST_GAP_S = 4, 0.2, 0.05
SEEN_AWAY_S = 0.05
"""A request that takes so much longer than the slowest alone had to wait for memory. Guessed."""


def run(session: Session) -> None:
    """One measurement for each repeat: alone, and with both neighbours."""
    for repeat in range(session.repeat):
        with session.measuring("server", "16 GB", repeat, NEEDS_S) as wanted:
            if wanted:
                _measure(session, repeat)


def _measure(session: Session, repeat: int) -> None:
    node, total_bytes = session.node, session.scaled(MODEL_BYTES)
    server = node.alone(total_bytes)
    server.request("make", "segments", total_bytes)
    alone = _requests(session, server, None, repeat)
    server.end()
    session.add(_figures("alone", alone), complete=False)
    node.need_swapping()
    with node.ballast(node.room_for_one_mib(total_bytes)):
        server = node.job(total_bytes, service_class="latency-critical")
        neighbour = node.job(total_bytes, service_class="best-effort")
        for job in (server, neighbour):
            job.request("make", "segments", total_bytes)
        idle = _requests(session, server, neighbour, repeat)
        session.add(_figures("neighbour idle", idle, alone), complete=False)
        count, gap_s, least_s = _pace(session)
        neighbour.send("steps", 0, count * (gap_s + least_s) * 1.5)
        busy = _requests(session, server, None, repeat)
        steps = neighbour.receive()["steps"]
        wrong = sum(job.request("check")["wrong_bytes"] for job in (server, neighbour))
        more = {"neighbour's steps": Figure(steps), "wrong bytes": Figure(wrong)}
        session.add(_figures("neighbour works", busy, alone) | more)
        for job in (server, neighbour):
            job.end()


def _pace(session: Session) -> tuple[int, float, float]:
    """Requests, the mean gap and the least."""
    return (FAKE_REQUESTS, FAKE_MEAN_GAP_S, FAKE_LEAST_GAP_S) if session.fake else (REQUESTS, MEAN_GAP_S, LEAST_GAP_S)


def _requests(session: Session, server: Job, between: Job | None, seed: int) -> list[float]:
    """Latencies in seconds, each from the time that the request came. `between` works once before each."""
    draw, took = random.Random(seed), []
    count, mean_gap_s, least_gap_s = _pace(session)
    for _ in range(count):
        if between is not None:
            between.request("steps", 1)
        took.append(
            server.request("request", time.monotonic() + least_gap_s + draw.expovariate(1 / mean_gap_s))["latency_s"]
        )
    return took


def _figures(name: str, took: list[float], alone: list[float] | None = None) -> dict[str, Figure]:
    ordered = sorted(took)

    def part(of: float) -> float:
        return ordered[min(len(ordered) - 1, int(of * len(ordered)))]

    found = {f"{name}: p50": Figure(part(0.5), "s"), f"{name}: p99": Figure(part(0.99), "s", f"of {len(took)}")}
    if alone is not None:
        over_s = part(0.99) - sorted(alone)[min(len(alone) - 1, int(0.99 * len(alone)))]
        away = sum(one > max(alone) + SEEN_AWAY_S for one in took)
        found[f"{name}: p99 above alone"] = Figure(over_s, "s", f"goal <= {GOAL_S}")
        found[f"{name}: requests that waited"] = Figure(away, "", f"of {len(took)}")
    return found
