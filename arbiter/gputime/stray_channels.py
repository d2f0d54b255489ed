"""Channels that run though their container is suspended: they came meanwhile, or were resumed before the others.

Decides for how long the container pays for that: as long as a process has work on such channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from arbiter.gputime.process import GpuTimeProcess


class StrayChannels:
    """The stray channels of one container."""

    def __init__(self) -> None:
        self.any = False
        """Whether some of its channels may run though it is suspended."""
        self._since_s = inf
        """Since when a process has work on such channels; inf = none has."""

    def comes(self, at_s: float, *, works: bool) -> None:
        """A process's channels came while it is suspended."""
        self.any = True
        if works:
            self._since_s = min(self._since_s, at_s)

    def resumes(self, clock: Callable[[], float], *, works: bool) -> None:
        """Some of its channels have been resumed: the first of them run while the others are being resumed. Called without any lock."""
        if not self.any:
            self.any, self._since_s = True, clock() if works else inf

    def begins(self, process: GpuTimeProcess, at_s: float) -> None:
        """A process has work."""
        if self.any and process.runs:
            self._since_s = min(self._since_s, at_s)

    def ends(self, processes: Iterable[GpuTimeProcess], at_s: float) -> float:
        """A process has no more work. Returns the time to pay for, if no other process has work."""
        if self._since_s == inf or any(process.working and process.runs for process in processes):
            return 0.0
        return self.paid(at_s)

    def caught(self, at_s: float) -> float:
        """All of it is suspended again, or resumed. Returns the time to pay for."""
        self.any = False
        return self.paid(at_s)

    def paid(self, at_s: float) -> float:
        """The time to pay for up to now."""
        since_s, self._since_s = self._since_s, inf
        return max(0.0, at_s - since_s) if since_s < inf else 0.0
