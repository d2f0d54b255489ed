"""How long to wait between attempts that fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

DOUBLINGS: Final = 64
"""After so many the exponent stays: any sensible `longest_s` is reached before, and a float never overflows."""


@dataclass(slots=True)
class BackOff:
    """Waits that double: `first_s` after one failure, never more than `longest_s`, and from `first_s` again after a success."""

    first_s: float
    longest_s: float
    jitter: Callable[[], float] | None = None
    """Random numbers from 0 to 1: each wait is cut by half of that, so that clients that failed together do not retry together."""
    failures: int = 0
    """In a row."""

    def failed(self, at_least_s: float = 0.0) -> float:
        """Seconds to wait before the next attempt. `at_least_s`: what the server requests, as in Retry-After."""
        wait_s = min(self.longest_s, self.first_s * 2.0 ** min(self.failures, DOUBLINGS))
        self.failures += 1
        if self.jitter is not None:
            wait_s *= 1 - self.jitter() / 2
        return max(wait_s, at_least_s)

    def succeeded(self) -> None:
        """The next failure is the first of a row."""
        self.failures = 0
