"""Which containers have a connection for GPU time, by name and by the GPU threads that they depend on.

What other parts of the arbiter know of a container's processes may come before its first connection here, and is kept for it.
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
        self._exempt: dict[str, Mapping[int, str]] = {}
        self._contexts: dict[str, Mapping[tuple[Identity, int], float]] = {}

    def add(self, container: GpuTimeContainer) -> None:
        """Its first connection came."""
        self[container.name] = container
        container.obstacles.exempt = self._exempt.get(container.name, {})
        container.obstacles.contexts_s = dict(self._contexts.get(container.name, {}))
        self.moved()

    def remove(self, name: str) -> GpuTimeContainer | None:
        """Its grant is gone, with all that was known of its processes."""
        self._exempt.pop(name, None)
        self._contexts.pop(name, None)
        self.moved()
        return self.pop(name, None)

    def moved(self) -> None:
        """One of them depends on other threads than before."""
        self._depending.clear()

    def depending(self, gpu: str) -> Sequence[GpuTimeContainer]:
        """Those that the thread of a GPU reads or switches; called several times in each round."""
        found = self._depending.get(gpu)
        if found is None:
            found = self._depending[gpu] = [one for one in self.values() if gpu in one.depends_on()]
        return found

    def spare(self, name: str, pids: Mapping[int, str]) -> GpuTimeContainer | None:
        """These of its processes are never suspended, for these reasons. Returns it, where it has come already."""
        _keep(self._exempt, name, pids)
        container = self.get(name)
        if container is not None:
            container.obstacles.spare(pids)
        return container

    def contexts(self, name: str, begun_s: Mapping[tuple[Identity, int], float]) -> None:
        """Since when each of its processes has had a context on each GPU of its grant."""
        _keep(self._contexts, name, begun_s)
        if name in self:
            self[name].obstacles.contexts_s = dict(begun_s)

    def to_report(self, at_s: float) -> set[str]:
        """Names of those that compute without a word, or are stopped by another."""
        return {name for name, one in self.items() if one.reports.unreported_work.proven or one.watchdog.stopped(at_s)}

    def channel_groups(self) -> list[tuple[GpuTimeContainer, ChannelGroup]]:
        """The channels of all their processes."""
        return [
            (container, channel_group)
            for container in self.values()
            for process in container.processes.values()
            for channel_group in process.channel_groups.values()
        ]


def _keep(kept: dict[str, Known], name: str, known: Known) -> None:
    """Nothing is kept of a container without such processes: its grant directory may be gone."""
    if known:
        kept[name] = known
    else:
        kept.pop(name, None)
