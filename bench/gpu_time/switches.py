"""What a suspend does to results, how long it takes, and NVML's figures for a GPU whose work is suspended."""

from __future__ import annotations

import threading
import time

from bench.gpu_time.latency import KERNEL_US, LAUNCHES, PERIOD_US, free_lc_rate
from bench.gpu_time.node import Node, by_kind, quantile, request
from bench.gpu_time.results import QUANTILES, Results
from tests.gpu.kit.machine import Lines

SUM_KERNEL_US = 100_000
CARRIED_MIB = 64
FRAME_MS = 20
LOOKS = 3


def _containers(node: Node, *words: str, **settings: str) -> tuple[Lines, Lines, int]:
    """A latency-critical container, a best-effort one, and the steps of the kernel in a microsecond."""
    node.start_arbiter(*words, **settings)
    node.grant_pair()
    plain = node.load()
    per_us = free_lc_rate(plain)
    plain.end()
    return node.load("lc"), node.load("be"), per_us


def sums(node: Node, results: Results, seconds: float) -> None:
    """Kernels that sum, beside requests that each suspend them; and copies, which are suspended with them then."""
    window_s = max(2.0, seconds / 2 - 4)
    if node.machine.fake:
        results.not_run("sums", "results after suspends", "the fake driver computes nothing")
    else:
        lc, be, per_us = _containers(node)
        seen, note = _disturbed(node, lc, be, per_us, window_s, "check", window_s, SUM_KERNEL_US, per_us)
        results.add("sums", "results after suspends", "kernels checked", "", 0, seen["kernels"], note)
        results.add("sums", "results after suspends", "kernels with a wrong sum", "", 0, seen["wrong"], note)
        node.machine.end_containers()
    lc, be, per_us = _containers(node, suspend_copies="true")
    seen, note = _disturbed(node, lc, be, per_us, window_s, "carry", window_s, CARRIED_MIB)
    results.add("sums", "copies after suspends", "rounds checked", "", 0, seen["rounds"], note)
    results.add("sums", "copies after suspends", "rounds that came back wrong", "", 0, seen["wrong"], note)


def _disturbed(
    node: Node, lc: Lines, be: Lines, per_us: int, seconds: float, *words: object
) -> tuple[dict[str, float], str]:
    """What a best-effort program answers to these words, beside requests; and how often it was suspended meanwhile."""
    before = node.gpu_times()["be"].suspends
    be.send(*words)
    request(lc, "lc", int(seconds * 1e6 / PERIOD_US), PERIOD_US, LAUNCHES, KERNEL_US, per_us, 0)
    return be.receive(), f"{node.gpu_times()['be'].suspends - before} suspends"


def run(node: Node, results: Results, seconds: float) -> None:
    """Half of the time each."""
    _, be, per_us = _containers(node, "twice", frame_ms=str(FRAME_MS))
    node.grant("be", "best-effort", 50)
    be.send("start", 1000, per_us)
    be.receive()
    time.sleep(max(1.0, seconds / 2 - 3))
    node.grant("be", "best-effort")
    _standing(node, results, be)
    results.over_all(
        "switches", "the arbiter", "effective capabilities", "mask", node.arbiters_capabilities, "32 = KILL alone"
    )
    be.send("stop")
    be.receive()
    for what, times in by_kind(node.stop_arbiter()).items():
        for name, part in QUANTILES:
            results.over_all("switches", what, name, "us", quantile(times, part), f"{len(times)} calls")


def _standing(node: Node, results: Results, be: Lines) -> None:
    """NVML's figures while the best-effort container runs, and while an announced section keeps it off and nothing runs."""
    lc = next(line for line in node.machine._running if line.key == "lc")
    fields = ("utilization.gpu", "clocks.sm", "power.draw")
    units = ("%", "MHz", "W")
    for case in ("running", "suspended"):
        ended = threading.Event()
        keeper = threading.Thread(target=_keep_off, args=(lc, ended)) if case == "suspended" else None
        if keeper:
            keeper.start()
        time.sleep(1.5)
        be.send("count")
        before = be.receive()["done"]
        for look in range(LOOKS):
            seen = node.smi(*fields)
            if seen is None:
                results.not_run("switches", f"NVML while {case}", "no nvidia-smi query here")
                break
            for field, unit, value in zip(fields, units, seen, strict=True):
                results.add("switches", f"NVML while {case}", field, unit, look, float(value))
            time.sleep(0.2)
        be.send("count")
        note = "0 = nothing ran; a slice against starvation is 20 ms a second"
        results.add("switches", f"NVML while {case}", "kernels done", "", 0, be.receive()["done"] - before, note)
        ended.set()
        if keeper:
            keeper.join()


def _keep_off(lc: Lines, ended: threading.Event) -> None:
    """A section lasts a second at most: begun anew before."""
    while True:
        lc.send("section")
        lc.receive()
        if ended.wait(0.5):
            lc.send("end")
            lc.receive()
            return
