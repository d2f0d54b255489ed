"""Compare the work that a container reports with the GPU time that the driver counts for it.

A process reports when its work begins and when all of it has ended; a process that reports no work pays nothing. The driver counts, for
each process, how long it kept the GPU's multiprocessors busy. Two things can be wrong with a report, and this module decides both:

    ended       Work that was reported and that the driver does not see any more. The end can stay unreported: nobody can query the stream of
                a thread that has ended. `EndedWork` ends such work when it has run for a second, nothing was launched since, and two looks at
                the driver's count in a row showed none of it. A look without an answer, or at a GPU that does not count by process (MIG mode),
                begins anew: unknown is not idle. Copies, fills and waits keep no multiprocessor busy, so they are never ended here.
    unreported  Work that the driver sees and that was not reported: `UnreportedWork`. The driver's count is coarse. It comes up to a second
                late, and while several processes share the GPU it names one of them for each sample, so it is right on average only (read
                from NVIDIA's published interface; not measured). An honest container must never be accused. So its reports are taken half as
                much again, a tenth of all time is tolerated, and the rest is summed up until it is seconds. A container that reports nothing
                is found in four to five seconds; one that reports two thirds of its work is not found.

It is pure: reports and looks go in, verdicts come out. Units: seconds.
"""

from __future__ import annotations

from typing import Final

ENDED_AFTER_S: Final = 1.0
"""Of time in which the container may run and reports work, without a sign of it. Specified."""
LOOKS: Final = 2
"""The driver's samples come up to a second late: one look may miss a kernel that began since. Looks are a second apart."""

TOLERATED_RATIO: Final = 1.5
"""Tolerated ratio of observed to reported GPU time. Guessed: samples that name a neighbour's time as the container's own even out."""
TOLERATED_PART: Final = 0.1
"""Part of all time in which the container may be seen to compute without a report. Guessed, as above."""
PROVEN_S: Final = 3.0
"""So much is no error of measurement any more: the count is a second late at most. Guessed."""
KEPT_S: Final = 6.0
"""More is not kept: a container that becomes honest is believed again within a minute, at `TOLERATED_PART` a second."""


class EndedWork:
    """Of one container: has its reported work ended without a report?"""

    def __init__(self) -> None:
        self.ended = False
        """Its work has ended, whatever it reported."""
        self._since_s: float | None = None
        """What it had reported when this count began; None = its work cannot end here."""
        self._looks = 0

    def report(self, reported_s: float, *, kernels_only: bool) -> None:
        """It reported work, for the first time or again. `reported_s`: how long in all it was allowed to run and reported work."""
        self.ended, self._looks = False, 0
        self._since_s = reported_s if kernels_only else None

    def look(self, reported_s: float, observed_s: float | None) -> bool:
        """The driver saw it compute for so long since the last look; None = unknown. Whether its work ended with this."""
        if self._since_s is None or self.ended:
            return False
        if observed_s is None or observed_s > 0:
            self._since_s, self._looks = reported_s, 0
            return False
        self._looks += 1
        self.ended = self._looks >= LOOKS and reported_s - self._since_s >= ENDED_AFTER_S
        return self.ended


class UnreportedWork:
    """Of one container: how much of its GPU time its reports do not explain."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Observed beyond what its reports explain."""
        self.proven = False
        """Its reports do not count any more, until `seconds` is 0 again."""

    def look(self, passed_s: float, reported_s: float, observed_s: float) -> bool:
        """In this time it reported work for `reported_s`, and the driver saw it compute for `observed_s`. Whether the verdict changed."""
        beyond_s = min(observed_s, passed_s) - TOLERATED_RATIO * reported_s - TOLERATED_PART * passed_s
        self.seconds = min(KEPT_S, max(0.0, self.seconds + beyond_s))
        before = self.proven
        self.proven = self.seconds >= PROVEN_S or (self.proven and self.seconds > 0)
        return self.proven is not before

    def drop(self) -> None:
        """What was observed is too old to count."""
        self.seconds, self.proven = 0.0, False
