"""Which container to suspend the moment a request comes, computed before it comes.

To read a message, decide and find the next switch takes Python 0.25 ms after a sleep (measured on the H200's
machine: its code is not in the processor's cache by then), and the request waits. So when a GPU's thread has nothing left to do, it
precomputes which containers each latency-critical container would preempt. When that container reports work, the thread suspends the first
of these at once. The other suspends follow as always.

The plan is computed again whenever the thread has nothing left to do, and discarded when anything happens. It names only containers that this
thread alone reads and switches: none with several GPUs, granted or used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from arbiter.gputime.channels import ChannelGroup
from arbiter.gputime.container import GpuTimeContainer
from vgpu.gputime.scheduler import GpuTimeScheduler
from vgpu.protocol import wire

BEGINS: Final = (wire.ActivityKind.WORK, wire.ActivityKind.HINT, wire.ActivityKind.BEGIN_SECTION)


class PlannedSuspend(NamedTuple):
    """Which container to suspend first, and its channel groups on the GPU."""

    container: GpuTimeContainer
    channel_groups: list[ChannelGroup]


class SuspendPlan:
    """The plans of all GPUs. Under the lock of `NodeScheduler`."""

    def __init__(self, lead_s: float) -> None:
        self._lead_us = lead_s * 1e6
        """Work that is announced for later suspends no container yet."""
        self._gpus: dict[str, dict[GpuTimeContainer, PlannedSuspend]] = {}

    def compute(
        self,
        gpu: str,
        depending: Iterable[GpuTimeContainer],
        containers: Mapping[str, GpuTimeContainer],
        policy: GpuTimeScheduler,
    ) -> None:
        """Compute the plan of the present state. `depending`: the containers that the GPU's thread reads or switches."""
        urgent = [t for t in depending if t.urgent and _is_this_threads(t, gpu) and not t.distrusted]
        found = {t: [o for name in policy.gives_way(t.name) if _obeys(o := containers[name], gpu)] for t in urgent}
        self._gpus[gpu] = {
            t: PlannedSuspend(stops[0], stops[0].channel_groups(gpu)) for t, stops in found.items() if stops
        }

    def discard(self, gpus: Iterable[str] | None = None) -> None:
        """The state of these GPUs, or of all, changed."""
        for gpu in list(self._gpus) if gpus is None else gpus:
            self._gpus.pop(gpu, None)

    def suspend_for(self, gpu: str, container: GpuTimeContainer, message: wire.Message) -> PlannedSuspend | None:
        """The container to suspend first on this GPU for this message."""
        planned = self._gpus.get(gpu)
        if not planned or not isinstance(message, wire.Activity) or message.what not in BEGINS:
            return None
        if message.what is wire.ActivityKind.HINT and message.value > self._lead_us:
            return None
        return planned.get(container)


def _is_this_threads(container: GpuTimeContainer, gpu: str) -> bool:
    return container.gpus == container.depends_on() == {gpu}


def _obeys(container: GpuTimeContainer, gpu: str) -> bool:
    """Whether one call certainly suspends it: all of it runs."""
    return _is_this_threads(container, gpu) and not container.gates and container.is_on(gpu)
