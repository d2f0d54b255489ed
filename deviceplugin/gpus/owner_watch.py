"""Find out every few seconds which of the node's GPUs are others', and withdraw these from new pods. `vgpu.health.owners` decides.

Asked are the kubelet (what every plugin offers, and what pods have) and the node's ResourceSlices. Each answer has a time limit. What holds while one
is missing is in `vgpu.health.owners`: at the start nothing is offered, later the last answer counts for some minutes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

import structlog

from deviceplugin.gpus.offer import CORDONS, Offer
from deviceplugin.gpus.slice_watch import SlicesUnknown, SliceWatch
from deviceplugin.pod_resources import KubeletUnreachable, PodResources
from deviceplugin.pods.node_pods import NodePods
from vgpu.api.inventory import GpuCondition, Inventory, Withdrawal
from vgpu.health.owners import Owners, Source

CHECK_S: Final = 5.0
"""With an answer of the kubelet, which may take 5 s, a clash is seen within 10 s. Specified: issue K."""
FIRST_S: Final = 6.0
"""How long the first offer of GPUs waits for the API server. Then they are offered once it has answered. Guessed."""
BY: Final = "owners"

log = structlog.get_logger("deviceplugin.gpus.owner_watch")


class OwnerWatch:
    """Of one node. `labels`: the node's, None = not known; `try_out`: to be awaited before GPUs are offered."""

    def __init__(
        self, owners: Owners, offer: Offer, records: PodResources, slices: SliceWatch, pods: NodePods, *,
        labels: Callable[[], Mapping[str, str] | None],
        try_out: Callable[[Inventory], Awaitable[None]], until_idle: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._owners, self._offer, self._records, self._slices, self._pods = owners, offer, records, slices, pods
        self._labels, self._try_out, self._until_idle = labels, try_out, until_idle
        self._clock, self._now = clock, now
        self._applying = asyncio.Lock()
        self._checked: frozenset[str] = frozenset()
        """UUIDs of GPUs that were there at the last check."""

    @property
    def failing(self) -> Mapping[Source, str]:
        """Sources that do not answer now, and why."""
        return dict(self._owners.failing)

    @property
    def unknown(self) -> str:
        """Why GPUs are not offered because their owner is not known; empty where none is."""
        found = (one.message for one in self._offer.withdrawn_by(BY).values() if one.reason == Withdrawal.UNKNOWN)
        return next(found, "")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            await self._until_idle()
            try:
                await self.once()
            except OSError as error:  # of a trial: a disk that is full must not end the program
                withdrawn = sorted(self._offer.withdrawn_by(BY))
                log.error(
                    "what a trial found cannot be written: GPUs that are withdrawn stay so",
                    gpu_uuids=withdrawn, error=str(error), retry_s=CHECK_S,
                )  # fmt: skip

    async def once(self) -> None:
        """Ask, and follow the answers."""
        await self.check()
        if self._offer.probed:
            await self._apply()

    async def before_offer(self, inventory: Inventory) -> None:
        """An inventory is about to be offered: waits for answers at the first, and where a GPU is new, and tries GPUs that are ours."""
        if {gpu.uuid for gpu in inventory.gpus} - self._checked:
            if not self._checked:
                with suppress(TimeoutError):
                    async with asyncio.timeout(FIRST_S):
                        await self._slices.first()
            await self.check()
        self._checked = frozenset(gpu.uuid for gpu in inventory.gpus)
        await self._apply(inventory)

    async def before_back(self, uuid: str) -> None:
        """A GPU is about to be offered again after its self-test: tries whether it suspends work, if it is ours, so that the arbiter knows before a pod has it."""
        async with self._applying:
            inventory = self._offer.reported
            out = {*self._withdrawn(inventory), *self._offer.withdrawn_by(CORDONS)} - {uuid}
            if uuid in self._withdrawn(inventory):
                return
            try:
                await self._try_out(_without(inventory, out))
            except OSError as error:
                log.error(
                    "whether a GPU suspends work is not known until the next probe", gpu_uuid=uuid, error=str(error)
                )

    async def check(self) -> None:
        """Ask both."""
        try:
            foreign = await self._records.others(self._offer.names.domain, self._finished())
            self._owners.answered(Source.KUBELET, foreign, self._clock())
        except KubeletUnreachable as error:
            self._failed(Source.KUBELET, str(error))
        try:
            now_s = self._clock()
            self._owners.answered(Source.SLICES, self._slices.devices(), now_s, heard_s=now_s - self._slices.silent_s())
        except SlicesUnknown as error:
            self._failed(Source.SLICES, str(error))
        self._owners.know_labels(self._labels())

    def _failed(self, source: Source, why: str) -> None:
        if source not in self._owners.failing:
            log.warning("whether others offer GPUs of this node is not known now", source=source, error=why)
        self._owners.failed(source, why)

    async def _apply(self, coming: Inventory | None = None) -> None:
        """Withdraw at once, and offer what is ours after it was tried. `coming`: an inventory that is not offered yet; None: follow what is offered."""
        async with self._applying:
            # read here: who waited for the lock would follow an inventory without the GPUs that came meanwhile
            inventory = coming if coming is not None else self._offer.reported
            now, before = self._withdrawn(inventory), self._offer.withdrawn_by(BY)
            there = {gpu.uuid for gpu in inventory.gpus}
            lifted = {uuid: one for uuid, one in before.items() if uuid in there and uuid not in now}
            if lifted or coming is not None:
                self._offer.set_withdrawn(BY, lifted | now)
                await self._try_out(_without(inventory, now.keys() | self._offer.withdrawn_by(CORDONS)))
                now = self._withdrawn(inventory)
            self._offer.set_withdrawn(BY, now)
            self._offer.refresh()

    def _withdrawn(self, inventory: Inventory) -> dict[str, GpuCondition]:
        return self._owners.withdrawn(inventory, self._clock(), self._now())

    def _finished(self) -> set[tuple[str, str]]:
        """Namespace and name of pods that have ended: some kubelets list them until they are deleted."""
        of = {True: set[tuple[str, str]](), False: set[tuple[str, str]]()}
        for pod in self._pods.pods().values():
            of[pod.finished].add((pod.metadata.namespace, pod.metadata.name))
        return of[True] - of[False]


def _without(inventory: Inventory, uuids: Collection[str]) -> Inventory:
    return replace(inventory, gpus=tuple(gpu for gpu in inventory.gpus if gpu.uuid not in uuids))
