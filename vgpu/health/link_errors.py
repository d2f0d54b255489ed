"""Errors that NVLinks count: replays, recoveries, CRC errors. A link repairs all of them by itself; many in a short time make it slow. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WITHIN_S: Final = 60.0
"""Errors are counted from one reading to the last one within so long; then from there. Guessed."""
TOO_MANY: Final = (6_000, 2, 6_000)
"""Replays, recoveries, CRC errors of all links of a GPU. Guessed: 100 a second of what costs a packet, and more than one break of a link."""
NAMES: Final = ("replays", "recoveries", "CRC errors")

Counts = tuple[int | None, int | None, int | None]
"""Replays, recoveries, CRC errors since the driver was loaded, over all links of a GPU; None = not reported."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The reading from which errors are counted."""

    counts: Counts
    at_s: float


def beginning(before: Beginning | None, now: Counts, at_s: float) -> Beginning:
    """From which errors count as of now. A counter that went back was reset, with the GPU or the driver."""
    if before is None or at_s - before.at_s > WITHIN_S or at_s < before.at_s or _went_back(before.counts, now):
        return Beginning(now, at_s)
    return before


def grown(since: Beginning, now: Counts) -> str:
    """Which of them are too many, in words; empty: none."""
    more = [
        (last - first, name, most)
        for first, last, name, most in zip(since.counts, now, NAMES, TOO_MANY, strict=True)
        if first is not None and last is not None
    ]
    found = [f"{count} {name}" for count, name, most in more if count >= most]
    return f"NVLinks counted {' and '.join(found)} within {WITHIN_S:g} s" if found else ""


def all_errors(now: Counts) -> int | None:
    """Together; None = none of them is reported."""
    known = [one for one in now if one is not None]
    return sum(known) if known else None


def _went_back(before: Counts, now: Counts) -> bool:
    pairs = list(zip(before, now, strict=True))
    return any((a is None) != (b is None) or (a is not None and b is not None and b < a) for a, b in pairs)
