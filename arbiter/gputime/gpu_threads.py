"""The threads of a node's GPUs: which there are, which of them a container depends on, and how long one has been silent."""

from __future__ import annotations

from collections.abc import Callable

from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.gpu_thread import GpuThread
from arbiter.stalls import Pulse


class GpuThreads:
    """By GPU. All but `stuck` is called under the lock of the node's scheduler. `pulse` runs as soon as there is a thread."""

    def __init__(self, make: Callable[[str], GpuThread], pulse: Pulse, clock: Callable[[], float]) -> None:
        self._make, self._pulse, self._clock = make, pulse, clock
        self._gpu_threads: dict[str, GpuThread] = {}

    def of(self, uuid: str) -> GpuThread:
        """The thread of a GPU, which is started when it is needed first."""
        if uuid not in self._gpu_threads:
            self._pulse.start()
            self._gpu_threads[uuid] = self._make(uuid)
            self._gpu_threads[uuid].start()
        return self._gpu_threads[uuid]

    def reader_of(self, container: GpuTimeContainer) -> GpuThread:
        """The thread that reads a container's messages."""
        return self.of(container.grant.gpus[0].uuid)

    def all(self) -> list[GpuThread]:
        """Those that were started."""
        return list(self._gpu_threads.values())

    def wake(self, container: GpuTimeContainer) -> None:
        """There is something to do on its GPUs."""
        for uuid in container.gpus:
            self.of(uuid).wake()

    def beat_soon(self, container: GpuTimeContainer) -> None:
        """It is suspended or waits from now on."""
        for uuid in container.depends_on():
            self.of(uuid).beat_soon()

    def stay_awake(self, container: GpuTimeContainer, until_s: float) -> None:
        """A container with a request has the next one soon, which is to be served at once."""
        for uuid in container.depends_on():
            self.of(uuid).awake_until_s = until_s

    def alive_ms(self, container: GpuTimeContainer) -> int:
        """When the thread that has been silent for longest, of those that read or switch this container, came round last."""
        return int(self._alive_at_s(container) * 1000)

    def silent_s(self, container: GpuTimeContainer, at_s: float) -> float:
        """How long a thread that a container depends on has not come round."""
        return max(0.0, at_s - self._alive_at_s(container)) if container.joined is not None else 0.0

    def stuck(self, at_s: float) -> tuple[str, float]:
        """The GPU whose thread has not come round for longest, and for how long; without the lock, which that may hold."""
        ages = {uuid: at_s - gpu_thread.alive_at_s for uuid, gpu_thread in self._gpu_threads.copy().items()}
        return max(ages.items(), key=lambda of: of[1], default=("", 0.0))

    def _alive_at_s(self, container: GpuTimeContainer) -> float:
        at_s = self._clock()
        ours = (self._gpu_threads[uuid].lived_s(at_s) for uuid in container.depends_on() if uuid in self._gpu_threads)
        return min(ours, default=at_s)
