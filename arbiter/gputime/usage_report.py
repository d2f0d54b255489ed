"""The usage reports of a container, added up and compared with the driver's count.

Decides whether reported work has ended without a report, whether the container does unreported work, and the cost of its time without reported
work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from arbiter.gputime.process import GpuTimeProcess
from vgpu.gputime.activity_check import EndedWork, UnreportedWork

LOOK_MOST_S: Final = 2.0
"""After a longer pause between readings the driver's count does not reach back to the last one, and messages may be unread: then only
evidence in favour of the container counts. Equals the longest time that a reading covers."""
FORGET_S: Final = 10.0
"""A verdict ends if no reading confirms it for this long. Guessed: some readings."""
FADE: Final = 0.5
"""Weight of earlier readings in `pace`. Guessed: a late sample is in the next reading."""


class UsageReports:
    """The usage reports of one container. Call `add_up` before its reported state or its permission to run changes."""

    def __init__(self, at_s: float) -> None:
        self.ended_work = EndedWork()
        """Detects work that ended without a report."""
        self.unreported_work = UnreportedWork()
        """GPU time that the driver counts beyond its reports."""
        self.seen_s: float | None = None
        """GPU time that the driver counted for its processes; None = not read yet."""
        self.pace = 1.0
        """Part of the time without reported work in which the driver counted GPU time, 0 to 1: the cost of that time."""
        self.added_until_s = at_s
        """Up to when its reports are added up."""
        self.weighed: tuple[float, float, float] | None = None
        """The time of the last comparison, with `_reported_s` and `_silent_s` at that time."""
        self._reported_s = self._silent_s = 0.0
        """How long it was allowed to run with reported work; and without."""
        self._resumed = False
        """It has resumed itself since the last reading; how long it ran is unknown."""
        self._beyond_s = self._of_silent_s = 0.0
        """Over the last readings: observed time beyond its reports, and the time without reported work."""

    def add_up(self, at_s: float, *, may_run: bool, works: bool) -> None:
        """Add its reported state up to `at_s`. Suspended time is not added: the container does not run then, so its reports explain no counted time."""
        if at_s <= self.added_until_s:
            return
        passed_s, self.added_until_s = at_s - self.added_until_s, at_s
        if may_run and works:
            self._reported_s += passed_s
        elif may_run:
            self._silent_s += passed_s

    def weigh(self, at_s: float, seen_s: float) -> bool:
        """The driver counted `seen_s` for its processes since the last reading. Returns whether the verdict changed."""
        since, self.weighed = self.weighed, (at_s, self._reported_s, self._silent_s)
        if since is None:
            self.seen_s = 0.0
            return False
        self.seen_s = (self.seen_s or 0.0) + seen_s
        passed_s, reported_s, silent_s = (now - then for now, then in zip(self.weighed, since, strict=True))
        if passed_s > LOOK_MOST_S or self._resumed:
            self._resumed = False
            return self.unreported_work.evaluate(passed_s, reported_s, 0.0)
        self._beyond_s = FADE * self._beyond_s + seen_s - reported_s
        self._of_silent_s = FADE * self._of_silent_s + silent_s
        if self._of_silent_s > 0:
            self.pace = round(min(1.0, max(0.0, self._beyond_s / self._of_silent_s)), 2)
        return self.unreported_work.evaluate(passed_s, reported_s, seen_s)

    def ends(self, seen_s: float | None) -> bool:
        """The driver counted `seen_s` for its processes since the last reading; None = it may not have counted them. Returns whether its reported
        work has ended with that."""
        return self.ended_work.evaluate(self._reported_s, seen_s)

    def note_report(self, processes: Iterable[GpuTimeProcess]) -> None:
        """One of its processes reported work or its end: restart the count with the work of all processes."""
        open_ = [process for process in processes if process.working]
        self.ended_work.report(
            self._reported_s, kernels_only=bool(open_) and all(process.kernels_only for process in open_)
        )

    def resumed(self) -> None:
        """It may have resumed itself."""
        self._resumed = True

    def forgets(self, at_s: float) -> bool:
        """End a verdict that no reading has confirmed for long. Returns whether one ended."""
        if not self.unreported_work.proven or self.weighed is None or at_s - self.weighed[0] < FORGET_S:
            return False
        self.unreported_work.drop()
        return True
