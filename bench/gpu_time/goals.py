"""The goals, beside the figures of gpu-time.csv: the first table of README.md. table.py writes it.

Every goal has its row. One whose figures were not measured, or are no numbers, is not met.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Figures = dict[str, dict[str, float]]
"""Of a part: case -> figure -> value, of all repeats together."""
QUANTILES = ("p50", "p99")

FOUND, ANNOUNCED_1_MS, ANNOUNCED = "found by the library", "announced 1.0 ms ahead", "announced 1.5 ms ahead"
LATENCY = (
    (FOUND, FOUND, (3.3, 4.2)),
    (f"{FOUND}, as an arbiter that spins should", FOUND, (3.0, 3.2)),
    (ANNOUNCED_1_MS, ANNOUNCED_1_MS, (1.35, 1.4)),
    (ANNOUNCED, ANNOUNCED, (1.03, 1.25)),
)
"""The label, the case, and its goals: of alone, p50 and p99, beside kernels of 60 ms. The arbiter does not spin."""
MODELS = {FOUND: (1.35, 1.5), ANNOUNCED: (1.1, 1.25)}
"""Way -> of alone, p50 and p99, in each pair."""
WORSE = ("time slicing", "MPS")
LIMIT_POINTS, WORK_POINTS = 0.5, 2.0
LOADS = (
    "1 ms kernels",
    "60 ms kernels",
    "cooperative kernels of 1 ms",
    "1 ms kernels of two processes",
    "small operations",
)
"""Of core limits, away from the GPU's power cap."""
WAITED = "8192^3 bf16 matmul, waited for"
AT_POWER_CAP = ("8192^3 bf16 matmul", WAITED, "graph of 20 matmuls")
"""Loads whose clock is lower without a limit than with one: what they get done is not in proportion to their time."""
TIME, BY_THE_WALL, THROUGHPUT = "GPU time", "GPU time by the wall", "throughput of no limit"
WAKE_US, IDLE_PERCENT = (50.0, 150.0), 2.0
NOT_MEASURED = "not measured"


class Line(NamedTuple):
    """Of the table."""

    what: str
    goal: str
    seen: str
    met: bool
    """So is a row without a goal."""


def lines(of_part: dict[str, Figures]) -> Iterator[Line]:
    """A row for each goal. `of_part`: part -> its figures."""
    lc, models, caps, wakes = (of_part.get(part, {}) for part in ("lc", "models", "caps", "wakes"))
    for label, case, most in LATENCY:
        yield _line(f"5 launches beside kernels of 60 ms, {label}, times alone", most, _times(lc, case, "alone"))
    pairs = list(dict.fromkeys(case.partition(": ")[0] for case in models)) or ["decode"]
    for pair in pairs:
        for way, most in MODELS.items():
            yield _line(f"{pair}, {way}, times alone", most, _times(models, f"{pair}: {way}", f"{pair}: alone"))
    yield _better(models, pairs)
    yield from _limits(caps)
    late = [_figure(wakes, "50 containers: wake-up to suspend", name) for name in QUANTILES]
    yield _line("from the arbiter's wake-up to the suspend, 50 containers, us", WAKE_US, late, digits=1)
    idle = _figure(wakes, "50 containers", "processor while nothing happens")
    yield _line("the arbiter while nothing happens, % of a core", [IDLE_PERCENT], [idle], digits=1)


def _limits(caps: Figures) -> Iterator[Line]:
    loads = list(dict.fromkeys((*LOADS, *AT_POWER_CAP, *(_requested(case)[0] for case in caps if _is_limit(case)))))
    away = [load for load in loads if load not in AT_POWER_CAP]
    what = "GPU time at core limits, by the wall, most points off what was asked"
    yield _line(what, [LIMIT_POINTS], [_furthest(caps, loads, BY_THE_WALL)])
    what = "the same, of products that are waited for one by one, of the time in which they have work"
    yield _line(what, [LIMIT_POINTS], [_furthest(caps, [WAITED], TIME)])
    what = "throughput at core limits, away from the GPU's power cap, most points off what was asked"
    what += f" (left out: {'; '.join(AT_POWER_CAP)})"
    yield _line(what, [WORK_POINTS], [_furthest(caps, away, THROUGHPUT)])
    yield _line("the same, of those left out", [], [_furthest(caps, AT_POWER_CAP, THROUGHPUT)])


def _furthest(caps: Figures, loads: Sequence[str], name: str) -> float:
    """Of these loads, in points off what was asked. NaN where a load was not run, or a case of it has no such figure."""
    off: dict[str, list[float]] = {load: [] for load in loads}
    for case in filter(_is_limit, caps):
        load, requested = _requested(case)
        if load in off:
            off[load].append(abs(_figure(caps, case, name) - requested))
    if any(not points or any(map(math.isnan, points)) for points in off.values()):
        return math.nan
    return max(max(points) for points in off.values())


def _is_limit(case: str) -> bool:
    return not case.endswith(", no limit")


def _requested(case: str) -> tuple[str, float]:
    """Of which load, how many percent."""
    found = re.fullmatch(r"(.+), (\d+) %( beside \d+ %)?", case)
    assert found is not None, case
    return found[1], float(found[2])


def _times(part: Figures, case: str, alone: str) -> list[float]:
    """p50 and p99, of those alone."""
    both = [(_figure(part, case, name), _figure(part, alone, name)) for name in QUANTILES]
    return [one / other if other else math.nan for one, other in both]


def _better(models: Figures, pairs: list[str]) -> Line:
    ours = [(pair, way) for pair in pairs for way in MODELS]
    leads = [
        [
            _figure(models, f"{pair}: {other}", name) - _figure(models, f"{pair}: {way}", name)
            for other in WORSE
            for name in QUANTILES
        ]
        for pair, way in ours
    ]
    won = sum(all(one > 0 for one in each) for each in leads)
    measured = not any(math.isnan(one) for each in leads for one in each)
    what = "decode, in each pair found and announced: better than time slicing and than MPS without a cap, p50 and p99"
    goal = f"{len(ours)} of {len(ours)}"
    return Line(what, goal, f"{won}" if measured else NOT_MEASURED, won == len(ours))


def _figure(part: Figures, case: str, name: str) -> float:
    """NaN where it is missing, or no number."""
    value = part.get(case, {}).get(name, math.nan)
    return value if math.isfinite(value) else math.nan


def _line(what: str, most: Sequence[float], seen: Sequence[float], digits: int = 2) -> Line:
    """Judged by what was seen, not by what is shown of it."""
    goal = " / ".join(f"{one:g}" for one in most) or "-"
    if any(map(math.isnan, seen)):
        return Line(what, goal, NOT_MEASURED, met=not most)
    met = not most or all(one <= top for one, top in zip(seen, most, strict=True))
    return Line(what, goal, " / ".join(f"{one:.{digits}f}" for one in seen), met)
