"""Whom to stop the moment a request comes, found out before it comes.

To hear a message, decide and look for what is to be switched takes Python 0.25 ms when it has slept before (measured on the H200's
machine: its code is not in the processor's cache by then), and the request waits. So when a GPU's thread has nothing left to do, it
asks the policy whom each latency-critical container would drive away, and stops the first of these when that container has work. What else there
is to stop follows as always.

Orders are found out anew whenever the thread has nothing left to do, and forgotten when anything happens. They name only containers that nobody but this
thread hears of and switches: none with several GPUs, granted or used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from arbiter.gputime.channels import ChannelGroup
from arbiter.gputime.container import GpuTimeContainer
from vgpu.gputime.scheduler import Share
from vgpu.protocol import wire

BEGINS: Final = (wire.What.WORK, wire.What.HINT, wire.What.BEGIN_SECTION)


class Order(NamedTuple):
    """Whom to stop first, and what of it there is on the GPU."""

    container: GpuTimeContainer
    channel_groups: list[ChannelGroup]


class Orders:
    """Of all GPUs. Under the lock of `Turns`."""

    def __init__(self, lead_s: float) -> None:
        self._lead_us = lead_s * 1e6
        """What is announced for later is no order yet."""
        self._gpus: dict[str, dict[GpuTimeContainer, Order]] = {}

    def give(
        self, gpu: str, depending: Iterable[GpuTimeContainer], containers: Mapping[str, GpuTimeContainer], share: Share
    ) -> None:
        """As things stand now; `depending`: those of the containers that the GPU's thread reads or switches."""
        urgent = [t for t in depending if t.urgent and _is_this_threads(t, gpu) and not t.distrusted]
        found = {t: [o for name in share.gives_way(t.name) if _obeys(o := containers[name], gpu)] for t in urgent}
        self._gpus[gpu] = {t: Order(stops[0], stops[0].channel_groups(gpu)) for t, stops in found.items() if stops}

    def forget(self, gpus: Iterable[str] | None = None) -> None:
        """Things stand otherwise on these, or on all."""
        for gpu in list(self._gpus) if gpus is None else gpus:
            self._gpus.pop(gpu, None)

    def of(self, gpu: str, container: GpuTimeContainer, message: wire.Message) -> Order | None:
        """Whom to stop there first for this message."""
        orders = self._gpus.get(gpu)
        if not orders or not isinstance(message, wire.Activity) or message.what not in BEGINS:
            return None
        if message.what is wire.What.HINT and message.value > self._lead_us:
            return None
        return orders.get(container)


def _is_this_threads(container: GpuTimeContainer, gpu: str) -> bool:
    return container.gpus == container.depends_on() == {gpu}


def _obeys(container: GpuTimeContainer, gpu: str) -> bool:
    """Is it known to be suspended when it is told to? All of it runs."""
    return _is_this_threads(container, gpu) and not container.gates and container.is_on(gpu)
