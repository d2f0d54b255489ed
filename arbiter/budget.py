"""How many messages a container may send: a token bucket. The arbiter reads a container with an empty bucket later, so that it delays no other."""

from __future__ import annotations

from typing import Final

A_SECOND: Final = 4000.0
"""Guessed: a process that alternates between work and idleness sends 2,000 at most (the library waits a millisecond), and one message costs
the arbiter 20 us."""
AT_ONCE: Final = 256.0
"""A container of many processes that starts or connects again. Guessed."""
CHANNELS_COST: Final = 20.0
"""Cost of a message that leads to a call of the driver: half a millisecond of a GPU's thread and more."""


class MessageBudget:
    """The bucket of one container. Not for several threads."""

    def __init__(
        self, at_s: float, a_second: float = A_SECOND, at_once: float = AT_ONCE, again: float | None = None
    ) -> None:
        """`again`: the level at which reading resumes; by default a quarter of the bucket, so that one wake-up reads many."""
        self.left = at_once
        self._a_second, self._at_once = a_second, at_once
        self._again = at_once / 4 if again is None else again
        self._at_s = at_s

    def may(self, at_s: float) -> bool:
        """Whether one more message may be read."""
        if at_s > self._at_s:
            self.left = min(self._at_once, self.left + (at_s - self._at_s) * self._a_second)
            self._at_s = at_s
        return self.left >= 1.0

    def spend(self, cost: float) -> None:
        """Pay for a message that was read. The level may fall below 0."""
        self.left -= cost

    def again_s(self, at_s: float) -> float:
        """When `may` is worth calling again, after it returned False."""
        return at_s + max(0.0, self._again - self.left) / self._a_second
