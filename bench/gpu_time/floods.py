"""Requests for GPU time while others flood the arbiter with requests for memory: what a connection of its own for GPU time saves them.

Two processes of one container take the same memory from each other with eight threads each. Beside them a latency-critical container finds the
GPU busy with a best-effort one, as in latency.py, and a fourth container's allocations show how long a request for memory waits. A request for GPU
time that shared the connection, and so the arbiter's thread, of those would wait as long.
"""

from __future__ import annotations

import subprocess
import time
from typing import Final

from bench.gpu_time.latency import KERNEL_US, LAUNCHES, LONG_US, PERIOD_US, UNDER_WAY_S, free_lc_rate
from bench.gpu_time.node import HERE, Node, request
from bench.gpu_time.results import Requests, Results
from tests.gpu.kit.machine import Lines

REPEATS: Final = 3
THREADS, PIECE_MIB, ROOM_MIB, CONTEXT_MIB = 8, 64, 640, 600
REQUESTS, REQUEST_MIB = 60, 320


def run(node: Node, results: Results, seconds: float) -> None:
    """Rows of the part `floods`."""
    end = time.monotonic() + seconds
    program = node.machine.folder / "flood"
    subprocess.run(["gcc", "-std=c11", "-O2", "-D_GNU_SOURCE", "-pthread", "-o", program, HERE / "flood.c", "-ldl"], check=True)  # fmt: skip
    node.start_arbiter()
    node.grant_pair()
    node.grant("allocating")
    plain = node.load()
    per_us = free_lc_rate(plain)
    plain.end()
    lc, be = node.load("lc"), node.load("be")
    allocating = _program(node, str(program), "allocating")
    requests, waits = Requests(results, "floods", "us"), Requests(results, "floods", "us")
    for repeat in range(REPEATS):
        for flooded in (False, True):
            left = 2 * (REPEATS - repeat) - flooded
            window_s = max(0.5, (end - time.monotonic()) / left - UNDER_WAY_S - 1)
            flood = _flood(node, str(program)) if flooded else []
            request(be, "start", LONG_US, per_us)
            time.sleep(UNDER_WAY_S)
            beside = "flooded" if flooded else "quiet"
            took = request(lc, "lc", max(10, int(window_s * 1e6 / PERIOD_US)), PERIOD_US, LAUNCHES, KERNEL_US, per_us, 0)["us"]  # fmt: skip
            requests.add(f"request for GPU time, {beside}", repeat, took, alone="request for GPU time, quiet")
            took = request(allocating, "requests", REQUESTS, REQUEST_MIB)["us"]
            waits.add(f"request for memory, {beside}", repeat, took, alone="request for memory, quiet")
            request(be, "stop")
            for one in flood:
                one.kill()
    requests.over_all()
    waits.over_all()


def _program(node: Node, program: str, key: str) -> Lines:
    lines = node.machine.lines([program], key)
    lines.receive(30)
    return lines


def _flood(node: Node, program: str) -> list[Lines]:
    """Room for the contexts of two processes, and for some of what both want."""
    key = node.machine.grant(ROOM_MIB + 2 * CONTEXT_MIB)
    processes = [_program(node, program, key) for _ in range(2)]
    for one in processes:
        request(one, "flood", THREADS, PIECE_MIB)
    return processes
