"""What a container needs of its node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from arbiter.gputime.blocks import BlockStatus
from arbiter.swap.host_pool import HostPool
from vgpu.memory.swap.events import ContainerEvent


class Blocking(Protocol):
    """`arbiter.gputime.blocks.Blocks`."""

    def begin(self, name: str) -> None:
        """Nothing of it runs from now on."""

    def end(self, name: str) -> None:
        """It may run."""

    def status(self, name: str) -> BlockStatus:
        """How far its suspend is."""


class ContainerHost(Protocol):
    """The node, to its containers."""

    clock: Callable[[], float]

    @property
    def blocks(self) -> Blocking:
        """Pauses containers."""

    started_at: Callable[[int], int]
    image_of: Callable[[int], int]

    def pool(self, gpu: str) -> HostPool:
        """Of a GPU."""

    def apply(self, event: ContainerEvent) -> None:
        """To the policy."""

    def paused(self, name: str) -> bool:
        """Whether the policy has decided that it must not run, or has yet to decide."""

    def recall(self, name: str, gpu: str, size_bytes: int) -> None:
        """Request unused leases."""

    def owes(self, name: str, gpu: str) -> bool:
        """Whether a process has yet to answer that."""

    def states(self, name: str, pid: int, gpu: str, elastic_bytes: int) -> None:
        """A process has so much elastic memory."""

    def knows_limits(self, gpu: str) -> bool:
        """Whether limits above guarantees apply to a GPU or not; False: that will be known soon."""

    def activate(self, name: str) -> None:
        """Its turn is due."""
