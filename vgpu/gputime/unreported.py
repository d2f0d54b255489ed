"""Does a container compute when it says that it is idle?

Containers say themselves when they have work for the GPU, and who has none pays nothing. The driver counts for each process how
long it kept the GPU busy; this module compares the two and says when they cannot both be true. It is pure: looks go in, a verdict
comes out.

The driver's count is coarse. It comes up to a second late, and while several processes share the GPU it names one of them for each
of its samples, so it is right on average only (read from NVIDIA's published interface; not measured). An honest container must
never be accused, so what it told is taken half as much again, a tenth of all time is let pass, and what is left is summed up until
it is seconds. Who keeps silent altogether is found in four to five seconds; who tells two thirds of its work is not found.

Units: seconds.
"""

from __future__ import annotations

from typing import Final

TRUST: Final = 1.5
"""So much more than it told may have been seen of it. Guessed: samples that name a neighbour's time as its own even out."""
SLACK: Final = 0.1
"""Part of all time in which it may have been seen without a word. Guessed, as above."""
ENOUGH_S: Final = 3.0
"""So much is no error of measurement any more: the count is a second late at most. Guessed."""
MOST_S: Final = 6.0
"""More is not held against anybody: who becomes honest is believed again within a minute, at SLACK a second."""


class Doubt:
    """What speaks against one container's word."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Seen of it beyond what its word explains."""
        self.proven = False
        """Its word does not count any more, until nothing speaks against it."""

    def look(self, passed_s: float, reported_s: float, seen_s: float) -> bool:
        """In this time it said to work for `reported_s`, and the driver saw it compute for `seen_s`. Whether the verdict changed."""
        beyond_s = min(seen_s, passed_s) - TRUST * reported_s - SLACK * passed_s
        self.seconds = min(MOST_S, max(0.0, self.seconds + beyond_s))
        before = self.proven
        self.proven = self.seconds >= ENOUGH_S or (self.proven and self.seconds > 0)
        return self.proven is not before

    def drop(self) -> None:
        """What was seen is too old to hold against anybody."""
        self.seconds, self.proven = 0.0, False
