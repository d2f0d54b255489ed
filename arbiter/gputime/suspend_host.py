"""The interface of `arbiter.gputime.node_scheduler` that a GPU's thread calls, so that the thread imports no scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from arbiter.connection import Connection
from arbiter.gputime.channels import ChannelGroup
from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.counters import GpuTimeCounters
from arbiter.gputime.suspend_plan import SuspendPlan
from arbiter.gputime.watchdog import Watchdog
from arbiter.stalls import Pulse
from vgpu.gputime.scheduler import GpuTimeScheduler
from vgpu.protocol import wire


class SuspendHost(Protocol):
    """The scheduler of one node. All methods but `fail` are called under `lock`."""

    clock: Callable[[], float]
    lock: threading.Lock
    pulse: Pulse
    policy: GpuTimeScheduler
    counters: GpuTimeCounters
    suspend_plan: SuspendPlan
    watchdog: Watchdog

    def handle(
        self, container: GpuTimeContainer, connection: Connection, message: wire.Message, fd: int | None, at_s: float
    ) -> None:
        """Handle a message. Raises BadDocument."""

    def lose(self, container: GpuTimeContainer, connection: Connection) -> list[ChannelGroup]:
        """A process is gone. Returns its channel groups."""

    def set_throttled(self, container: GpuTimeContainer, *, throttled: bool) -> None:
        """A container is not read for a while, or is again."""

    def step(self, gpu: str) -> tuple[GpuTimeContainer, bool] | None:
        """The next container to switch on a GPU, and whether to resume or suspend it."""

    def switched(self, container: GpuTimeContainer, on: bool, status: int, took_s: float) -> None:
        """It was resumed or suspended, or the driver refused."""

    def suspended(self, container: GpuTimeContainer, at_s: float, status: int, took_s: float) -> None:
        """It was suspended as planned, for a message of `at_s`."""

    def stalled(self, gpu: str, since_s: float, at_s: float) -> None:
        """The thread did not run in this time."""

    def plan_suspends(self, gpu: str) -> None:
        """There is nothing to switch on a GPU now."""

    def decide_again_s(self, gpu: str) -> float:
        """When to decide again, if nothing happens before."""

    def beat(self, gpu: str, late: bool) -> bool:
        """The thread is alive. Returns whether a container of its GPU reads the heartbeat."""

    def fail(self) -> None:
        """The thread failed."""
