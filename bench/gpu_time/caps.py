"""Core limits: the part of the GPU's time that was asked, what the arbiter gave, and what came out of it.

GPU time is taken between two suspends of the container, so that whole rounds are counted; throughput from the end of one step to the
end of another, as that of the same process without a limit in the same repeat.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from bench.gpu_time.latency import free_lc_rate
from bench.gpu_time.node import Node, rate
from bench.gpu_time.results import Results
from tests.gpu.kit.machine import Lines
from vgpu.protocol.status import GpuTimeStatus

REQUESTED = (10, 30, 50, 70)
WHOLE = 100
"""A limit that is none: no container is suspended."""
PAIR = (30, 60)
REPEATS = 5
LEAST_S = 1.0
SETTLE_S, PAIR_SETTLES_S = 0.2, 2.0
"""Until credit saved up in idleness is spent: three frames of it last long where nearly all of the GPU is requested."""
ONE, OTHER = "one", "other"
Programs = Mapping[str, list[Lines]]
"""Of each container."""


@dataclass(frozen=True)
class Load:
    name: str
    words: tuple[object, ...]
    torch: bool = False
    requested: tuple[int, ...] = REQUESTED
    pair: bool = True
    processes: int = 1
    """Of the container, that do the same at once."""


@dataclass(frozen=True)
class Mark:
    """How far a container was, just after it was suspended."""

    gpu_time: GpuTimeStatus
    counts: list[dict[str, float]]
    """load.c's answer, of each of its processes."""


def loads(per_us: int) -> tuple[Load, ...]:
    return (
        Load("1 ms kernels", (1000, per_us), requested=(*REQUESTED, WHOLE)),
        Load("60 ms kernels", (60_000, per_us), requested=(30,), pair=False),
        Load("cooperative kernels of 1 ms", (1000, per_us, 1), requested=(30,), pair=False),
        Load("1 ms kernels of two processes", (1000, per_us), requested=(30,), pair=False, processes=2),
        Load("8192^3 bf16 matmul", ("matmul",), torch=True, requested=(*REQUESTED, WHOLE)),
        Load("8192^3 bf16 matmul, waited for", ("waited",), torch=True, requested=(30,)),
        Load("graph of 20 matmuls", ("graph",), torch=True),
        Load("small operations", ("small",), torch=True),
    )


def run(node: Node, results: Results, seconds: float) -> None:
    end = time.monotonic() + seconds
    node.start_arbiter()
    for key in (ONE, OTHER):
        node.grant(key)
    plain = node.load()
    own, torch = loads(free_lc_rate(plain)), (node.machine.fake is False)
    programs = {ONE: [node.load(ONE), node.load(ONE)], OTHER: [node.load(OTHER)]}
    plain.end()
    done_s = time.monotonic()
    own_end = done_s + (end - done_s) * 0.4 if torch else end
    _rounds(node, results, [load for load in own if not load.torch], programs, own_end)
    if not torch:
        results.not_run("caps", "PyTorch", "the fake driver computes nothing")
    else:
        for program in (*programs[ONE], *programs[OTHER]):
            program.end()
        try:
            programs = {key: [node.torch(key)] for key in (ONE, OTHER)}
        except RuntimeError as error:
            results.not_run("caps", "PyTorch", error)
        else:
            _rounds(node, results, [load for load in own if load.torch], programs, end)
    results.sum_up("caps")


def _rounds(node: Node, results: Results, chosen: list[Load], programs: Programs, end: float) -> None:
    windows = REPEATS * sum(1 + len(load.requested) + load.pair for load in chosen)
    for repeat in range(REPEATS):
        for load in chosen:
            for limits in ((0,), *((requested,) for requested in load.requested), *((PAIR,) if load.pair else ())):
                left_s = end - time.monotonic() - PAIR_SETTLES_S * load.pair * (REPEATS - repeat)
                window_s = max(LEAST_S, left_s / windows - 0.35)
                windows -= 1
                _window(node, results, load, limits, programs, repeat, window_s)


_solo: dict[str, float] = {}
"""Steps in a second without a limit, of the latest repeat."""


def _window(
    node: Node, results: Results, load: Load, limits: tuple[int, ...], programs: Programs, repeat: int, seconds: float
) -> None:
    keys = (ONE, OTHER)[: len(limits)]
    chosen = {key: programs[key][: load.processes] for key in keys}
    for key, requested in zip(keys, limits, strict=True):
        node.grant(key, core=requested)
        _request_all(chosen[key], "start", *load.words)
    time.sleep(_settles_s(limits))
    first = _marks(node, chosen)
    time.sleep(seconds / 2)
    clock = node.smi("clocks.sm", "power.draw")
    time.sleep(seconds / 2)
    last = _marks(node, chosen)
    _request_all([program for key in keys for program in chosen[key]], "stop")
    note = f"{clock[0]} MHz, {clock[1]} W in mid-window" if clock else ""
    for key, requested in zip(keys, limits, strict=True):
        case = f"{load.name}, " + ("no limit" if not requested else f"{requested} %")
        case += f" beside {sum(limits) - requested} %" if len(limits) > 1 else ""
        _write(results, load, case, requested, (first[key], last[key]), repeat, note)


def _settles_s(limits: tuple[int, ...]) -> float:
    return PAIR_SETTLES_S if len(limits) > 1 else SETTLE_S


def _write(
    results: Results, load: Load, case: str, requested: int, marks: tuple[Mark, Mark], repeat: int, note: str
) -> None:
    before, after = marks
    passed_s = after.counts[0]["at_s"] - before.counts[0]["at_s"]
    throughput = sum(rate(*counts) for counts in zip(before.counts, after.counts, strict=True))
    if not requested:
        _solo[load.name] = throughput
        results.add("caps", case, "throughput", "1/s", repeat, throughput, note)
        return
    on_s = after.gpu_time.on_s - before.gpu_time.on_s
    worked_s = on_s + sum(
        getattr(after.gpu_time, name) - getattr(before.gpu_time, name) for name in ("off_s", "capped_s")
    )
    suspends = after.gpu_time.suspends - before.gpu_time.suspends
    results.add(
        "caps", case, "GPU time", "%", repeat, 100 * on_s / worked_s, f"{suspends} suspends in {worked_s:.2f} s"
    )
    results.add("caps", case, "GPU time by the wall", "%", repeat, 100 * on_s / passed_s)
    results.add("caps", case, "throughput of no limit", "%", repeat, 100 * throughput / _solo[load.name], note)


def _request_all(programs: list[Lines], *words: object) -> list[dict[str, float]]:
    for program in programs:
        program.send(*words)
    return [program.receive() for program in programs]


def _marks(node: Node, programs: Programs) -> dict[str, Mark]:
    """Each container just after its next suspend; as it is where none comes."""
    seen: dict[str, Mark] = {}
    before, end = node.gpu_times(), time.monotonic() + 1.0
    limited = any(0 < before[key].requested_percent < WHOLE for key in programs)
    while len(seen) < len(programs):
        now = node.gpu_times()
        for key in programs:
            if key not in seen and (now[key].suspends != before[key].suspends or not limited or time.monotonic() > end):
                seen[key] = Mark(now[key], _request_all(programs[key], "count"))
        time.sleep(0.003)
    return seen
