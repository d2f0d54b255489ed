"""When a child that went is replaced, and which GPUs are left alone: what a supervisor decides, on values. Pure.

Units: seconds of a clock that never goes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vgpu.api.back_off import BackOff

PAUSES_S: Final = (1.0, 60.0)
"""Before the next child, from the second failure in a row on; the first child that fails is replaced at once. Guessed."""
STEADY_S: Final = 60.0
"""A child that has answered for so long ends a row of failures. Guessed."""
MOST_ABANDONED: Final = 2
"""Children that cannot be killed, with one driver; then no other is started. Specified."""
QUARANTINE_S: Final = (30.0, 120.0)
"""After a call that hung, no call is made about its GPU for the first; doubled each time, up to the second. Guessed: each try costs all callers a child."""


class EndReason(StrEnum):
    """Why a child was ended, as metrics call it."""

    DIED = "died"
    HUNG = "hung"
    MALFORMED = "malformed"
    REFUSED = "refused"
    """NVML could not be opened."""
    DRIVER = "driver"
    """Another driver is there, or other GPUs."""
    RELEASED = "released"
    """The operator wants the GPUs free of it."""
    REOPENED = "reopened"
    """No GPU answered."""


FAILURES: Final = frozenset(
    {EndReason.DIED, EndReason.HUNG, EndReason.MALFORMED, EndReason.REFUSED, EndReason.REOPENED}
)


class RestartDelay:
    """How long to wait before the next child."""

    def __init__(self) -> None:
        self.failures = 0
        """In a row."""
        self._back_off = BackOff(*PAUSES_S)

    def after(self, end: EndReason, answered_s: float) -> float:
        """A child that has answered for so long was ended."""
        if answered_s >= STEADY_S or end not in FAILURES:
            self.failures = 0
        if end not in FAILURES:
            return 0.0
        self.failures += 1
        if self.failures == 1:
            self._back_off.succeeded()
            return 0.0
        return self._back_off.failed()


@dataclass(slots=True)
class _Left:
    why: str
    until_s: float
    back_off: BackOff


class Quarantine:
    """GPUs on which a call hung, by the key of their requests."""

    def __init__(self) -> None:
        self._left: dict[str, _Left] = {}

    def hung(self, key: str, why: str, at_s: float) -> str:
        """A call about it did not return. Returns the reason that callers are given from now on."""
        before = self._left.get(key)
        back_off = before.back_off if before is not None else BackOff(*QUARANTINE_S)
        pause_s = back_off.failed()
        text = f"{why}; the next call follows after {pause_s:g} s"
        self._left[key] = _Left(text, at_s + pause_s, back_off)
        return text

    def why(self, key: str, at_s: float) -> str:
        """Why no call may be made now; empty when one may."""
        left = self._left.get(key)
        return left.why if left is not None and at_s < left.until_s else ""

    def answered(self, key: str) -> None:
        """A call about it returned."""
        self._left.pop(key, None)

    def forget(self) -> None:
        """Another driver is there."""
        self._left.clear()


def too_many(pids: list[int]) -> str:
    """Why no child is started while these cannot be killed; empty when one may be."""
    if len(pids) < MOST_ABANDONED:
        return ""
    named = ", ".join(map(str, pids))
    return (
        f"{len(pids)} NVML processes ({named}) hang in the driver and cannot be killed: no other is started until one ends "
        "or the driver changes"
    )
