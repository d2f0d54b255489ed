"""When to start a container again that may run, works, and was not heard of: perhaps somebody else stopped its channels.

The driver does not say whether channels that are enabled were stopped, and a kernel that runs for long looks the same from
here. So each silence brings a first heal soon, and the next ones after twice as long each time: one that was stopped in the
middle of a silence stands still no longer than that silence had lasted, and never longer than `MOST_S`. Each card is healed
by its own thread, so each has a clock of its own.

Units: seconds of any one clock.
"""

from __future__ import annotations

from typing import Final

MOST_S: Final = 1.0
"""No longer between two heals of one silence. Guessed: a heal takes 0.3 ms of the thread that switches a card."""


class Healing:
    """Of one container. `at_s`: when it was heard of."""

    def __init__(self, at_s: float) -> None:
        self._heard_at_s = at_s
        self._last: dict[str, tuple[float, float]] = {}
        """By card, in this silence: when it was healed, and how long to wait for the next time."""

    def heard(self, at_s: float) -> None:
        """It said something, or was switched: nothing is wrong."""
        self._heard_at_s = at_s
        self._last.clear()

    def due_s(self, card: str, first_s: float) -> float:
        """When it is to be healed there; `first_s` after the last word at the earliest."""
        at_s, wait_s = self._last.get(card, (self._heard_at_s, first_s))
        return at_s + wait_s

    def healed(self, card: str, at_s: float, first_s: float) -> None:
        """It was started again there."""
        _, wait_s = self._last.get(card, (at_s, first_s))
        self._last[card] = at_s, max(first_s, min(2 * wait_s, MOST_S))
