"""When to resume a container again that may run, has work, and reports nothing: perhaps another process disabled its channels.

The driver does not report whether enabled channels were stopped, and a long kernel looks the same to the arbiter. So each
silence leads to a first resume soon, and to the next ones after twice as long each time: a container that was stopped in the
middle of a silence stands still no longer than that silence had lasted, and never longer than `MOST_S`. Each GPU has
its own thread for resumes, and so its own clock.

A silence counts while the container is resumed, and only then. The arbiter's own switches neither end a silence nor count as a resume, because the
driver counts disables: one more enable than the arbiter's own undoes another process's. A container under a gpu-core is resumed as soon as any other, in
the time in which it may run.

Only repetition shows that another process stops the container: work that ends right after a resume seems to have waited for it. Work that
just takes as long as the silence before a resume looks the same. So after such an end the next silences get other waits, in an order without
a pattern, further apart than `ANSWERED_S`: work that ends by itself does not end right after all of these. The verdict remains a guess, and is
reported as one.

Units: seconds of any one clock. That of `note_report`, `record_switch` and `due_s` goes on while the container is suspended.
"""

from __future__ import annotations

from math import inf
from typing import Final

MOST_S: Final = 1.0
"""Longest wait between two resumes in one silence. Guessed: a resume takes 0.3 ms of the thread that switches a GPU."""
ANSWERED_S: Final = 0.01
"""Work that ends within this time after a resume had waited for it. Guessed: a short kernel, and the library's millisecond until its report."""
WAITS: Final = (1.0, 0.5, 0.75, 0.75, 1.0, 0.5, 1.0, 0.75, 0.5, 0.5, 1.0, 0.75)
"""Factors of the usual first wait, used in sequence while work ends right after resumes."""
PROOF: Final = len(WAITS)
"""Resumes in a row after which work ended. Guessed, and tested with kernels of 5 to 300 ms in several mixes (test_watchdog.py)."""
FORGET_S: Final = 60.0
"""A verdict ends if no resume confirms it for this long. Guessed."""


class ContainerWatchdog:
    """The watchdog of one container. `at_s`: the time of its first report."""

    def __init__(self, at_s: float) -> None:
        self._ran_s = 0.0
        """Total time for which it was allowed to run, until `_on_since_s`."""
        self._on_since_s: float | None = at_s
        """None = it is suspended."""
        self._reported_s = 0.0
        """Its running time at its last report; the times in `_last` are of that clock, too."""
        self._last: dict[str, tuple[float, float]] = {}
        """By GPU, in this silence: the time of the last resume, and the wait until the next."""
        self._answered = 0
        """Resumes in a row."""
        self._proven_at_s = -inf

    def ended(self, at_s: float, first_s: float) -> None:
        """Its work ended. Call it before `note_report`."""
        if not self._last:
            if self._clock_s(at_s) - self._reported_s >= first_s * min(WAITS):
                self._answered = 0  # its work takes long by itself
            return
        resumed_s = max(ran_s for ran_s, _ in self._last.values())
        self._answered = self._answered + 1 if self._clock_s(at_s) - resumed_s <= ANSWERED_S else 0
        if self._answered >= PROOF:
            self._proven_at_s = at_s

    def stopped(self, at_s: float) -> bool:
        """Whether another process seems to have stopped it recently."""
        return at_s - self._proven_at_s < FORGET_S

    def record_switch(self, at_s: float, *, on: bool) -> None:
        """The arbiter has resumed or suspended it."""
        self._ran_s = self._clock_s(at_s)
        self._on_since_s = at_s if on else None

    def note_report(self, at_s: float) -> None:
        """The container sent a report, so the silence ends."""
        self._reported_s = self._clock_s(at_s)
        self._last.clear()

    def due_s(self, gpu: str, first_s: float) -> float:
        """When to resume it on this GPU, if it stays allowed to run: at the latest `first_s` after its last report, at the earliest half of that. Not
        while it is suspended."""
        if self._on_since_s is None:
            return inf
        ran_s, wait_s = self._last.get(gpu, (self._reported_s, self._first_s(first_s)))
        return self._on_since_s + ran_s + wait_s - self._ran_s

    def resumed(self, gpu: str, at_s: float, first_s: float) -> None:
        """The arbiter resumed it again on this GPU."""
        _, wait_s = self._last.get(gpu, (0.0, self._first_s(first_s)))
        self._last[gpu] = self._clock_s(at_s), max(first_s, min(2 * wait_s, MOST_S))

    def _clock_s(self, at_s: float) -> float:
        return self._ran_s + (max(0.0, at_s - self._on_since_s) if self._on_since_s is not None else 0.0)

    def _first_s(self, usual_s: float) -> float:
        return usual_s * WAITS[self._answered % len(WAITS)]
