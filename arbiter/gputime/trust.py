"""What the arbiter believes of containers: whether each can be suspended, and whether its word about its work counts.

The evidence is of each container (`arbiter.gputime.obstacles`, `arbiter.gputime.suspend_evidence`, `arbiter.gputime.usage_report`). This module brings the news to it, counts the
verdicts of all containers, and says in the log what changed. What follows from a verdict is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.counts import Counts
from arbiter.gputime.log_messages import (
    report_of_doubt,
    report_of_no_effect,
    report_of_no_trial,
    report_of_trouble,
    report_of_try,
)
from vgpu.gputime.trial import Suspending
from vgpu.protocol import wire

SILENT_S: Final = 0.5
"""A container whose thread has not come round for so long may resume itself. Specified: the library waits 0.6 s."""
CHECKED_S: Final = 10.0
"""Nothing was compared with the driver's count for so long: it is not checked. Guessed: some looks."""


class Trust:
    """Of all containers; under the lock of `NodeScheduler`. `suspending`: may the channels on these GPUs be suspended, by the trial of this boot?"""

    def __init__(self, counts: Counts, suspending: Callable[[Iterable[str]], Suspending]) -> None:
        self._counts, self._suspending = counts, suspending
        self._checked_at_s = -inf

    def checks(self, at_s: float) -> bool:
        """Is what containers say compared with what the driver counts?"""
        return at_s - self._checked_at_s < CHECKED_S

    def checked(self, at_s: float) -> None:
        """The driver's count was read."""
        self._checked_at_s = at_s

    def weigh(self, container: GpuTimeContainer, at_s: float, seen_s: float, *, whole: bool) -> None:
        """Since the last look the driver saw it compute for so long; `whole`: and saw all there was."""
        if container.weigh(at_s, seen_s):
            self._doubts(container)
        self._counts.unreported_ends += container.ends_work(at_s, seen_s if whole else None)

    def forgets(self, container: GpuTimeContainer, at_s: float) -> bool:
        """Whether the verdict on its word ends, as nothing was compared for long."""
        forgets = container.reports.forgets(at_s)
        if forgets:
            self._doubts(container)
        return forgets

    def judge(self, container: GpuTimeContainer, at_s: float) -> None:
        """May it be suspended, as far as its GPUs and their driver go?"""
        obstacles = container.obstacles
        obstacles.suspending = self._suspending([gpu.uuid for gpu in container.grant.gpus])
        if obstacles.denied:
            report_of_trouble(container, obstacles.suspending.why, at_s)
        elif obstacles.suspending.why:
            report_of_no_trial(container)

    def refused(self, container: GpuTimeContainer, on: bool, status: int, at_s: float) -> None:
        """The driver refused to resume or suspend it."""
        self._counts.failures += not on
        container.obstacles.failures += not on
        why = f"the driver answered {status & 0xFFFFFFFF:#x} to a {'resume' if on else 'suspend'}"
        container.obstacles.refused(at_s, why)
        report_of_trouble(container, why, at_s)

    def tries(self, container: GpuTimeContainer, at_s: float) -> bool:
        """Whether it is suspended again from now on, if the driver does it, after that did not work."""
        tries = container.tries(at_s)
        if tries:
            report_of_try(container)
        return tries

    def hear(self, container: GpuTimeContainer, number: int, said: wire.Activity, at_s: float, silent_s: float) -> None:
        """What its process says may show that suspends have no effect. `silent_s`: of one that resumed itself, how long the page said nothing."""
        if container.contradicts(number, said, at_s, silent=silent_s > SILENT_S):
            report_of_no_effect(container)

    def _doubts(self, container: GpuTimeContainer) -> None:
        self._counts.unreported_work += container.reports.unreported_work.proven
        report_of_doubt(container)
