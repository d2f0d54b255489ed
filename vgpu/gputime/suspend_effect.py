"""Do suspends of a container stop its work, as far as its own word shows?

Work that begins while a container is suspended cannot end before it is resumed. Where that happens again and again its new work is held back
at the gate as well, and from time to time it is tried whether suspends work by now: the gate opens, and closes again at the first work
that ends under a suspend. Time suspended with work that does not end is what speaks for suspends.

What began before the container resumed itself, or was read late, says nothing: the caller leaves it out.

Units: seconds of any one clock.
"""

from __future__ import annotations

from math import inf
from typing import Final

TIMES: Final = 3
"""So often work must end under a suspend before new work is held back. Guessed."""
STOOD_S: Final = 1.0
"""Suspended for so long with work that did not end, all together, a container is suspended for certain. Guessed."""
FIRST_S: Final = 10.0
"""From the verdict to the first trial. Guessed."""
MOST_S: Final = 600.0
"""The wait doubles with every trial that fails, up to this. Guessed."""


class Effect:
    """Of one container."""

    def __init__(self) -> None:
        self.doubted = False
        """Suspends seem to have no effect. Stays while that is tried."""
        self._ended = 0
        self._stood_s = 0.0
        self._wait_s = FIRST_S
        self._trial_at_s = inf
        """When the gate opens to try; in the past = it is open."""
        self._trying = False

    @property
    def gates(self) -> bool:
        """Is new work to be held back?"""
        return self.doubted and not self._trying

    def ended(self, at_s: float) -> bool:
        """Work that began under a suspend ended under it. Whether that changed the verdict: from now on it is held back, or again."""
        self._ended, self._stood_s = self._ended + 1, 0.0
        if self._trying:
            self._wait_s = min(2 * self._wait_s, MOST_S)
        elif self.doubted or self._ended < TIMES:
            return False
        self.doubted, self._trying, self._trial_at_s = True, False, at_s + self._wait_s
        return True

    def stood(self, seconds: float) -> bool:
        """For so long it was suspended with work, and none ended. Whether a trial succeeded with that."""
        if self.gates:
            return False
        self._stood_s += seconds
        if self._stood_s < STOOD_S:
            return False
        self._ended, self._stood_s = 0, 0.0
        succeeded, self.doubted, self._trying = self._trying, False, False
        if succeeded:
            self._wait_s = FIRST_S
        return succeeded

    def tries(self, at_s: float) -> bool:
        """Whether a trial begins."""
        if not self.gates or at_s < self._trial_at_s:
            return False
        self._trying, self._stood_s = True, 0.0
        return True
