"""Evidence on a container's suspends from its processes' reports: `vgpu.gputime.suspend_effect` judges, this module decides what is evidence.

Work that began and ended in a container that has been suspended for long was not suspended. No evidence: reports from before the end of a stall
of the arbiter, reports of a process that resumes itself because the heartbeat stopped, and reports while some channels are not suspended yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

from arbiter.gputime.process import GpuTimeProcess
from vgpu.gputime.suspend_effect import SuspendEffect
from vgpu.protocol import wire

INEFFECTIVE_S: Final = 0.020
"""Work that ends this long after a suspend was not suspended. Specified: the driver needs one millisecond."""
EXCUSED_S: Final = 2.0
"""For this long after the heartbeat stopped a process may report that it resumed itself. Guessed: it checks every 0.2 s."""


class SuspendEvidence:
    """The evidence on one container. `processes`: by the number of their connections."""

    def __init__(self, processes: Mapping[int, GpuTimeProcess]) -> None:
        self.effect = SuspendEffect()
        self.unread_connections: set[int] = set()
        """Connections that may have an unread message from before the present state."""
        self.resumes = 0
        """Times that its processes reported that they resumed themselves."""
        self._processes = processes
        self._off_since_s = inf
        """Since when all of it has been suspended, without evidence against that."""
        self._doubted_at_s = -inf
        """When the page last certainly did not show the heartbeat."""

    def off(self, at_s: float) -> None:
        """All of it is suspended from now on."""
        self._off_since_s = at_s

    def off_again(self, at_s: float) -> None:
        """All of it is suspended again, after some of it ran for a moment."""
        if self._off_since_s < inf:
            self._off_since_s = at_s

    def on(self, at_s: float, *, suspended: bool) -> None:
        """It runs from now on. `suspended`: it was suspended until now. If it had work that did not end, that is evidence for suspends."""
        begun_s = min((process.began_s for process in self._processes.values() if process.working), default=inf)
        seconds = at_s - max(self._off_since_s, begun_s)
        unread = any(
            number in self.unread_connections for number, process in self._processes.items() if process.working
        )
        if suspended and seconds >= INEFFECTIVE_S and not unread:
            self.effect.stood(seconds)
        for process in self._processes.values():
            process.worked_off = False
        self._off_since_s = inf

    def take_activity(self, number: int, what: wire.ActivityKind, at_s: float, *, off: bool, excused: bool) -> bool:
        """A process sent this report. `off`: its container is suspended; `excused`: its reports are no evidence now. Returns whether the verdict
        changed."""
        process = self._processes[number]
        if number in self.unread_connections or excused or at_s < process.resuming_until_s:
            process.worked_off = False
            return False
        if what is wire.ActivityKind.WORK:
            process.worked_off = at_s - self._off_since_s > INEFFECTIVE_S and bool(process.channel_groups)
        elif what is wire.ActivityKind.IDLE and process.worked_off and off:
            process.worked_off = False
            return self.effect.ended(at_s)
        return False

    def resumed(self, number: int, at_s: float, *, about_to: bool, silent: bool) -> bool:
        """A process reports that it resumes itself because the page does not show the heartbeat. If that is wrong, it counts as a suspend without
        effect. Returns whether the verdict changed."""
        process = self._processes[number]
        self.resumes += not about_to
        process.resuming_until_s = at_s + EXCUSED_S if about_to else -inf
        if silent or at_s - self._doubted_at_s < EXCUSED_S:
            self._doubted_at_s = at_s
            return False
        process.resuming_until_s = -inf
        return not about_to and self.effect.ended(at_s)

    def silent(self, at_s: float) -> None:
        """The page did not show the heartbeat."""
        self._doubted_at_s = at_s

    def unsure(self) -> None:
        """It may have resumed suspended channels."""
        self._off_since_s = inf
        self.unread_connections.update(self._processes)
        for process in self._processes.values():
            process.worked_off = False
