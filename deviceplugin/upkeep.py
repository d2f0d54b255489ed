"""What is looked at now and then: folders nobody needs, drift between the books, what a restart must know again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from deviceplugin.drift import Drift, drift
from deviceplugin.grants import Grants
from deviceplugin.ledger import Ledger
from deviceplugin.metrics import Metrics
from deviceplugin.podresources import Holding, KubeletSilent, PodResources
from deviceplugin.pods import NodePods, initialized
from deviceplugin.prestart import PreStart
from deviceplugin.removal import Remover
from vgpu.contract import grant_key
from vgpu.names import Names

EVERY_S: Final = 30.0
GARBAGE_AGE_S: Final = 300.0
"""A folder that nobody needs is left alone for this long: the kubelet's books and the watch may both be late. Guessed."""
ENDED_AGE_S: Final = 15.0
"""The same, once its pod has ended or is gone: a container that is killed may take some seconds. Guessed."""

log = structlog.get_logger("deviceplugin.upkeep")


def needed(holdings: Iterable[Holding], pods: NodePods, ledger: Ledger, grants: Grants, names: Names) -> set[str]:
    """Keys of grant folders that a container has or may yet start with. Errs on the side of keeping."""
    kept = {grant_key(h.ids) for h in holdings if h.resource == names.gpu_mem}
    for given in ledger.done.values():
        kept |= {grant_key(ids) for (_, resource), ids in given.items() if resource == names.gpu_mem}
    tenants = {tenant.uid: tenant for tenant in pods.tenants()}
    starting = {uid for uid in tenants if (pod := pods.pod(uid)) and not initialized(pod)}
    init_units = {ask.units for uid in starting for ask in tenants[uid].asks if ask.init}
    for key in grants.keys():  # noqa: SIM118 (a method, not a mapping)
        record = grants.record(key)
        if record and (record.uid in tenants or len(record.ids) in init_units):
            kept.add(key)
    return kept


def ended(pods: NodePods, grants: Grants) -> set[str]:
    """Keys of grant folders whose pod, as our book names it, has ended or is gone."""
    alive = {uid for uid, pod in pods.pods().items() if not pod.finished}
    owners = grants.owners()
    return {key for key, uid in owners.items() if uid not in alive}


async def restore(books: PodResources, pods: NodePods, ledger: Ledger, grants: Grants, names: Names) -> None:
    """After a start: enter into the ledger what the kubelet and our own records say was given. Raises KubeletSilent."""
    for held in await books.holdings(names.domain):
        pod = pods.find(held.namespace, held.pod)
        if pod is not None:
            ledger.restore(pod.uid, held.container, held.resource, held.ids)
    for key in grants.keys():  # noqa: SIM118
        record = grants.record(key)
        if record is not None and pods.pod(record.uid) is not None:
            ledger.restore(record.uid, record.container, names.gpu_mem, record.ids)


class Upkeep:
    """Runs every `EVERY_S`."""

    def __init__(
        self, names: Names, *, books: PodResources, pods: NodePods, ledger: Ledger, grants: Grants, prestart: PreStart,
        remover: Remover, metrics: Metrics,
        now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._names, self._books, self._pods, self._ledger = names, books, pods, ledger
        self._grants, self._prestart, self._remover, self._metrics = grants, prestart, remover, metrics
        self._now = now
        self._drift: Drift = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.once()
            except (KubeletSilent, OSError) as error:
                log.warning("upkeep was left out this time", error=str(error))

    async def once(self) -> None:
        """Collect garbage and compare the books. Raises KubeletSilent, OSError."""
        holdings = await self._books.holdings(self._names.domain)
        found = drift(holdings, self._pods.tenants(), self._names)
        self._metrics.set_drift(found)
        if found and found == self._drift:
            told = {f"{resource} on {uuid}": count for (resource, uuid), count in found.items()}
            log.warning("the kubelet's books differ from the assignments", devices_beyond_assigned=told)
        self._drift = found
        if not self._pods.synced:
            return
        self._ledger.forget_the_gone()
        self._prestart.forget_the_gone()
        self._remover.forget_the_gone(self._pods.pods().keys())
        kept = needed(holdings, self._pods, self._ledger, self._grants, self._names)
        over = ended(self._pods, self._grants)
        gone = self._grants.collect(
            kept, now=self._now(), older_than_s=GARBAGE_AGE_S, ended=over, ended_older_than_s=ENDED_AGE_S
        )
        if gone:
            log.info("removed grant folders that no container has", keys=gone)
        self._metrics.grants.set(sum(1 for _ in self._grants.keys()))  # noqa: SIM118
