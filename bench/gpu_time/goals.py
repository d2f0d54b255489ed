"""What was to be reached, beside what gpu-time.csv says: the first table of docs/gpu-time.md. table.py writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

Of = dict[str, dict[str, float]]
"""Case -> figure -> value, of all repeats together."""

FOUND, ANNOUNCED = "found by the library", "announced 1.5 ms ahead"
LATENCY = {
    FOUND: (3.3, 4.2),
    f"{FOUND}, as an arbiter that spins should": (3.0, 3.2),
    "announced 1.0 ms ahead": (1.35, 1.4),
    ANNOUNCED: (1.03, 1.25),
}
"""Way -> of alone, p50 and p99, beside kernels of 60 ms. The arbiter does not spin."""
MODELS = {FOUND: (1.35, 1.5), ANNOUNCED: (1.1, 1.25)}
WORSE = ("time slicing", "MPS")
LIMIT_POINTS, WORK_POINTS = 0.5, 2.0
AT_POWER_CAP = ("matmul",)
"""Loads whose clock is lower without a limit than with one: what they get done is not in proportion to their time."""
IDLE_PERCENT, WAKE_US = 2.0, (50.0, 150.0)


class Line(NamedTuple):
    """Of the table."""

    what: str
    goal: str
    seen: str
    met: bool


def lines(of_part: dict[str, Of]) -> Iterator[Line]:
    """Of the parts that were measured. `of_part`: part -> its figures."""
    lc = of_part.get("lc", {})
    for way, most in LATENCY.items() if lc else ():
        yield _times(f"5 launches beside kernels of 60 ms, {way}", lc[way.partition(", as")[0]], lc["alone"], most)
    models = of_part.get("models", {})
    names = dict.fromkeys(case.partition(": ")[0] for case in models)
    pairs = [pair for pair in names if "p50" in models.get(f"{pair}: {FOUND}", {})]
    for pair in pairs:
        for way, most in MODELS.items():
            yield _times(f"{pair}, {way}", models[f"{pair}: {way}"], models[f"{pair}: alone"], most)
    if pairs:
        yield _better(models, pairs)
    caps = {case: of for case, of in of_part.get("caps", {}).items() if "GPU time" in of}
    if caps:
        by_the_wall = {case: {"time": of.get("GPU time by the wall", of["GPU time"])} for case, of in caps.items()}
        yield _furthest("GPU time at core limits", by_the_wall, "time", LIMIT_POINTS)
        apart = {case: of for case, of in caps.items() if not any(load in case for load in AT_POWER_CAP)}
        yield _furthest(
            "throughput at core limits, away from the power cap", apart, "throughput of no limit", WORK_POINTS
        )
    wakes = of_part.get("wakes", {}).get("50 containers: wake-up to suspend")
    if wakes:
        seen = wakes["p50"], wakes["p99"]
        met = all(one <= most for one, most in zip(seen, WAKE_US, strict=True))
        goal = " / ".join(f"{one:.0f}" for one in WAKE_US)
        yield Line(
            "from the arbiter's wake-up to the suspend, 50 containers, us", goal, f"{seen[0]:.0f} / {seen[1]:.0f}", met
        )
    idle = of_part.get("wakes", {}).get("50 containers", {}).get("processor while nothing happens")
    if idle is not None:
        yield Line(
            "the arbiter while nothing happens, % of a core", f"{IDLE_PERCENT:g}", f"{idle:.1f}", idle <= IDLE_PERCENT
        )


def _times(what: str, of: dict[str, float], alone: dict[str, float], most: tuple[float, float]) -> Line:
    seen = [of[name] / alone[name] for name in ("p50", "p99")]
    met = all(round(one, 2) <= top for one, top in zip(seen, most, strict=True))
    return Line(f"{what}, times alone", "{:g} / {:g}".format(*most), "{:.2f} / {:.2f}".format(*seen), met)


def _better(models: Of, pairs: list[str]) -> Line:
    won = [
        all(
            models[f"{pair}: {way}"][name] < models[f"{pair}: {other}"][name]
            for other in WORSE
            for name in ("p50", "p99")
        )
        for pair in pairs
        for way in MODELS
    ]
    what = "decode, in each pair found and announced: better than time slicing and than MPS without a cap, p50 and p99"
    return Line(what, f"{len(won)} of {len(won)}", f"{sum(won)}", all(won))


def _furthest(what: str, caps: Of, figure: str, points: float) -> Line:
    off = max(abs(of[figure] - _asked(case)) for case, of in caps.items())
    return Line(f"{what}, most points off what was asked", f"{points:g}", f"{off:.1f}", round(off, 1) <= points)


def _asked(case: str) -> float:
    found = re.search(r", (\d+) %", case)
    assert found is not None, case
    return float(found[1])
