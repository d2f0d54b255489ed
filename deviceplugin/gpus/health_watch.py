"""Report what changed about the node's GPUs, and which pods are on one that is unhealthy or gone.

The decisions are those of `vgpu.health`. A GPU that pods were assigned and that the node does not have is gone, also where it went while this program was
not running: then it counts as gone since the start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Final, Protocol

from deviceplugin.gpus.offer import Offer
from deviceplugin.pods.node_pods import NodePods
from kube.objects import Pod
from vgpu.api.inventory import RELEASED, Inventory
from vgpu.api.mig_device import slot_of_device
from vgpu.health.notes import Note, changes
from vgpu.health.pod_policy import PodPolicy, UnfitGpu, affected, due, unfit_gpus

CHECK_S: Final = 5.0
"""While no GPU and no pod changes. Guessed: `evict-after` counts in seconds and minutes."""


class HealthObserver(Protocol):
    """Reports to people, and has pods evicted."""

    def gpu_changed(self, note: Note) -> None:
        """Something about a GPU changed."""

    def gpu_unfit(self, pod: Pod, why: str) -> None:
        """A GPU of the pod is unhealthy or gone."""

    def evict_unfit(self, pod: Pod, why: str) -> None:
        """The policy says that the pod leaves now."""


class HealthWatch:
    """Of one node."""

    def __init__(
        self, offer: Offer, pods: NodePods, policy: PodPolicy, observer: HealthObserver, *, now: Callable[[], float] = time.time
    ) -> None:  # fmt: skip
        self._offer, self._pods, self._policy, self._observer, self._now = offer, pods, policy, observer, now
        self._before: Inventory | None = None
        self._gone: dict[str, int] = {}
        """UUID of a GPU or MIG instance that pods were assigned and the node does not have -> since when."""
        self._affected: dict[str, UnfitGpu] = {}

    async def run(self) -> None:
        """Until cancelled. Nothing is reported before NVML has answered once, and of pods nothing before they were listed."""
        while True:
            version = self._offer.version
            self.once()
            changed = [
                asyncio.ensure_future(self._offer.changed_since(version)),
                asyncio.ensure_future(self._pods.changed()),
            ]
            try:
                await asyncio.wait(changed, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in changed:
                    one.cancel()

    def once(self) -> None:
        """Compare with the last time."""
        if not self._offer.probed:
            return
        inventory = self._offer.inventory()
        for note in changes(self._before, inventory):
            self._observer.gpu_changed(note)
        self._before = inventory
        if self._pods.synced:
            self._check_pods(inventory)

    def must_leave(self, uid: str) -> bool:
        """Is a GPU of this pod still unfit, and does the policy say that it leaves?"""
        return uid in due(self._policy, self._affected, self._now())

    def gone_of(self, uuids: Collection[str]) -> str:
        """Why a container with these GPUs or MIG instances cannot start; empty when they are there, or when that is not known yet."""
        inventory = self._offer.inventory()
        gone = [uuid for uuid in uuids if inventory.gpu(uuid) is None] if self._offer.probed else []
        if gone:
            return f"{', '.join(sorted(gone))} is no longer in this node"
        found = [gpu for uuid in uuids if (gpu := inventory.gpu(uuid)) is not None and gpu.cordon == RELEASED]
        return f"GPU {found[0].index} ({found[0].uuid}) is cordoned and released" if found else ""

    def _check_pods(self, inventory: Inventory) -> None:
        now_s = self._now()
        pods = [(pod.uid, {_known_by(gpu.uuid) for gpu in pod.assignment.held()}) for pod in self._pods.node_pods()]
        gone = {uuid for _, uuids in pods for uuid in uuids if inventory.gpu(uuid) is None}
        self._gone = {uuid: self._gone.get(uuid, int(now_s)) for uuid in gone}
        before, self._affected = self._affected, affected(unfit_gpus(inventory, self._gone), pods)
        evicted = due(self._policy, self._affected, now_s)
        for uid, gpu in self._affected.items():
            pod = self._pods.pod(uid)
            if pod is None:
                continue
            if before.get(uid) != gpu:
                self._observer.gpu_unfit(pod, gpu.why)
            if uid in evicted:
                self._observer.evict_unfit(pod, gpu.why)


def _known_by(uuid: str) -> str:
    """A MIG slot on demand is as well as its GPU."""
    slot = slot_of_device(uuid)
    return slot[0] if slot else uuid
