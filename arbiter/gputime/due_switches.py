"""The switches that are due on each GPU of a node, and which of them a GPU's thread makes next.

`vgpu.gputime.switch_order` decides the order. This module states what is due, wakes the threads that wait for another GPU, and notices when a GPU of
a container with several does not answer. Under the lock of `NodeScheduler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from arbiter.gputime.channels import ChannelState
from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.containers import GpuTimeContainers
from arbiter.gputime.log_messages import report_of_answer, report_of_hung
from arbiter.gputime.suspend_threads import SuspendThreads
from vgpu.gputime.events import Hung
from vgpu.gputime.switch_order import DueSwitch, next_switch

HUNG_S: Final = 0.25
"""A thread that makes no progress for this long waits for its driver, or was stalled with the arbiter (`arbiter.stalls`). Guessed: a switch takes
half a millisecond, and a container of a busy GPU gets a time slice within a frame of 50."""


class DueSwitches:
    """See the module."""

    def __init__(self, containers: GpuTimeContainers, threads: SuspendThreads) -> None:
        self._containers, self._threads = containers, threads
        self._hung: dict[str, GpuTimeContainer] = {}
        """Of these a GPU does not answer, as the policy knows it."""

    def next(self, gpu: str) -> tuple[GpuTimeContainer, bool] | None:
        """The container to switch next on a GPU, and whether to resume it."""
        found = next_switch(gpu, self._due)
        return None if found is None else (self._containers[found.name], found.on)

    def hung(self, gpu: str, at_s: float) -> list[Hung]:
        """Events for the containers with several GPUs of which one stopped to answer, of those that depend on `gpu`, and for all of which all answer again.
        One that runs on all of its GPUs is not concerned."""
        events = []
        for name, container in [*self._hung.items()]:
            if self._containers.get(name) is not container or not self._hangs(container, at_s):
                del self._hung[name]
                events.append(Hung(at_s, name, hung=False))
                report_of_answer(container)
        for container in self._containers.spanning(gpu):
            if container.shown_on is False and container.name not in self._hung and self._hangs(container, at_s):
                self._hung[container.name] = container
                events.append(Hung(at_s, container.name, hung=True))
                report_of_hung(container, self._threads.overdue_s(container, at_s))
        return events

    def wake_waiting(self, gpus: Iterable[str]) -> None:
        """A suspend on one of these GPUs may not be due any more: wake the other GPUs of the containers that waited for it."""
        waiting = (one for gpu in gpus for one in self._containers.spanning(gpu))
        for container in {one.name: one for one in waiting if one.wanted and one.shown_on is False}.values():
            self._threads.wake(container)

    def _hangs(self, container: GpuTimeContainer, at_s: float) -> bool:
        return len(container.gpus) > 1 and self._threads.overdue_s(container, at_s) >= HUNG_S

    def _due(self, gpu: str) -> Iterator[DueSwitch]:
        for container in self._containers.depending(gpu):
            todo = container.to_do(gpu) if gpu in container.gpus else None  # else this thread only reads it
            if todo is not None:
                yield DueSwitch(container.name, todo, container.gpus, at_once=todo and _is_owed(container, gpu))


def _is_owed(container: GpuTimeContainer, gpu: str) -> bool:
    """Whether channels of it on this GPU may be disabled without the arbiter's decision, or it is to be suspended after the resume."""
    unsure = any(one.runs is ChannelState.UNSURE for one in container.channel_groups(gpu))
    return unsure or not container.wanted
