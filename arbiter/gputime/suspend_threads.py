"""The threads of a node's GPUs: which exist, on which of them a container depends, and how long one has been silent."""

from __future__ import annotations

from collections.abc import Callable

from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.suspend_thread import SuspendThread
from arbiter.stalls import Pulse


class SuspendThreads:
    """By GPU. All but `stuck` is called under the lock of the node's scheduler. `pulse` runs as soon as there is a thread."""

    def __init__(self, make: Callable[[str], SuspendThread], pulse: Pulse, clock: Callable[[], float]) -> None:
        self._make, self._pulse, self._clock = make, pulse, clock
        self._threads: dict[str, SuspendThread] = {}

    def of(self, uuid: str) -> SuspendThread:
        """The thread of a GPU; started at the first call."""
        if uuid not in self._threads:
            self._pulse.start()
            self._threads[uuid] = self._make(uuid)
            self._threads[uuid].start()
        return self._threads[uuid]

    def reader_of(self, container: GpuTimeContainer) -> SuspendThread:
        """The thread that reads a container's messages."""
        return self.of(container.grant.gpus[0].uuid)

    def all(self) -> list[SuspendThread]:
        """All started threads."""
        return list(self._threads.values())

    def wake(self, container: GpuTimeContainer) -> None:
        """Wake the threads of the container's GPUs."""
        for uuid in container.gpus:
            self.of(uuid).wake()

    def beat_soon(self, container: GpuTimeContainer) -> None:
        """The container is suspended or waits from now on."""
        for uuid in container.depends_on():
            self.of(uuid).beat_soon()

    def stay_awake(self, container: GpuTimeContainer, until_s: float) -> None:
        """A container with a request usually sends the next one soon, which is to be served at once."""
        for uuid in container.depends_on():
            self.of(uuid).awake_until_s = until_s

    def alive_ms(self, container: GpuTimeContainer) -> int:
        """The last round of the longest silent thread among those that read or switch this container."""
        return int(self._alive_at_s(container) * 1000)

    def silent_s(self, container: GpuTimeContainer, at_s: float) -> float:
        """How long ago the longest silent thread of the container completed its last round."""
        return max(0.0, at_s - self._alive_at_s(container)) if container.joined is not None else 0.0

    def overdue_s(self, container: GpuTimeContainer, at_s: float) -> float:
        """For how long the slowest thread of the container has made no progress with what is due. A thread that sleeps until then is not slow."""
        ours = (self._threads[uuid].overdue_s(at_s) for uuid in container.depends_on() if uuid in self._threads)
        return max(ours, default=0.0)

    def stuck(self, at_s: float) -> tuple[str, float]:
        """The GPU whose thread has been silent for longest, and for how long; without the lock, which that thread may hold."""
        ages = {uuid: at_s - suspend_thread.alive_at_s for uuid, suspend_thread in self._threads.copy().items()}
        return max(ages.items(), key=lambda of: of[1], default=("", 0.0))

    def _alive_at_s(self, container: GpuTimeContainer) -> float:
        at_s = self._clock()
        ours = (self._threads[uuid].lived_s(at_s) for uuid in container.depends_on() if uuid in self._threads)
        return min(ours, default=at_s)
