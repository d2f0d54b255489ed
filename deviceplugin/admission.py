"""Before a container starts: make sure whose devices these are, write its grant, and see that what it mounts is there.

Here the kubelet's own records name the pod for the first time, so this is where guesses end. Which of the pod's containers starts they
do not always name, so each one that has these devices gets its grant (`grants.grant_directories`). Whatever is missing or wrong fails the
start with a sentence: a container without its library, its grant or its arbiter does not run at all.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec
import structlog

from deviceplugin.allocation import NodePod
from deviceplugin.device_ledger import DeviceLedger
from deviceplugin.grants.allocation_record import Record
from deviceplugin.grants.grant_directories import GrantDirectories, GrantDirectory
from deviceplugin.grants.lookup import as_far_as_another, containers_of
from deviceplugin.numa_check import misaligned
from deviceplugin.pods.burst import BurstUpdater
from deviceplugin.pods.node_pods import NodePods, initialized
from deviceplugin.pods.usage_records import UsageRecord, UsageRecords
from kube.errors import ApiError
from kube.objects import Pod
from vgpu.api.burst import BurstLimits
from vgpu.api.contract import grant_for
from vgpu.api.errors import Refused
from vgpu.api.inventory import Inventory
from vgpu.api.names import DEFAULT_OVER_LIMIT_ACTION, Names, OverLimitAction, stricter

WATCH_WAIT_S: Final = 2.0
"""For the watch to bring the pod before it is read by name."""
ARBITER_WAIT_S: Final = 5.0
"""For the arbiter to listen in a new folder. It answers within milliseconds unless it is being restarted."""
ARBITER_POLL_S: Final = 0.01

T = TypeVar("T")

log = structlog.get_logger("deviceplugin.admission")


class KubeletRecords(Protocol):
    """The kubelet's own records."""

    async def holders(self, resource: str, ids: Collection[str]) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
        """As `pod_resources` answers."""


@dataclass(frozen=True, slots=True)
class StartingPod:
    """The pod of the container that is about to start."""

    pod: Pod
    node_pod: NodePod
    listed: tuple[str, ...]
    """Its containers that the kubelet's records name with these devices; they leave out init containers."""


class StartRefused(Refused):
    """The start was refused; `pod` is the pod that starts, when known."""

    def __init__(self, text: str, pod: Pod | None = None) -> None:
        super().__init__(text)
        self.pod = pod


class PodGone(StartRefused):
    """The API server answers, and has no such pod that could start anything. It is final for this pod."""


class ApiUnavailable(StartRefused):
    """It is unknown whether the pod still exists. The kubelet retries the start by itself."""

    def __init__(self, namespace: str, name: str, error: ApiError) -> None:
        super().__init__(
            f"pod {namespace}/{name} is not known here yet, and the API server does not answer whether it exists ({error}): this start is refused, and the kubelet tries it again"
        )
        self.pod_name = namespace, name


class DevicesSwapped(StartRefused):
    """The container was given the devices of another pod of the same size: only a new pod can mend that."""


class DevicesMisaligned(DevicesSwapped):
    """Likewise, because the kubelet aligned it to other NUMA nodes."""


class PreStart:
    """Serves PreStartContainer for all resources."""

    def __init__(
        self,
        names: Names,
        unit_mib: int,
        *,
        pods: NodePods,
        records: KubeletRecords,
        ledger: DeviceLedger,
        grants: GrantDirectories,
        usage_records: UsageRecords,
        bursts: BurstUpdater,
        inventory: Callable[[], Inventory],
        fetch: Callable[[str, str], Awaitable[Pod | None]],
        over_limit_action: OverLimitAction = DEFAULT_OVER_LIMIT_ACTION,
        clear: bool = False,
        gone_of: Callable[[Collection[str]], str] = lambda _: "",
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        names_numa: Callable[[], bool] = bool,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._gone_of, self._names_numa = gone_of, names_numa
        self._names, self._unit_mib = names, unit_mib
        self._pods, self._records, self._ledger, self._grants = pods, records, ledger, grants
        self._inventory, self._fetch, self._now = inventory, fetch, now
        self._over_limit_action, self._clear, self._usage_records = over_limit_action, clear, usage_records
        self._waiting, self._bursts = waiting, bursts

    async def __call__(self, resource: str, ids: Sequence[str]) -> Sequence[str]:
        """Make a container with these devices ready to start. Returns the keys of the grant directories that it may have.

        Raises Refused, KubeletUnreachable, OSError.
        """
        if resource == self._names.gpu_core:
            return ()  # its container has gpu-mem too, and that call does the work
        try:
            starting = await self._starting_pod(resource, ids)
        except ApiUnavailable as away:
            keys = self._granted_before(ids, away.pod_name) if resource == self._names.gpu_mem else []
            if not keys:
                raise
            log.warning("the API server is away: the container starts with the grant it has", error=str(away))
            await self._grants.durability.ended(keys)
            await self._arbiter_listens(keys)
            return keys
        if resource != self._names.gpu_mem:
            container, given = self._given(starting, resource, ids)
            self._verify_devices(starting, container, given, allocated=self._names.mig_profile(resource) is not None)
            await self._write_in_turn(self._enter, starting.node_pod, resource, ids)
            return ()
        keys = await self._write_in_turn(self._grant, starting, ids, self._bursts.limits(starting.node_pod))
        await self._grants.durability.ended(keys)
        await self._arbiter_listens(keys, starting.pod)
        self._grants.durability.rest()
        return keys

    async def _write_in_turn(self, write: Callable[..., T], *args: Any) -> T:
        """One after another, in a thread: what is written may wait for the disk."""
        return await self._grants.disk_thread.do(write, *args, otherwise="the container is not started")

    async def _starting_pod(self, resource: str, ids: Sequence[str]) -> StartingPod:
        pod_name, listed = await self._records.holders(resource, ids)
        if pod_name is None:
            pod_name = self._guessed(resource, ids)
        if pod_name is None:
            raise StartRefused(f"the kubelet's records name no container with these {len(ids)} devices of {resource}")
        pod, node_pod = await self._node_pod(*pod_name)
        if not any(request.resources(self._names).get(resource) == len(ids) for request in node_pod.requests):
            raise StartRefused(f"{node_pod} has no container that requests {len(ids)} {resource}", pod)
        return StartingPod(pod, node_pod, listed)

    def _guessed(self, resource: str, ids: Sequence[str]) -> tuple[str, str] | None:
        """Only an init container has these devices: only the ledger, the grants and the records of what pods use name the pod."""
        for uid, _ in self._ledger.holders(resource, ids):
            if pod := self._pods.pod(uid):
                return pod.metadata.namespace, pod.metadata.name
        for folder in self._grants.newest(ids):
            if folder.record is not None:
                return folder.record.namespace, folder.record.pod
            if folder.grant is not None:
                return folder.grant.namespace, folder.grant.pod
        users = self._usage_records.users(resource)
        records = {uid: self._usage_records.get(uid) for uid in {users.get(one, "") for one in ids}}
        record = next(iter(records.values())) if len(records) == 1 else None
        return (record.namespace, record.pod) if record is not None else None

    async def _node_pod(self, namespace: str, name: str) -> tuple[Pod, NodePod]:
        """The pod and its assignment: from the watch if that has it within `WATCH_WAIT_S`, else from the API server."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WATCH_WAIT_S):
                while True:
                    pod = self._pods.find(namespace, name)
                    node_pod = self._pods.node_pod(pod.uid) if pod else None
                    if (
                        pod and node_pod and not node_pod.leaving
                    ):  # a leaving pod starts nothing: its successor has the name
                        return pod, node_pod
                    with self._waiting():
                        await self._pods.changed()
        try:
            pod = await self._fetch(namespace, name)
        except ApiError as error:
            raise ApiUnavailable(namespace, name, error) from None
        if found := self._readable(pod):
            return found
        if pod is None:
            raise PodGone(f"pod {namespace}/{name} is gone: the API server has none of that name")
        if pod.finished:
            raise PodGone(f"pod {pod.key} is gone: it ended in phase {pod.status.phase}", pod)
        known = self._pods.read(pod)
        why = "it requests nothing of Tangram's" if known is None or isinstance(known, NodePod) else known.why
        raise StartRefused(f"pod {pod.key} cannot be granted anything: {why}", pod)

    def _readable(self, pod: Pod | None) -> tuple[Pod, NodePod] | None:
        node_pod = self._pods.read(pod) if pod else None
        return (pod, node_pod) if pod and isinstance(node_pod, NodePod) else None

    def _grant(self, starting: StartingPod, ids: Sequence[str], bursts: Mapping[str, BurstLimits]) -> list[str]:
        """Write the grants, and limits above them, of all containers of the pod that have these devices. Returns the keys of their directories."""
        node_pod = starting.node_pod
        folders = as_far_as_another(self._grants.newest(ids), node_pod.uid)
        containers = self._containers(starting, folders, ids)
        for folder in folders:
            if folder.key in containers:
                self._verify_devices(starting, containers[folder.key], folder.record.gpus if folder.record else None)
        self._enter(node_pod, self._names.gpu_mem, ids)
        for folder in folders:
            if folder.key in containers:
                self._write(node_pod, containers[folder.key], folder, ids)
                self._bursts.files.write(folder.key, bursts.get(containers[folder.key]))
        return list(containers)

    def _containers(
        self, starting: StartingPod, folders: Sequence[GrantDirectory], ids: Sequence[str]
    ) -> dict[str, str]:
        node_pod = starting.node_pod
        uids = {node_pod.uid} | {folder.record.uid for folder in folders if folder.record is not None}
        these = self._grants.keys_of(ids)
        records = [record for key, record in self._grants.of_pods(uids).items() if key not in these]
        try:
            return containers_of(
                folders, node_pod, len(ids), starting.listed, records=records, initialized=initialized(starting.pod)
            )
        except Refused as error:
            raise StartRefused(str(error), starting.pod) from None

    def _write(self, node_pod: NodePod, container: str, folder: GrantDirectory, ids: Sequence[str]) -> None:
        """What is missing, the allocation record, the grant, in this order: the record names the directory's pod before a container can use it."""
        missing = self._grants.restore(folder.key)
        if missing:
            log.warning("what a container mounts was missing and is restored", pod=str(node_pod), missing=missing)
        before = folder.record or Record(
            tuple(ids), node_pod.uid, node_pod.namespace, node_pod.name, container, node_pod.assignment.uuids(container),
            self._now(), suffix=folder.key.partition("-")[2],
        )  # fmt: skip
        place = next(at for at, request in enumerate(node_pod.requests) if request.container == container)
        record = msgspec.structs.replace(
            before, uid=node_pod.uid, namespace=node_pod.namespace, pod=node_pod.name, container=container, place=place
        )  # fmt: skip
        if not folder.later and (folder.remembered or record != folder.record):
            self._grants.update(record)
        grant = grant_for(
            node_pod.assignment, container, namespace=node_pod.namespace, pod=node_pod.name, uid=node_pod.uid,
            over_limit_action=stricter(node_pod.over_limit_action, self._over_limit_action), clear=self._clear,
        )  # fmt: skip
        self._grants.write(folder.key, grant)

    def _enter(self, node_pod: NodePod, resource: str, ids: Sequence[str]) -> None:
        """What the pod uses, before a process of it can: should it be deleted by force, the node still has the record."""
        record = UsageRecord(node_pod.uid, node_pod.namespace, node_pod.name, node_pod.assignment.held())
        self._usage_records.enter(record, {resource: ids})

    def _given(self, starting: StartingPod, resource: str, ids: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """The container, as far as it is known, and the UUIDs of the GPUs that Allocate answered these IDs with."""
        node_pod = starting.node_pod
        ours = [container for uid, container in self._ledger.holders(resource, ids) if uid == node_pod.uid]
        for container in ours:
            if not starting.listed or container in starting.listed:
                return container, node_pod.assignment.uuids(container)
        fitting = [a.container for a in node_pod.requests if a.resources(self._names).get(resource) == len(ids)]
        named = [container for container in starting.listed if container in fitting] or fitting
        assigned = (one for one in named if frozenset(node_pod.assignment.uuids(one)) == frozenset(ids))
        return next(assigned, named[0]), tuple(ids)

    def _verify_devices(
        self, starting: StartingPod, container: str, given: Sequence[str] | None, *, allocated: bool = False
    ) -> None:
        """With CDI, and where they are `allocated` with each access mode, the devices came from Allocate's guess: they must be the assigned ones (invariant I2)."""
        assigned = frozenset(starting.node_pod.assignment.uuids(container))
        if gone := self._gone_of(assigned):
            raise StartRefused(f"{starting.node_pod}: container {container} cannot start: {gone}", starting.pod)
        allocated = allocated or self._inventory().access == "cdi"
        if given is not None and allocated and frozenset(given) != assigned:
            wrong = misaligned(self._inventory(), given, assigned) if self._names_numa() else ""
            if wrong:
                raise DevicesMisaligned(
                    f"{starting.node_pod}: container {container}: {wrong}; this pod has to be replaced", starting.pod
                )
            raise DevicesSwapped(
                f"{starting.node_pod}: container {container} was given {', '.join(sorted(given))} and is assigned {', '.join(sorted(assigned))}: the kubelet mixed up two pods of the same size, so this one has to be replaced",
                starting.pod,
            )

    def _granted_before(self, ids: Sequence[str], pod_name: tuple[str, str]) -> list[str]:
        """Keys of the pod's directories of these IDs, where the newest has a grant of it."""
        keys: list[str] = []
        for folder in self._grants.newest(ids):
            if folder.grant is not None and (folder.grant.namespace, folder.grant.pod) != pod_name:
                break
            if folder.grant is not None:
                keys.append(folder.key)
        return keys

    async def _arbiter_listens(self, keys: Sequence[str], pod: Pod | None = None) -> None:
        paths = [self._grants.socket(key) for key in keys]
        if all(map(listens, paths)):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(ARBITER_WAIT_S):
                while not all(map(listens, paths)):  # another process makes it: there is no event to wait for
                    with self._waiting():
                        await asyncio.sleep(ARBITER_POLL_S)
                return
        silent = ", ".join(str(path) for path in paths if not listens(path))
        raise StartRefused(
            f"the arbiter does not listen on {silent} after {ARBITER_WAIT_S:g} s: no memory could be leased, so the container is not started",
            pod,
        )


def listens(path: Path) -> bool:
    """Does a process accept connections there?"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its queue is full: it is there
        except OSError:
            return False
    return True
