"""What the arbiter concludes of containers: whether each can be suspended, and whether its usage reports count.

Each container has its own evidence (`arbiter.gputime.obstacles`, `arbiter.gputime.suspend_evidence`, `arbiter.gputime.usage_report`). This module passes
events to it, counts the verdicts of all containers, and logs changes. The caller acts on a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.counters import GpuTimeCounters
from arbiter.gputime.log_messages import (
    report_of_doubt,
    report_of_no_effect,
    report_of_no_trial,
    report_of_trouble,
    report_of_try,
)
from vgpu.gputime.trial_verdict import Suspendability
from vgpu.protocol import wire

SILENT_S: Final = 0.5
"""A container may resume itself if its thread has been silent for this long. Specified: the library waits 0.6 s."""
CHECKED_S: Final = 10.0
"""After this long without a comparison with the driver's count, usage counts as unchecked. Guessed: some readings."""


class ContainerVerdicts:
    """The verdicts on all containers; under the lock of `NodeScheduler`. `suspending`: whether channels on these GPUs may be suspended, by this boot's trial."""

    def __init__(self, counters: GpuTimeCounters, suspending: Callable[[Iterable[str]], Suspendability]) -> None:
        self._counters, self._suspending = counters, suspending
        self._checked_at_s = -inf

    def checks(self, at_s: float) -> bool:
        """Whether usage reports are compared with the driver's count."""
        return at_s - self._checked_at_s < CHECKED_S

    def checked(self, at_s: float) -> None:
        """The driver's count was read."""
        self._checked_at_s = at_s

    def weigh(self, container: GpuTimeContainer, at_s: float, seen_s: float, *, whole: bool) -> None:
        """The driver counted `seen_s` for it since the last reading; `whole`: the count is complete."""
        if container.weigh(at_s, seen_s):
            self._doubts(container)
        self._counters.unreported_ends += container.ends_work(at_s, seen_s if whole else None)

    def forgets(self, container: GpuTimeContainer, at_s: float) -> bool:
        """Returns whether the verdict on its reports ends, because there was no comparison for long."""
        forgets = container.reports.forgets(at_s)
        if forgets:
            self._doubts(container)
        return forgets

    def judge(self, container: GpuTimeContainer, at_s: float) -> None:
        """Decide whether its GPUs and their driver allow suspends."""
        obstacles = container.obstacles
        obstacles.suspending = self._suspending([gpu.uuid for gpu in container.grant.gpus])
        if obstacles.denied:
            report_of_trouble(container, obstacles.suspending.why, at_s)
        elif obstacles.suspending.why:
            report_of_no_trial(container)

    def refused(self, container: GpuTimeContainer, on: bool, status: int, at_s: float) -> None:
        """The driver refused to resume or suspend it."""
        self._counters.failures += not on
        container.obstacles.failures += not on
        why = f"the driver answered {status & 0xFFFFFFFF:#x} to a {'resume' if on else 'suspend'}"
        container.obstacles.refused(at_s, why)
        report_of_trouble(container, why, at_s)

    def tries(self, container: GpuTimeContainer, at_s: float) -> bool:
        """Returns whether a new attempt to suspend it begins, after suspends did not work."""
        tries = container.tries(at_s)
        if tries:
            report_of_try(container)
        return tries

    def take_activity(
        self, container: GpuTimeContainer, number: int, activity: wire.Activity, at_s: float, silent_s: float
    ) -> None:
        """A report may show that suspends have no effect. `silent_s`: for a process that resumed itself, how long the page showed no heartbeat."""
        if container.contradicts(number, activity, at_s, silent=silent_s > SILENT_S):
            report_of_no_effect(container)

    def _doubts(self, container: GpuTimeContainer) -> None:
        self._counters.unreported_work += container.reports.unreported_work.proven
        report_of_doubt(container)
