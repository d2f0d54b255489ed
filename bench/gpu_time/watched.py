"""The arbiter, with a clock at each of its switches: python3 watched.py FILE [twice]

What it saw is in FILE when it ends: `suspend,562.1` is one call and its microseconds. With `twice` each resume is issued again
at once, as `enabled`: what it costs to enable channels that are enabled. Settings come from the environment, as for the arbiter.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from arbiter.__main__ import main
from arbiter.seat import Seat


def timed(what: str, plain: Callable[..., int], seen: list[tuple[str, float]]) -> Callable[..., int]:
    def call(seat: Seat, **how: bool) -> int:
        began = time.perf_counter_ns()
        status = plain(seat, **how)
        seen.append((what, (time.perf_counter_ns() - began) / 1000))
        return status

    return call


def watch(file: Path, twice: bool) -> None:
    seen: list[tuple[str, float]] = []
    suspend, resume = timed("suspend", Seat.suspend, seen), timed("resume", Seat.resume, seen)
    again = timed("enabled", Seat.resume, seen)

    def resume_twice(seat: Seat) -> int:
        return resume(seat) or again(seat)

    Seat.suspend = suspend  # type: ignore[method-assign, assignment]
    Seat.resume = resume_twice if twice else resume  # type: ignore[method-assign, assignment]
    try:
        main([])
    finally:
        file.write_text("".join(f"{what},{us:.1f}\n" for what, us in seen))


if __name__ == "__main__":
    watch(Path(sys.argv[1]), "twice" in sys.argv[2:])
