"""Blocks: containers that must not run, because memory of them is being swapped out or is away.

A kernel or a copy that touches memory which is not mapped ends its process. So nothing of a blocked container runs: its compute and copy channels are
suspended, and nothing resumes them until the block ends. That includes the watchdog, the end of this arbiter, and a new arbiter, to which a process reports with its
channels that memory of it is away. What the caller does to the memory begins when `status` shows that the container is halted. It compares the `halts`
afterwards, because a container that ran for a moment between two looks may have changed its memory.

A container that is not blocked is resumed when in doubt. A blocked one is suspended when in doubt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from arbiter.gputime.channels import Halt
from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.containers import GpuTimeContainers
from arbiter.gputime.obstacles import NO_CHANNELS
from vgpu.gputime.events import Block, Event, Unblock

NO_EFFECT: Final = "its work ends while it is suspended: suspends have no effect"


class BlockStatus(NamedTuple):
    """How far the suspend of a blocked container is."""

    halted: bool
    """No channel of it runs, and none will until the block ends or a process reports new channels."""
    obstacle: str = ""
    """Why it cannot be halted now; empty = it is halted, or soon will be."""
    halts: frozenset[Halt] = frozenset()
    """Of a halted container: the suspend of each of its channel groups."""

    def since(self, halts: frozenset[Halt]) -> bool:
        """Whether it is halted, and has been without a break since its status had these halts. The end of a process is no break; channels that were reported
        since then are one, because they ran until they were suspended."""
        return self.halted and self.halts <= halts


class Blocks:
    """The blocks of one node, by the name of the grant directory. `lock` is that of the node's scheduler: `begin`, `end` and `status` acquire it, the
    other methods are called under it. `apply` passes an event to the policy; `settle` publishes the container's state and wakes its threads."""

    def __init__(
        self,
        lock: threading.Lock,
        containers: GpuTimeContainers,
        clock: Callable[[], float],
        apply: Callable[[Event], None],
        settle: Callable[[GpuTimeContainer], None],
    ) -> None:
        self._lock, self._containers, self._clock = lock, containers, clock
        self._apply, self._settle = apply, settle
        self._names: set[str] = set()

    def begin(self, name: str) -> None:
        """Nothing of this container may run from now on. Also for one of which no process has reported channels yet."""
        with self._lock:
            self._names.add(name)
            if (container := self._containers.get(name)) is not None:
                self._block(container)

    def end(self, name: str) -> None:
        """All memory of this container is resident again, and stays so."""
        with self._lock:
            self._names.discard(name)
            container = self._containers.get(name)
            if container is None or not container.blocked:
                return
            container.block(blocked=False)
            container.obstacles.changed_channels()  # a refused suspend is undone now
            if container.joined is not None:
                self._apply(Unblock(self._clock(), name))
            self._settle(container)

    def status(self, name: str) -> BlockStatus:
        """Whether a blocked container is halted. Not of one that is not blocked."""
        with self._lock:
            if name not in self._names:
                return BlockStatus(False, "it is not blocked")
            container = self._containers.get(name)
            if container is None:
                without = self._containers.has_contexts(name)
                return BlockStatus(not without, NO_CHANNELS if without else "")
            if container.gates:
                return BlockStatus(False, container.obstacles.why or NO_EFFECT)
            if container.obstacles.without_channels():
                return BlockStatus(False, NO_CHANNELS)
            groups = container.channel_groups()
            if not all(channel_group.stands for channel_group in groups):
                return BlockStatus(False)
            return BlockStatus(True, halts=frozenset(channel_group.halt for channel_group in groups))

    def admit(self, container: GpuTimeContainer) -> None:
        """The container's first process connected."""
        container.block(blocked=container.name in self._names)

    def away(self, container: GpuTimeContainer, number: int) -> None:
        """A process of it reports with its channels that memory of it is away. With its first channels on a connection: an earlier arbiter swapped it
        out. Later this arbiter knows better: the report may have crossed the end of the block."""
        first = not container.processes[number].channel_groups
        if first and container.page is not None and container.name not in self._names:
            self._names.add(container.name)
            self._block(container)

    def forget(self, name: str) -> None:
        """The grant is gone."""
        self._names.discard(name)

    def _block(self, container: GpuTimeContainer) -> None:
        container.block(blocked=True)
        if container.joined is not None:
            self._apply(Block(self._clock(), container.name))
        self._settle(container)
