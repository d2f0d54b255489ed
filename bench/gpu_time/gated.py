"""Launch gating where the driver does not suspend: the part of the GPU's time that a core limit leaves a container.

The arbiter is given a verdict that denies suspends on this driver. The part is the steps that ended with the limit, of those without it in the
same repeat: a step is one kernel, and no other program is on the GPU.
"""

from __future__ import annotations

import time
from typing import Final

from bench.gpu_time.latency import free_lc_rate
from bench.gpu_time.node import Node, rate, request
from bench.gpu_time.results import Results
from vgpu.gputime.trial_verdict import ModelVerdict, TrialOutcome, TrialVerdict

KERNELS_US: Final = (100, 1000, 5000, 20_000, 100_000)
LIMITS: Final = (20, 30, 50, 80)
REPEATS: Final = 2
SETTLE_S: Final = 1.0
LEAST_S: Final = 3.0
ONE: Final = "one"


def run(node: Node, results: Results, seconds: float) -> None:
    """Rows of the part `gated`: percent had, and points beside what was asked. The verdict is taken back afterwards, for the other parts."""
    end = time.monotonic() + seconds
    node.machine.has_tried(
        ModelVerdict("this", (node.machine.uuid,), TrialVerdict(TrialOutcome.HUNG, "set for a measurement"))
    )
    try:
        _measure(node, results, end)
    finally:
        node.machine.has_tried()


def _measure(node: Node, results: Results, end: float) -> None:
    node.start_arbiter()
    node.grant(ONE)
    plain = node.load()
    per_us = free_lc_rate(plain)
    plain.end()
    program = node.load(ONE)
    windows = REPEATS * len(KERNELS_US) * (1 + len(LIMITS))
    for repeat in range(REPEATS):
        for us in KERNELS_US:
            free = 0.0
            for limit in (0, *LIMITS):
                node.grant(ONE, core=limit)
                request(program, "start", us, per_us)
                time.sleep(SETTLE_S)
                before = request(program, "count")
                time.sleep(max(LEAST_S, (end - time.monotonic()) / windows - SETTLE_S))
                windows -= 1
                steps = rate(before, request(program, "count"))
                request(program, "stop")
                if not limit:
                    free = steps
                    continue
                had = 100 * steps / free
                case = f"{us / 1000:g} ms kernels, {limit} %"
                gpu_time = node.gpu_times()[ONE]
                results.add("gated", case, "had", "%", repeat, had, gpu_time.mode)
                results.add("gated", case, "beside what was asked", "points", repeat, had - limit)
    results.sum_up("gated")
