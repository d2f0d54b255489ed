"""Could work be promised instead of time? An experiment, not the product: a container's core limit is moved so that the steps it does are the part
that was asked of what it does alone.

Where a GPU's power cap acts, 30 % of its time does more than 30 % of the work: the clock is higher after idle time. Here a loop outside the arbiter
counts the steps that ended, compares them with a calibration (the same program without a limit, in the same repeat), and writes the limit
anew twice a second. `GAIN` was chosen with matrix products of one kind; the other loads are what it was not tuned on.
"""

from __future__ import annotations

import time

from bench.gpu_time.caps import ONE, Load, loads
from bench.gpu_time.latency import free_lc_rate
from bench.gpu_time.node import Node, rate, request
from bench.gpu_time.results import Results
from tests.gpu.kit.machine import Lines

REQUESTED = 30
"""Percent of what the program does alone."""
REPEATS = 3
GAIN = 0.5
"""Part of the error that is mended in each round."""
ROUND_S = 0.5
SETTLING_ROUNDS = 4


def run(node: Node, results: Results, seconds: float) -> None:
    end = time.monotonic() + seconds
    node.start_arbiter()
    node.grant(ONE)
    plain = node.load()
    own = [load for load in loads(free_lc_rate(plain)) if load.processes == 1]
    chosen = [load for load in own if load.torch is not node.machine.fake]
    plain.end()
    program = node.load(ONE) if node.machine.fake else node.torch(ONE)
    windows = REPEATS * len(chosen)
    for repeat in range(REPEATS):
        for load in chosen:
            window_s = max(1.0, (end - time.monotonic()) / windows - 2 - ROUND_S * SETTLING_ROUNDS)
            windows -= 1
            _held(node, results, load, program, repeat, window_s)
    results.sum_up("work")


def _held(node: Node, results: Results, load: Load, program: Lines, repeat: int, seconds: float) -> None:
    """Calibrates, settles, measures."""
    node.grant(ONE)
    request(program, "start", *load.words)
    time.sleep(0.2)
    before = request(program, "count")
    time.sleep(1.0)
    solo = rate(before, request(program, "count"))
    limit, owed = float(REQUESTED), 0.0
    last = began = request(program, "count")
    began_on_s = node.gpu_times()[ONE].on_s
    for number in range(SETTLING_ROUNDS + max(2, round(seconds / ROUND_S))):
        whole = min(99, max(1, round(limit + owed)))
        owed += limit - whole  # limits are whole percents: what one round has too much the next has too little
        node.grant(ONE, core=whole)
        if number == SETTLING_ROUNDS:
            began, began_on_s = request(program, "count"), node.gpu_times()[ONE].on_s
        time.sleep(ROUND_S)
        now = request(program, "count")
        limit += GAIN * (REQUESTED - 100 * rate(last, now) / solo)
        last = now
    passed_s = last["at_s"] - began["at_s"]
    on_s = node.gpu_times()[ONE].on_s - began_on_s
    clock = node.smi("clocks.sm")
    request(program, "stop")
    note = f"limit {limit:.1f} % in the end" + (f", {clock[0]} MHz" if clock else "")
    case = f"{load.name}, {REQUESTED} % of the work"
    results.add("work", case, "throughput of no limit", "%", repeat, 100 * rate(began, last) / solo, note)
    results.add("work", case, "GPU time by the wall", "%", repeat, 100 * on_s / passed_s)
