"""What the words of a container's processes show of its suspends: `vgpu.gputime.suspend_effect` judges, this module decides what is evidence.

Work that began and ended in a container that has been suspended for long was not suspended. Nothing follows from what was said before a stall
of ours was over, from a process that resumes itself because we were silent, or while channels run that are not suspended yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

from arbiter.gputime.process import Process
from vgpu.gputime.suspend_effect import Effect
from vgpu.protocol import wire

INEFFECTIVE_S: Final = 0.020
"""Work that ends so long after a suspend was not suspended. Specified: the driver takes one millisecond."""
EXCUSED_S: Final = 2.0
"""So long after a silence of ours a process may say that it resumed itself in it. Guessed: it looks every 0.2 s."""


class Evidence:
    """Of one container. `processes`: by the number of their connections."""

    def __init__(self, processes: Mapping[int, Process]) -> None:
        self.effect = Effect()
        self.behind: set[int] = set()
        """Connections on which something may wait that was said before what is known now."""
        self.resumes = 0
        """Times that its processes said that they resumed themselves."""
        self._processes = processes
        self._off_since_s = inf
        """Since when all of it has been suspended, as far as nothing speaks against it."""
        self._doubted_at_s = -inf
        """When the page was last known not to show that the arbiter lives."""

    def off(self, at_s: float) -> None:
        """All of it is suspended from now on."""
        self._off_since_s = at_s

    def off_again(self, at_s: float) -> None:
        """All of it is suspended again, after some of it ran for a moment."""
        if self._off_since_s < inf:
            self._off_since_s = at_s

    def on(self, at_s: float, *, suspended: bool) -> None:
        """It is on from now on. `suspended`: until now it was not. With work that did not end?"""
        begun_s = min((process.began_s for process in self._processes.values() if process.working), default=inf)
        seconds = at_s - max(self._off_since_s, begun_s)
        unread = any(number in self.behind for number, process in self._processes.items() if process.working)
        if suspended and seconds >= INEFFECTIVE_S and not unread:
            self.effect.stood(seconds)
        for process in self._processes.values():
            process.worked_off = False
        self._off_since_s = inf

    def said(self, number: int, what: wire.What, at_s: float, *, off: bool, excused: bool) -> bool:
        """A process said this. `off`: its container is suspended; `excused`: nothing follows from its words now. Whether that changed the
        verdict."""
        process = self._processes[number]
        if number in self.behind or excused or at_s < process.resuming_until_s:
            process.worked_off = False
            return False
        if what is wire.What.WORK:
            process.worked_off = at_s - self._off_since_s > INEFFECTIVE_S and bool(process.channel_groups)
        elif what is wire.What.IDLE and process.worked_off and off:
            process.worked_off = False
            return self.effect.ended(at_s)
        return False

    def resumed(self, number: int, at_s: float, *, about_to: bool, silent: bool) -> bool:
        """A process reports that it resumes itself, as the page does not show that the arbiter lives. Where that is not so, it is as if a suspend had no effect:
        whether that changed the verdict."""
        process = self._processes[number]
        self.resumes += not about_to
        process.resuming_until_s = at_s + EXCUSED_S if about_to else -inf
        if silent or at_s - self._doubted_at_s < EXCUSED_S:
            self._doubted_at_s = at_s
            return False
        process.resuming_until_s = -inf
        return not about_to and self.effect.ended(at_s)

    def silent(self, at_s: float) -> None:
        """The page did not show that the arbiter lives."""
        self._doubted_at_s = at_s

    def unsure(self) -> None:
        """It may have started what we suspended."""
        self._off_since_s = inf
        self.behind.update(self._processes)
        for process in self._processes.values():
            process.worked_off = False
