"""Put each container's ID beside its grant, as soon as the pod's status has it: by it the arbiter distinguishes the containers of a pod.

PreStartContainer does not name the container that the kubelet makes, and the runtime's ID is made after that. Until the file is there the arbiter
counts the pod's grants as one. A container that starts again has another ID: the file follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, Protocol

import structlog

from deviceplugin.calls_in_progress import without_waiting
from deviceplugin.grants.allocation_record import Record
from deviceplugin.pods.node_pods import NodePods
from kube.objects import Pod
from vgpu.api.cgroup import is_container_id

RETRY_S: Final = 5.0

log = structlog.get_logger("deviceplugin.grants.container_ids")


class ContainerIdFiles(Protocol):
    """The grant directories, as `deviceplugin.grants.grant_directories.GrantDirectories` has them."""

    def of_pods(self, uids: Collection[str]) -> Mapping[str, Record]: ...

    def granted(self, key: str) -> bool: ...

    def identify(self, key: str, container_id: str) -> bool: ...


class ContainerIds:
    """Writes what is new after each change of any pod of the node. `until_idle` as `calls_in_progress.CallsInProgress.until_idle`."""

    def __init__(
        self, pods: NodePods, grants: ContainerIdFiles, until_idle: Callable[[], Awaitable[None]] = without_waiting
    ) -> None:
        self._pods, self._grants, self._until_idle = pods, grants, until_idle
        self._written: dict[str, str] = {}
        self._named: dict[str, tuple[Pod, dict[str, str]]] = {}
        """Pod UID -> the pod as it was seen, and its containers' IDs."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                self.once()
            except OSError as error:
                log.error("a container's ID could not be written", error=str(error), retry_s=RETRY_S)
                await asyncio.sleep(RETRY_S)
                continue
            await self._pods.changed()
            await self._until_idle()

    def once(self) -> None:
        """Check every pod that has changed once; files are written only for IDs that are new. Raises OSError."""
        before = self._named
        self._named = {
            uid: before[uid] if uid in before and before[uid][0] is pod else (pod, ids_of(pod))
            for uid, pod in self._pods.pods().items()
        }
        named = [uid for uid, (_, ids) in self._named.items() if ids]
        found = {
            key: container_id
            for key, record in (self._grants.of_pods(named) if named else {}).items()
            if (container_id := self._named[record.uid][1].get(record.container))
        }
        for key, container_id in found.items():
            if self._written.get(key) == container_id or not self._grants.granted(key):
                continue
            if self._grants.identify(key, container_id):
                log.info("container known", key=key, container_id=container_id)
            self._written[key] = container_id
        self._written = {key: of for key, of in self._written.items() if key in found}


def ids_of(pod: Pod) -> dict[str, str]:
    """Container name -> the runtime's ID of the last container of that name."""
    statuses = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    named = ((one.name, one.container_id.partition("://")[2]) for one in statuses)
    return {name: container_id for name, container_id in named if is_container_id(container_id)}
