"""The burst limits of this node's containers: what their pods' annotations request now, as far as the GPU can give it.

A container may have the GPU's memory less the guarantees of the other containers that were there when its pod started. Pods that start later
never lower its limit, since what it sees as the GPU's memory should not shrink under it; one that ends, of those counted, may raise it. The
annotations may be edited while the pod runs. The admission policy checks them; what got past it is reported, and the pod has its guarantee.

With `burst.overcommit` a container has no more than what was settled when its pod was placed (`vgpu.api.overcommit`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, Protocol

import structlog

from deviceplugin.allocation import NodePod
from deviceplugin.calls_in_progress import without_waiting
from deviceplugin.grants.allocation_record import Record
from deviceplugin.grants.burst_files import BurstFiles
from deviceplugin.grants.grant_directories import GrantDirectories
from deviceplugin.pods.service_class import ObservedPods
from kube.objects import Pod
from vgpu.api.burst import BurstLimits, limits_on_gpus
from vgpu.api.grant import Assignment
from vgpu.api.inventory import Inventory
from vgpu.api.overcommit import enforced

IGNORED: Final = "BurstIgnored"
LIMITED: Final = "BurstLimited"
RETRY_S: Final = 1.0
"""Until a file that could not be written is written again. Guessed."""
_LAST: Final = "~"
"""Sorts behind every time: a pod that the kubelet has not admitted yet."""

log = structlog.get_logger("deviceplugin.pods.burst")


class Observer(Protocol):
    """Reports to users."""

    def burst_reduced(self, pod: Pod, reason: str, note: str) -> None:
        """A burst does not apply as it was requested (`IGNORED`, `LIMITED`), and that was not reported yet."""


class Guarantees:
    """The memory that the pods of a node are guaranteed, in the order in which they started. `overcommit`: the bound of limits, None = none."""

    def __init__(self, node_pods: Collection[NodePod], inventory: Inventory, overcommit: float | None = None) -> None:
        self._inventory = inventory
        self._settled: dict[str, Mapping[str, Mapping[str, int]]] | None = None
        if overcommit is not None:
            in_order = sorted(node_pods, key=_start)
            total_mib = {gpu.uuid: gpu.mib for gpu in inventory.gpus}
            most = enforced([one.assignment for one in in_order], total_mib, overcommit)
            self._settled = {one.uid: by_container for one, by_container in zip(in_order, most, strict=True)}
        self._held = [(_start(one), {gpu.uuid: gpu.mib for gpu in one.assignment.held()}) for one in node_pods]

    def settled_mib(self, node_pod: NodePod, container: str) -> Mapping[str, int] | None:
        """UUID -> the most MiB that a container may have of each of its GPUs; None where limits have no bound together."""
        if self._settled is None:
            return None
        return self._settled.get(node_pod.uid, {}).get(container, {})

    def room_mib(self, node_pod: NodePod, container: str) -> dict[str, int]:
        """UUID -> MiB of each GPU of a container without what other containers are guaranteed there: those of its own pod, and of pods that
        started before it."""
        before = [held for start, held in self._held if start < _start(node_pod)]
        pod = {gpu.uuid: gpu.mib for gpu in node_pod.assignment.held()}
        room: dict[str, int] = {}
        for mine in node_pod.assignment.containers.get(container, ()):
            gpu = self._inventory.gpu(mine.uuid)
            if gpu is not None:
                room[mine.uuid] = gpu.mib - sum(held.get(mine.uuid, 0) for held in before) - pod[mine.uuid] + mine.mib
        return room


def _start(node_pod: NodePod) -> tuple[str, str]:
    """Orders the pods of a node, and a restart of the plugin does not change it."""
    return node_pod.started or _LAST, node_pod.uid


class BurstUpdater:
    """Writes the file `burst` of each container that may have one, and follows its pod's annotations. `until_idle` as
    `calls_in_progress.CallsInProgress.until_idle`."""

    def __init__(
        self,
        pods: ObservedPods,
        grants: GrantDirectories,
        inventory: Callable[[], Inventory],
        observer: Observer,
        until_idle: Callable[[], Awaitable[None]] = without_waiting,
        overcommit: float | None = None,
    ) -> None:
        self._pods, self._grants, self._inventory, self._overcommit = pods, grants, inventory, overcommit
        self._observer, self._until_idle = observer, until_idle
        self.files = BurstFiles(grants)
        self._with_file: Collection[str] | None = None
        """UIDs of pods that may have a file; None = not known yet, as after a restart."""
        self._reported: dict[str, set[str]] = {}
        """UID of a pod -> what was reported of it, as long as it applies."""

    def limits(self, node_pod: NodePod) -> Mapping[str, BurstLimits]:
        """Container -> its limits, of those of a pod that may use more than their guarantee."""
        if not node_pod.bursts:
            return {}
        return self._decide(node_pod, self._guarantees())[0]

    def limits_of_all(self) -> list[tuple[Assignment, Mapping[str, BurstLimits]]]:
        """Of each pod its assignment, and its containers' limits as `limits` has them."""
        guarantees = self._guarantees()
        return [(one.assignment, self._decide(one, guarantees)[0]) for one in self._pods.node_pods()]

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                self.once()
            except OSError as error:
                log.error("a burst limit could not be written", error=str(error), retry_s=RETRY_S)
                await asyncio.sleep(RETRY_S)
                continue
            await self._pods.changed()
            await self._until_idle()

    def once(self) -> None:
        """Decides for every pod; files are read only of those that burst or did. Raises OSError."""
        node_pods = self._pods.node_pods()
        guarantees = self._guarantees() if any(one.bursts for one in node_pods) else None
        now: dict[str, Mapping[str, BurstLimits]] = {}
        notes: dict[str, set[tuple[str, str]]] = {}
        for one in node_pods:
            limits, why = self._decide(one, guarantees) if guarantees else ({}, set[str]())
            now[one.uid] = limits
            notes[one.uid] = {(LIMITED, note) for note in why} if one.started else set()
            if one.burst_ignored:
                notes[one.uid].add((IGNORED, one.burst_ignored))
        self._report(notes)
        bursting = {uid for uid, limits in now.items() if limits}
        followed = now.keys() if self._with_file is None else bursting.union(self._with_file)
        for key, record in self._grants.of_pods(followed).items() if followed else ():
            if record.uid in now:
                self._follow(key, record, now[record.uid].get(record.container))
        self._with_file = bursting

    def _guarantees(self) -> Guarantees:
        return Guarantees(self._pods.node_pods(), self._inventory(), self._overcommit)

    def _decide(self, node_pod: NodePod, guarantees: Guarantees) -> tuple[Mapping[str, BurstLimits], set[str]]:
        """Container -> its limits; and sentences about those that are less than requested."""
        found: dict[str, BurstLimits] = {}
        notes: set[str] = set()
        for container, burst in node_pod.bursts.items():
            assigned = node_pod.assignment.containers.get(container, ())
            limits, why = limits_on_gpus(
                burst,
                assigned,
                guarantees.room_mib(node_pod, container),
                guarantees.settled_mib(node_pod, container),
            )
            if limits:
                found[container] = limits
            if why:
                notes.add(f"container {container}: {why}")
        return found, notes

    def _follow(self, key: str, record: Record, limits: BurstLimits | None) -> None:
        grant = self._grants.read(key)
        if grant is None or grant.uid != record.uid:
            return
        if self.files.write(key, limits, running=True):
            gpus = [f"{gpu.uuid} {gpu.mib} MiB {gpu.core_percent} %" for gpu in limits.gpus] if limits else []
            log.info(
                "burst limits changed",
                pod=f"{record.namespace}/{record.pod}",
                container=record.container,
                limits=gpus or "none",
            )

    def _report(self, notes: Mapping[str, set[tuple[str, str]]]) -> None:
        for uid, found in notes.items():
            for reason, note in sorted(found):
                pod = self._pods.pod(uid)
                if note not in self._reported.get(uid, ()) and pod is not None:
                    log.warning("a burst does not apply as requested", pod=pod.key, reason=reason, note=note)
                    self._observer.burst_reduced(pod, reason, note)
        self._reported = {uid: {note for _, note in found} for uid, found in notes.items()}
