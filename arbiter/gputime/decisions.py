"""What the thread of a GPU calls of its node's scheduler, `arbiter.gputime.scheduler`, so that the thread imports no scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from arbiter.connection import Connection
from arbiter.gputime.channels import ChannelGroup
from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.counts import Counts
from arbiter.gputime.preemption_plan import Orders
from arbiter.gputime.watchdog import Watchdog
from arbiter.stalls import Pulse
from vgpu.gputime.scheduler import GpuTimeScheduler
from vgpu.protocol import wire


class Decisions(Protocol):
    """Of one node. All but `fail` is called under `lock`."""

    clock: Callable[[], float]
    lock: threading.Lock
    pulse: Pulse
    policy: GpuTimeScheduler
    counts: Counts
    orders: Orders
    watchdog: Watchdog

    def hear(
        self, container: GpuTimeContainer, connection: Connection, message: wire.Message, fd: int | None, at_s: float
    ) -> None:
        """A message came. Raises BadDocument."""

    def lose(self, container: GpuTimeContainer, connection: Connection) -> list[ChannelGroup]:
        """A process is gone: its channel groups."""

    def hush(self, container: GpuTimeContainer, *, unheard: bool) -> None:
        """A container is not read for a while, or is again."""

    def step(self, gpu: str) -> tuple[GpuTimeContainer, bool] | None:
        """What to switch next on a GPU, and whether to resume or suspend it."""

    def switched(self, container: GpuTimeContainer, on: bool, status: int, took_s: float) -> None:
        """It was resumed or suspended, or the driver refused."""

    def stopped(self, container: GpuTimeContainer, at_s: float, status: int, took_s: float) -> None:
        """It was suspended by an order, for a message of `at_s`."""

    def stalled(self, gpu: str, since_s: float, at_s: float) -> None:
        """The thread did not run in this time."""

    def give_orders(self, gpu: str) -> None:
        """Nothing is to be switched on a GPU now."""

    def decide_again_s(self, gpu: str) -> float:
        """When to decide again, if nothing happens before."""

    def beat(self, gpu: str, late: bool) -> bool:
        """The thread is alive. Does a container of its GPU depend on that?"""

    def fail(self) -> None:
        """The thread failed."""
