"""Compare the work that a container reports with the GPU time that the driver counts for it.

A process reports when its work begins and when all of it has ended; a process that reports no work pays nothing. The driver counts, for
each process, how long it kept the GPU's multiprocessors busy. A report can be wrong in two ways, and this module detects both:

    ended       Reported work that the driver does not count any more. The end can stay unreported: it is impossible to query the stream of
                a thread that has ended. `EndedWork` ends such work when it has run for a second, nothing was launched since, and two readings
                of the driver's count in a row showed none of it. A reading without an answer, or of a GPU that does not count by process (MIG
                mode), restarts the count: unknown is not idle. Copies, fills and waits keep no multiprocessor busy, so they never end here.
    unreported  Work that the driver sees and that was not reported: `UnreportedWork`. The driver's count is coarse. It comes up to a second
                late, and while several processes share the GPU it names one of them for each sample, so it is right on average only (read
                from NVIDIA's published interface; not measured). A container that reports all its work must never be accused. So its reports count one and a half
                times, a tenth of all time is tolerated, and the rest adds up until it reaches seconds. A container that reports nothing is
                detected in four to five seconds; one that reports two thirds of its work is not detected.

It is pure: reports and readings go in, verdicts come out. Units: seconds.
"""

from __future__ import annotations

from typing import Final

ENDED_AFTER_S: Final = 1.0
"""Time in which the container may run and reports work, but the driver counts none. Specified."""
READINGS: Final = 2
"""The driver's samples come up to a second late: one reading may miss a kernel that began since. Readings are a second apart."""

TOLERATED_RATIO: Final = 1.5
"""Tolerated ratio of observed to reported GPU time. Guessed: samples that attribute a neighbour's time to the container even out."""
TOLERATED_PART: Final = 0.1
"""Part of all time in which the container may be seen to compute without a report. Guessed, as above."""
PROVEN_S: Final = 3.0
"""Above this, the difference is no measurement error: the count is at most a second late. Guessed."""
KEPT_S: Final = 6.0
"""Upper bound of the sum: the reports of a container that reports all its work again count within a minute, at `TOLERATED_PART` a second."""


class EndedWork:
    """Whether one container's reported work has ended without a report."""

    def __init__(self) -> None:
        self.ended = False
        """Its work has ended, whatever it reported."""
        self._since_s: float | None = None
        """What it had reported when this count began; None = its work cannot end here."""
        self._readings = 0

    def report(self, reported_s: float, *, kernels_only: bool) -> None:
        """The container reported work, for the first time or again. `reported_s`: total time in which it was allowed to run and reported work."""
        self.ended, self._readings = False, 0
        self._since_s = reported_s if kernels_only else None

    def evaluate(self, reported_s: float, observed_s: float | None) -> bool:
        """`observed_s`: GPU time that the driver counted since the last reading; None = unknown. Returns whether the work has ended."""
        if self._since_s is None or self.ended:
            return False
        if observed_s is None or observed_s > 0:
            self._since_s, self._readings = reported_s, 0
            return False
        self._readings += 1
        self.ended = self._readings >= READINGS and reported_s - self._since_s >= ENDED_AFTER_S
        return self.ended


class UnreportedWork:
    """GPU time of one container that its reports do not explain."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Observed beyond what its reports explain."""
        self.proven = False
        """Its reports do not count any more, until `seconds` is 0 again."""

    def evaluate(self, passed_s: float, reported_s: float, observed_s: float) -> bool:
        """In `passed_s` the container reported `reported_s` of work and the driver counted `observed_s`. Returns whether the verdict changed."""
        beyond_s = min(observed_s, passed_s) - TOLERATED_RATIO * reported_s - TOLERATED_PART * passed_s
        self.seconds = min(KEPT_S, max(0.0, self.seconds + beyond_s))
        before = self.proven
        self.proven = self.seconds >= PROVEN_S or (self.proven and self.seconds > 0)
        return self.proven is not before

    def drop(self) -> None:
        """Discard the observed time: it is too old to count."""
        self.seconds, self.proven = 0.0, False
