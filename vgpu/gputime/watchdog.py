"""When to resume a container again that may run, works, and reports nothing: perhaps another process disabled its channels.

The driver does not say whether channels that are enabled were stopped, and a kernel that runs for long looks the same from
here. So each silence brings a first resume soon, and the next ones after twice as long each time: one that was stopped in the
middle of a silence stands still no longer than that silence had lasted, and never longer than `MOST_S`. Each GPU is resumed
by its own thread, so each has a clock of its own.

A silence counts while the container is resumed, and only then. The arbiter's own switches neither end a silence nor count as a resume, because the
driver counts disables: one more enable than the arbiter's own undoes another process's. A container under a gpu-core is resumed as soon as any other, in
the time that it has.

Whether another process does stop it shows when it is done again and again: work that ends right after a resume seems to have waited for it. Work that
just takes as long as the silence that brings a resume looks the same, so after such an end the next silences are resumed after other waits, in
an order without a pattern, that are further apart than `ANSWERED_S`: what ends by itself does not end right after all of these. That stays a guess, and is reported as one.

Units: seconds of any one clock. That of `heard`, `stands` and `due_s` goes on while the container is suspended.
"""

from __future__ import annotations

from math import inf
from typing import Final

MOST_S: Final = 1.0
"""No longer between two resumes of one silence. Guessed: a resume takes 0.3 ms of the thread that switches a GPU."""
ANSWERED_S: Final = 0.01
"""Work that ends so soon after a resume was waiting for it. Guessed: a short kernel, and the library's millisecond until it says so."""
WAITS: Final = (1.0, 0.5, 0.75, 0.75, 1.0, 0.5, 1.0, 0.75, 0.5, 0.5, 1.0, 0.75)
"""Parts of the usual first wait, one after the other while resumes are answered."""
PROOF: Final = len(WAITS)
"""Resumes answered in a row. Guessed, and tried on programs whose kernels take 5 to 300 ms in several mixes (test_watchdog.py)."""
FORGET_S: Final = 60.0
"""A verdict that no resume confirms for so long ends. Guessed."""


class ContainerWatchdog:
    """Of one container. `at_s`: when it was heard of."""

    def __init__(self, at_s: float) -> None:
        self._ran_s = 0.0
        """How long it was resumed in all, until `_on_since_s`."""
        self._on_since_s: float | None = at_s
        """None = it is suspended."""
        self._heard_s = 0.0
        """What it had run for when it was heard of; the times in `_last` are of that clock, too."""
        self._last: dict[str, tuple[float, float]] = {}
        """By GPU, in this silence: when it was resumed, and how long to wait for the next time."""
        self._answered = 0
        """Resumes in a row."""
        self._proven_at_s = -inf

    def ended(self, at_s: float, first_s: float) -> None:
        """Its work ended. To be said before `heard`."""
        if not self._last:
            if self._clock_s(at_s) - self._heard_s >= first_s * min(WAITS):
                self._answered = 0  # it is of the kind that takes long by itself
            return
        resumed_s = max(ran_s for ran_s, _ in self._last.values())
        self._answered = self._answered + 1 if self._clock_s(at_s) - resumed_s <= ANSWERED_S else 0
        if self._answered >= PROOF:
            self._proven_at_s = at_s

    def stopped(self, at_s: float) -> bool:
        """Does somebody else seem to stop it, lately?"""
        return at_s - self._proven_at_s < FORGET_S

    def stands(self, at_s: float, *, on: bool) -> None:
        """The arbiter has resumed or suspended it."""
        self._ran_s = self._clock_s(at_s)
        self._on_since_s = at_s if on else None

    def heard(self, at_s: float) -> None:
        """It said something: nothing is wrong."""
        self._heard_s = self._clock_s(at_s)
        self._last.clear()

    def due_s(self, gpu: str, first_s: float) -> float:
        """When it is to be resumed there, if it stays resumed; `first_s` after the last word at the latest, half of it at the earliest. Not while it is suspended."""
        if self._on_since_s is None:
            return inf
        ran_s, wait_s = self._last.get(gpu, (self._heard_s, self._first_s(first_s)))
        return self._on_since_s + ran_s + wait_s - self._ran_s

    def resumed(self, gpu: str, at_s: float, first_s: float) -> None:
        """It was resumed again there."""
        _, wait_s = self._last.get(gpu, (0.0, self._first_s(first_s)))
        self._last[gpu] = self._clock_s(at_s), max(first_s, min(2 * wait_s, MOST_S))

    def _clock_s(self, at_s: float) -> float:
        return self._ran_s + (max(0.0, at_s - self._on_since_s) if self._on_since_s is not None else 0.0)

    def _first_s(self, usual_s: float) -> float:
        return usual_s * WAITS[self._answered % len(WAITS)]
