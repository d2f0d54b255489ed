"""The containers with a connection for GPU time, by name and by the GPU threads on which they depend.

Facts from other parts of the arbiter may arrive before a container's first connection here, and are stored for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from arbiter.gputime.channels import ChannelGroup
from arbiter.gputime.container import GpuTimeContainer
from arbiter.identity import Identity

Known = TypeVar("Known", Mapping[int, str], Mapping[tuple[Identity, int], float])


class GpuTimeContainers(dict[str, GpuTimeContainer]):
    """By the name of the grant directory; changed by `add` and `remove` only. Under the lock of `NodeScheduler`."""

    def __init__(self) -> None:
        super().__init__()
        self._depending: dict[str, list[GpuTimeContainer]] = {}
        self._spanning: dict[str, list[GpuTimeContainer]] = {}
        self._exempt: dict[str, Mapping[int, str]] = {}
        self._contexts: dict[str, Mapping[tuple[Identity, int], float]] = {}

    def add(self, container: GpuTimeContainer) -> None:
        """The container's first connection came."""
        self[container.name] = container
        container.obstacles.exempt = self._exempt.get(container.name, {})
        container.obstacles.contexts_s = dict(self._contexts.get(container.name, {}))
        self.moved()

    def remove(self, name: str) -> GpuTimeContainer | None:
        """Its grant is gone: discard all facts about its processes."""
        self._exempt.pop(name, None)
        self._contexts.pop(name, None)
        self.moved()
        return self.pop(name, None)

    def moved(self) -> None:
        """The threads on which a container depends have changed."""
        self._depending.clear()
        self._spanning.clear()

    def depending(self, gpu: str) -> Sequence[GpuTimeContainer]:
        """The containers that the thread of a GPU reads or switches; called several times in each round."""
        found = self._depending.get(gpu)
        if found is None:
            found = self._depending[gpu] = [one for one in self.values() if gpu in one.depends_on()]
        return found

    def spanning(self, gpu: str) -> Sequence[GpuTimeContainer]:
        """Those of `depending` that have channels on several GPUs."""
        found = self._spanning.get(gpu)
        if found is None:
            found = self._spanning[gpu] = [one for one in self.depending(gpu) if len(one.gpus) > 1]
        return found

    def set_exempt(self, name: str, pids: Mapping[int, str]) -> GpuTimeContainer | None:
        """Set the processes that are never suspended, with the reasons. Returns the container if it has connected already."""
        _keep(self._exempt, name, pids)
        container = self.get(name)
        if container is not None:
            container.obstacles.set_exempt(pids)
        return container

    def contexts(self, name: str, begun_s: Mapping[tuple[Identity, int], float]) -> None:
        """Set since when each of its processes has had a context on each GPU of its grant."""
        _keep(self._contexts, name, begun_s)
        if name in self:
            self[name].obstacles.contexts_s = dict(begun_s)

    def has_contexts(self, name: str) -> bool:
        """Whether a process of it has a context, whether or not it has connected here."""
        return bool(self._contexts.get(name))

    def to_report(self, at_s: float) -> set[str]:
        """Names of the containers with unreported work, or that another process stops."""
        return {name for name, one in self.items() if one.reports.unreported_work.proven or one.watchdog.stopped(at_s)}

    def watched(self) -> dict[str, tuple[frozenset[str], frozenset[int]]]:
        """GPUs and host pids of each that the GPU-time scheduler knows."""
        return {
            name: (container.joined.gpus, frozenset(process.pid for process in container.processes.values()))
            for name, container in self.items()
            if container.joined is not None
        }

    def channel_groups(self) -> list[tuple[bool, ChannelGroup]]:
        """The channel groups of all processes, each with whether its driver is never called to suspend it."""
        return [
            (container.obstacles.denied, channel_group)
            for container in self.values()
            for process in container.processes.values()
            for channel_group in process.channel_groups.values()
        ]


def _keep(kept: dict[str, Known], name: str, known: Known) -> None:
    """Store nothing for a container without such processes: its grant directory may be gone."""
    if known:
        kept[name] = known
    else:
        kept.pop(name, None)
