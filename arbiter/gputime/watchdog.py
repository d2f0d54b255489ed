"""Resumes a container that is to run and has work, and whose processes report nothing for long: perhaps another process suspended it.

`vgpu.gputime.watchdog` decides when one container is due; this module finds the one that is, for the thread of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.counts import Counts
from vgpu.protocol import wire


class Watchdog:
    """Of one node. `wait_s`: 0 = no container is resumed. Under the lock of `NodeScheduler`."""

    def __init__(self, depending: Callable[[str], Sequence[GpuTimeContainer]], counts: Counts, wait_s: float) -> None:
        self._depending, self._counts, self._wait_s = depending, counts, wait_s

    def heard(self, container: GpuTimeContainer, message: wire.Message, at_s: float) -> None:
        """A message of its came. That it launches does not say that it runs."""
        what = message.what if isinstance(message, wire.Activity) else None
        if what is wire.What.IDLE:
            container.watchdog.ended(at_s, self._wait_s)
        if what is not wire.What.STILL:
            container.watchdog.heard(at_s)

    def resume_stopped(self, gpu: str, at_s: float) -> GpuTimeContainer | None:
        """One that is due on a GPU. The caller resumes it."""
        for container in self._watched(gpu):
            if at_s >= container.watchdog.due_s(gpu, self._wait_s):
                container.watchdog.resumed(gpu, at_s, self._wait_s)
                container.watchdog_resumes += 1
                self._counts.watchdog_resumes += 1
                return container
        return None

    def next_s(self, gpu: str) -> float:
        """When `resume_stopped` has something to do at the earliest; inf = not before the next report."""
        return min((container.watchdog.due_s(gpu, self._wait_s) for container in self._watched(gpu)), default=inf)

    def _watched(self, gpu: str) -> Iterator[GpuTimeContainer]:
        for container in self._depending(gpu) if self._wait_s else ():
            if (
                container.wanted
                and not container.obstacles.denied
                and container.says_work()
                and container.channel_groups(gpu)
            ):
                yield container
