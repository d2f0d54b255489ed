"""Work that was reported and that the driver does not see any more.

A process says when its work begins and when all of it has ended. The end can stay unsaid: the stream of a thread that ended can be asked by
nobody. So a container's work ends here as well, when it has run for a second, nothing was launched since, and two looks at the driver's
count of who computes, one after the other, showed nothing of it. A look that could not see (no answer, a GPU that does not count by process, as in
MIG mode) begins the count anew: unknown is not idle. What the count does not show ends nothing either: copies, fills and waits of a stream
keep no multiprocessor busy. It is pure: words and looks go in.

Units: seconds.
"""

from __future__ import annotations

from typing import Final

ENOUGH_S: Final = 1.0
"""Of time in which it may run and says that it works. Specified."""
LOOKS: Final = 2
"""The driver's samples come up to a second late: one look may not know of a kernel that began since. Looks are a second apart."""


class Decay:
    """Of one container."""

    def __init__(self) -> None:
        self.ended = False
        """Its work has ended, whatever it said."""
        self._since_s: float | None = None
        """What it had told when this count began; None = its work cannot end here."""
        self._looks = 0

    def word(self, reported_s: float, *, kernels_only: bool) -> None:
        """It said that it has work, for the first time or again; `reported_s`: how long it may have run and said so, ever."""
        self.ended, self._looks = False, 0
        self._since_s = reported_s if kernels_only else None

    def look(self, reported_s: float, seen_s: float | None) -> bool:
        """The driver saw it compute for so long since the last look; None = that is not known. Whether its work ended with this."""
        if self._since_s is None or self.ended:
            return False
        if seen_s is None or seen_s > 0:
            self._since_s, self._looks = reported_s, 0
            return False
        self._looks += 1
        self.ended = self._looks >= LOOKS and reported_s - self._since_s >= ENOUGH_S
        return self.ended
