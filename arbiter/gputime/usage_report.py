"""The usage reports of a container, added up and compared with what the driver counts for it.

Decides what the reports are worth: whether reported work has ended without a report, whether the container does unreported work, and what its
idle time costs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from arbiter.gputime.process import Process
from vgpu.gputime.activity_check import EndedWork, UnreportedWork

LOOK_MOST_S: Final = 2.0
"""After a longer pause between looks the driver's count does not reach back to the last one, and messages may be unread: then only
what speaks for the container counts. As far as a look goes back."""
FORGET_S: Final = 10.0
"""A verdict that no look has confirmed for so long ends. Guessed: some looks."""
FADE: Final = 0.5
"""What of earlier looks counts in `pace`. Guessed: a sample that comes late is in the next look."""


class UsageReports:
    """Of one container. Call `add_up` before anything changes what it reports or whether it is allowed to run."""

    def __init__(self, at_s: float) -> None:
        self.ended_work = EndedWork()
        """What ends its work without a report."""
        self.unreported_work = UnreportedWork()
        """What the driver counts beyond its reports."""
        self.seen_s: float | None = None
        """GPU time that the driver counted for its processes; None = not read yet."""
        self.pace = 1.0
        """Part of the time in which it reports no work and the driver saw it compute, 0 to 1: what that time costs it."""
        self.added_until_s = at_s
        """Up to when its reports are added up."""
        self.weighed: tuple[float, float, float] | None = None
        """When its reports were compared last, and `_reported_s` and `_silent_s` then."""
        self._reported_s = self._silent_s = 0.0
        """How long it was allowed to run and reported work; and reported none."""
        self._resumed = False
        """It resumed itself since the last look; for how long it ran is unknown."""
        self._beyond_s = self._of_silent_s = 0.0
        """Of the last looks: observed beyond what it reported, in how much time without reported work."""

    def add_up(self, at_s: float, *, may_run: bool, works: bool) -> None:
        """Up to `at_s` it reported this. Nothing is added while it is suspended: it does not run then, so its reports explain nothing that the driver saw."""
        if at_s <= self.added_until_s:
            return
        passed_s, self.added_until_s = at_s - self.added_until_s, at_s
        if may_run and works:
            self._reported_s += passed_s
        elif may_run:
            self._silent_s += passed_s

    def weigh(self, at_s: float, seen_s: float) -> bool:
        """Since the last look the driver saw its processes compute for so long. Whether the verdict changed."""
        since, self.weighed = self.weighed, (at_s, self._reported_s, self._silent_s)
        if since is None:
            self.seen_s = 0.0
            return False
        self.seen_s = (self.seen_s or 0.0) + seen_s
        passed_s, reported_s, silent_s = (now - then for now, then in zip(self.weighed, since, strict=True))
        if passed_s > LOOK_MOST_S or self._resumed:
            self._resumed = False
            return self.unreported_work.look(passed_s, reported_s, 0.0)
        self._beyond_s = FADE * self._beyond_s + seen_s - reported_s
        self._of_silent_s = FADE * self._of_silent_s + silent_s
        if self._of_silent_s > 0:
            self.pace = round(min(1.0, max(0.0, self._beyond_s / self._of_silent_s)), 2)
        return self.unreported_work.look(passed_s, reported_s, seen_s)

    def ends(self, seen_s: float | None) -> bool:
        """Since the last look the driver saw its processes compute for so long; None = it might have seen nothing of them. Whether what it
        reported has ended with that."""
        return self.ended_work.look(self._reported_s, seen_s)

    def said(self, processes: Iterable[Process]) -> None:
        """One of its processes reported work or its end: what others have launched counts anew with it."""
        open_ = [process for process in processes if process.working]
        self.ended_work.report(
            self._reported_s, kernels_only=bool(open_) and all(process.kernels_only for process in open_)
        )

    def resumed(self) -> None:
        """It may have resumed itself."""
        self._resumed = True

    def forgets(self, at_s: float) -> bool:
        """A verdict ends when no look has confirmed it for long. Whether one did."""
        if not self.unreported_work.proven or self.weighed is None or at_s - self.weighed[0] < FORGET_S:
            return False
        self.unreported_work.drop()
        return True
