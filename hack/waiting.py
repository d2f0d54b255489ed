"""Wait for what no event can be awaited for: check again until it is there, or report what was seen last."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class NotSoon(AssertionError):
    """Something that should have happened did not, within the time allowed."""


def eventually(condition: Callable[[], T | None], what: str, *, timeout_s: float = 60, every_s: float = 0.25) -> T:
    """Check until the answer is truthy, and return it. For what `kubectl wait` cannot express."""
    deadline = time.monotonic() + timeout_s
    while not (seen := condition()):
        if time.monotonic() > deadline:
            raise NotSoon(f"not within {timeout_s:.0f} s: {what}; last seen: {seen!r}")
        time.sleep(every_s)
    return seen
