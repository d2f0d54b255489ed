"""Periodic checks: folders that are no longer needed, drift between the records, what a restart must restore."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Final, Protocol

import structlog

from deviceplugin.calls_in_progress import without_waiting
from deviceplugin.device_ledger import DeviceLedger
from deviceplugin.drift import Drift, drift
from deviceplugin.grants.allocation_record import Record, order_of
from deviceplugin.grants.grant_directories import GrantDirectories
from deviceplugin.metrics import Metrics
from deviceplugin.pod_resources import ContainerDevices, KubeletUnreachable, PodResources
from deviceplugin.pods.node_pods import NodePods, initialized
from deviceplugin.pods.orphan_finder import OrphanFinder
from deviceplugin.pods.usage_records import UsageRecord, UsageRecords
from vgpu.api.grant import AssignedGpu, Assignment, Grant
from vgpu.api.names import Names

EVERY_S: Final = 30.0
GARBAGE_AGE_S: Final = 300.0
"""An unneeded folder is kept for this long: the kubelet's records and the watch may both be late. Guessed."""
ENDED_AGE_S: Final = 15.0
"""The same, once its pod has ended or is gone: a container that is killed may take some seconds. Guessed."""

log = structlog.get_logger("deviceplugin.upkeep")


def needed(
    holdings: Iterable[ContainerDevices],
    pods: NodePods,
    ledger: DeviceLedger,
    grants: GrantDirectories,
    names: Names,
    living: Collection[str] = (),
) -> set[str]:
    """Keys of grant directories that a container has or may yet start with. Errs on the side of keeping.

    `living`: UIDs of pods that the API lacks or knows as ended, whose processes run on.
    """
    in_use = {frozenset(h.ids) for h in holdings if h.resource == names.gpu_mem}
    for given in ledger.done.values():
        in_use |= {frozenset(ids) for (_, resource), ids in given.items() if resource == names.gpu_mem}
    node_pods = {node_pod.uid: node_pod for node_pod in pods.node_pods()}
    starting = {uid for uid in node_pods if (pod := pods.pod(uid)) and not initialized(pod)}
    init_units = {request.units for uid in starting for request in node_pods[uid].requests if request.init}
    records = grants.records()
    granted: dict[frozenset[str], int] = {}
    for key, record in records.items():
        if grants.granted(key):
            ids = frozenset(record.ids)
            granted[ids] = max(granted.get(ids, 0), order_of(key))

    def keep(key: str, record: Record) -> bool:
        if record.uid in node_pods or record.uid in living:
            return True
        ids = frozenset(record.ids)
        if order_of(key) <= granted.get(ids, -1):
            return False  # whose it is, is known; or a later allocation of these IDs has begun to run
        return ids in in_use or len(ids) in init_units

    return {key for key, record in records.items() if keep(key, record)}


def ended(pods: NodePods, grants: GrantDirectories) -> set[str]:
    """Keys of grant directories whose pod, as the record names it, has ended or is gone."""
    alive = {uid for uid, pod in pods.pods().items() if not pod.finished}
    owners = grants.owners()
    return {key for key, uid in owners.items() if uid not in alive}


def enter_started(holdings: Iterable[ContainerDevices], pods: NodePods, usage_records: UsageRecords) -> None:
    """Bring the pods' records in step with the API and the kubelet's records, for pods that have started. Raises OSError."""
    listed: dict[tuple[str, str], dict[tuple[str, str], frozenset[str] | None]] = {}
    for one in holdings:
        of_pod, what = listed.setdefault((one.namespace, one.pod), {}), (one.container, one.resource)
        of_pod[what] = (
            None if what in of_pod else one.ids
        )  # named twice: a pod that goes and its successor have one name
    for node_pod in pods.node_pods():
        if node_pod.waiting or not node_pod.assignment.held():
            continue
        ids: dict[str, set[str]] = {}
        for (_, resource), has in listed.get((node_pod.namespace, node_pod.name), {}).items():
            ids.setdefault(resource, set()).update(has or ())
        usage_records.enter(
            UsageRecord(node_pod.uid, node_pod.namespace, node_pod.name, node_pod.assignment.held()), ids
        )


def remember_granted(grants: GrantDirectories, usage_records: UsageRecords, names: Names) -> None:
    """Pods that have a grant and no usage record that can be read: what they use, by their grants. Whole GPUs have no grant."""
    found: dict[str, list[Grant]] = {}
    for key in grants.keys():  # noqa: SIM118 (a method, not a mapping)
        grant = grants.read(key)
        if grant is not None and usage_records.get(grant.uid) is None:
            found.setdefault(grant.uid, []).append(grant)
    for uid, of_pod in found.items():
        containers = {
            grant.container: tuple(AssignedGpu(c.uuid, 0, c.mib, c.core_percent) for c in grant.gpus)
            for grant in of_pod
        }
        held = Assignment(containers).held()
        ids = [record.ids for record in grants.records().values() if record.uid == uid]
        usage_records.remember(
            UsageRecord(
                uid, of_pod[0].namespace, of_pod[0].pod, held,
                {names.gpu_mem: tuple(sorted({one for part in ids for one in part}))}, usage_records.boot,
            )
        )  # fmt: skip


async def restore(
    records: PodResources,
    pods: NodePods,
    ledger: DeviceLedger,
    grants: GrantDirectories,
    usage_records: UsageRecords,
    names: Names,
) -> None:
    """After a start: enter into the ledger what was allocated, by the kubelet's and the plugin's own records. Raises KubeletUnreachable."""
    try:
        holdings = await records.holdings(names.domain)
    except KubeletUnreachable:
        _restore_own(pods, ledger, grants, usage_records, names)
        raise
    for held in holdings:
        pod = pods.find(held.namespace, held.pod)
        if pod is not None:
            ledger.restore(pod.uid, held.container, held.resource, held.ids)
    _restore_own(pods, ledger, grants, usage_records, names)
    try:
        await asyncio.to_thread(enter_started, holdings, pods, usage_records)
    except OSError as error:
        log.warning("what pods use is not all in our records yet", error=str(error))


def _restore_own(
    pods: NodePods, ledger: DeviceLedger, grants: GrantDirectories, usage_records: UsageRecords, names: Names
) -> None:
    for key in grants.keys():  # noqa: SIM118
        record = grants.record(key)
        if record is not None and pods.pod(record.uid) is not None:
            ledger.restore(record.uid, record.container, names.gpu_mem, record.ids)
    remember_granted(grants, usage_records, names)


class Forgetful(Protocol):
    """Remembers pods, by their UID."""

    def forget_the_gone(self, alive: Collection[str]) -> None:
        """Drop what is remembered of pods that are not among these UIDs."""


class Upkeep:
    """Runs every `EVERY_S`. `until_idle` as `calls_in_progress.CallsInProgress.until_idle`."""

    def __init__(
        self, names: Names, *, records: PodResources, pods: NodePods, ledger: DeviceLedger, grants: GrantDirectories, usage_records: UsageRecords,
        orphans: OrphanFinder, removers: Collection[Forgetful], metrics: Metrics,
        until_idle: Callable[[], Awaitable[None]] = without_waiting,
        now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._names, self._records, self._pods, self._ledger = names, records, pods, ledger
        self._grants, self._usage_records, self._orphans = grants, usage_records, orphans
        self._removers, self._metrics = removers, metrics
        self._until_idle, self._now = until_idle, now
        self._drift: Drift = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self._until_idle()
            try:
                await self.once()
            except (KubeletUnreachable, OSError) as error:
                log.warning("upkeep was left out this time", error=str(error))

    async def once(self) -> None:
        """Collect garbage and compare the records. Raises KubeletUnreachable, OSError."""
        holdings = await self._records.holdings(self._names.domain)
        found = drift(holdings, self._pods.node_pods(), self._names)
        self._metrics.set_drift(found)
        if found and found == self._drift:
            reported = {f"{resource} on {uuid}": count for (resource, uuid), count in found.items()}
            log.warning("the kubelet's records differ from the assignments", devices_beyond_assigned=reported)
        self._drift = found
        if not self._pods.synced:
            return
        self._ledger.forget_the_gone()
        for remover in self._removers:
            remover.forget_the_gone(self._pods.pods().keys())
        await asyncio.to_thread(enter_started, holdings, self._pods, self._usage_records)
        await self._collect(holdings)
        self._metrics.grants.set(sum(1 for _ in self._grants.keys()))  # noqa: SIM118
        self._metrics.processes_seen.set(not self._orphans.blind)
        self._metrics.records_damaged.set(len(self._usage_records.damaged) + self._grants.damaged_count)

    async def _collect(self, holdings: Collection[ContainerDevices]) -> None:
        """Remove what no container needs, has or had: never while a process of its pod lives. Raises OSError."""
        over = ended(self._pods, self._grants)
        owners = self._grants.owners()
        finished = {
            record.uid for record in self._usage_records if (pod := self._pods.pod(record.uid)) and pod.finished
        }
        living = await self._orphans.living({owners[key] for key in over if key in owners} | finished)
        await asyncio.to_thread(self._usage_records.forget, finished - living)
        kept = needed(holdings, self._pods, self._ledger, self._grants, self._names, living)
        soon = () if self._orphans.blind else over
        gone = await asyncio.to_thread(
            self._grants.collect, kept, now=self._now(),
            older_than_s=GARBAGE_AGE_S, ended=soon, ended_older_than_s=ENDED_AGE_S,
        )  # fmt: skip
        for key in gone:
            self._grants.durability.forget(key)
        if gone:
            log.info("removed grant folders that no container has", keys=gone)
