"""Resumes a container that is allowed to run and has work, but sends no report for long: perhaps another process suspended it.

`vgpu.gputime.watchdog` decides when a container is due; this module finds the due container for the thread of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.counters import GpuTimeCounters
from vgpu.protocol import wire


class Watchdog:
    """The watchdog of one node. `wait_s`: 0 = no container is resumed. Under the lock of `NodeScheduler`."""

    def __init__(
        self, depending: Callable[[str], Sequence[GpuTimeContainer]], counters: GpuTimeCounters, wait_s: float
    ) -> None:
        self._depending, self._counters, self._wait_s = depending, counters, wait_s

    def note_report(self, container: GpuTimeContainer, message: wire.Message, at_s: float) -> None:
        """The container sent a message. A report of launches does not show that it runs."""
        what = message.what if isinstance(message, wire.Activity) else None
        if what is wire.ActivityKind.IDLE:
            container.watchdog.ended(at_s, self._wait_s)
        if what is not wire.ActivityKind.STILL:
            container.watchdog.note_report(at_s)

    def resume_stopped(self, gpu: str, at_s: float) -> GpuTimeContainer | None:
        """A container that is due on a GPU. The caller resumes it."""
        for container in self._watched(gpu):
            if at_s >= container.watchdog.due_s(gpu, self._wait_s):
                container.watchdog.resumed(gpu, at_s, self._wait_s)
                container.watchdog_resumes += 1
                self._counters.watchdog_resumes += 1
                return container
        return None

    def next_s(self, gpu: str) -> float:
        """When `resume_stopped` is to be called next at the earliest; inf = not before the next report."""
        return min((container.watchdog.due_s(gpu, self._wait_s) for container in self._watched(gpu)), default=inf)

    def _watched(self, gpu: str) -> Iterator[GpuTimeContainer]:
        for container in self._depending(gpu) if self._wait_s else ():
            if (
                container.wanted
                and not container.obstacles.denied
                and container.reports_work()
                and container.channel_groups(gpu)
            ):
                yield container
