"""Whether suspends stop a container's work, as far as its own reports show.

Work that begins while a container is suspended cannot end before the resume. If such work ends repeatedly, the gate delays the container's new work
as well. From time to time a trial checks whether suspends work by now: the gate opens, and closes again at the first work that ends under a
suspend. Suspended time with work that does not end is the evidence for suspends.

Work that began before the container resumed itself, or that was read late, is no evidence: the caller omits it.

Units: seconds of any one clock.
"""

from __future__ import annotations

from math import inf
from typing import Final

TIMES: Final = 3
"""Number of times that work must end under a suspend before the gate delays new work. Guessed."""
STOOD_S: Final = 1.0
"""Total suspended time, with work that did not end, after which suspends certainly work. Guessed."""
FIRST_S: Final = 10.0
"""From the verdict to the first trial. Guessed."""
MOST_S: Final = 600.0
"""The wait doubles with every failed trial, up to this. Guessed."""


class SuspendEffect:
    """The evidence on one container."""

    def __init__(self) -> None:
        self.doubted = False
        """Suspends seem to have no effect. Stays set during a trial."""
        self._ended = 0
        self._stood_s = 0.0
        self._wait_s = FIRST_S
        self._trial_at_s = inf
        """When the gate opens for a trial; in the past = it is open."""
        self._trying = False

    @property
    def gates(self) -> bool:
        """Whether the gate delays new work."""
        return self.doubted and not self._trying

    def ended(self, at_s: float) -> bool:
        """Work that began under a suspend ended under it. Returns whether the verdict changed: the gate delays new work from now on, or again."""
        self._ended, self._stood_s = self._ended + 1, 0.0
        if self._trying:
            self._wait_s = min(2 * self._wait_s, MOST_S)
        elif self.doubted or self._ended < TIMES:
            return False
        self.doubted, self._trying, self._trial_at_s = True, False, at_s + self._wait_s
        return True

    def stood(self, seconds: float) -> bool:
        """The container was suspended with work for `seconds`, and none ended. Returns whether a trial succeeded with that."""
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
        """Returns whether a trial begins."""
        if not self.gates or at_s < self._trial_at_s:
            return False
        self._trying, self._stood_s = True, 0.0
        return True
