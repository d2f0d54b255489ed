"""Pods that the API no longer has and whose processes run on: found, counted, reported.

A pod that is deleted by force leaves the API at once; the kubelet ends its processes later, or cannot. Until the last one is gone it
uses its GPUs, and invariant I1 counts it. From the moment the API loses a pod, the pod is a suspect and its capacity stays reserved. A check of
the node's processes then clears it or makes it an orphan, which the inventory reports to the extender.

Decides nothing about processes (`processes`) and nothing about pods that the API has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol

import structlog

from deviceplugin.calls_in_progress import without_waiting
from deviceplugin.pods.usage_records import UsageRecord, UsageRecords
from kube.objects import Pod
from vgpu.api.inventory import Orphan

CHECK_S: Final = 0.25
"""Between checks while the API lacks a pod that has a usage record. Each costs some 20 us for each process that was seen, once a pod."""
REST_S: Final = 0.5
"""At least so long between checks, unless a call of the kubelet waits: pods that go together are checked together. Guessed."""
RETRY_S: Final = 1.0

log = structlog.get_logger("deviceplugin.pods.orphan_finder")


class ApiPods(Protocol):
    """The pods of this node that the API has, as `deviceplugin.pods.node_pods.NodePods` has them. Until `synced`, some may be missing."""

    @property
    def synced(self) -> bool: ...

    def pods(self) -> Mapping[str, Pod]: ...

    async def changed(self) -> None: ...


class LivingProcesses(Protocol):
    """The reader of the node's processes."""

    @property
    def blind(self) -> bool: ...

    def living(self, uids: Collection[str]) -> frozenset[str]: ...


class OrphanFinder:
    """See the module. `report` gets the orphans whenever they changed; `until_idle` as `calls_in_progress.CallsInProgress.until_idle`."""

    def __init__(
        self,
        records: UsageRecords,
        pods: ApiPods,
        processes: LivingProcesses,
        report: Callable[[tuple[Orphan, ...]], None],
        *,
        check_s: float = CHECK_S,
        until_idle: Callable[[], Awaitable[None]] = without_waiting,
    ) -> None:
        self.reported: tuple[Orphan, ...] = ()
        """As `report` got them last, by UID."""
        self.blind = False
        """The node's processes cannot be seen: no pod is an orphan."""
        self._records, self._pods, self._processes, self._report = records, pods, processes, report
        self._check_s, self._until_idle = check_s, until_idle
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()

    def still_using(self) -> Sequence[UsageRecord]:
        """Pods that the API lacks and that are not known to be gone: suspects and orphans."""
        if not self._pods.synced:
            return []
        known = self._pods.pods()
        return [record for record in self._records if record.uid not in known]

    async def changed(self) -> None:
        """Return when fewer pods use the node's GPUs. The next check does not wait while a caller waits for this."""
        self._wanted.set()
        await self._changed.wait()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._until_idle()  # a suspect's capacity stays reserved all the same
            self._wanted.clear()
            try:
                await self.once()
            except OSError as error:
                log.error(
                    "a pod's usage record cannot be removed: its share of the GPU stays taken",
                    error=str(error),
                    retry_s=RETRY_S,
                )
                await asyncio.sleep(RETRY_S)
                continue
            try:
                async with asyncio.timeout(self._check_s if self.still_using() else None):
                    await self._pods.changed()
            except TimeoutError:
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(REST_S):
                    await self._wanted.wait()

    async def once(self) -> None:
        """Check once. Raises OSError."""
        suspects = {record.uid: record for record in self.still_using()}
        living = await self.living(suspects) if suspects else frozenset[str]()
        gone = suspects.keys() - living - self._pods.pods().keys()  # the API may have it again: the watch was behind
        if gone:
            await asyncio.to_thread(self._records.forget, gone)
        self._report_changes(tuple(suspects[uid].orphan for uid in sorted(living) if suspects[uid].held))
        if gone:
            self._changed.set()
            self._changed = asyncio.Event()

    async def living(self, uids: Collection[str]) -> frozenset[str]:
        """Those of these pods that have a living process; none where the node's processes cannot be seen."""
        return await asyncio.to_thread(self._living, frozenset(uids))

    def _living(self, uids: frozenset[str]) -> frozenset[str]:
        blind = self._processes.blind
        if blind and not self.blind:
            log.warning(
                "the node's processes cannot be seen (no hostPID): the capacity of a pod that is deleted by force is free at once"
            )
        self.blind = blind
        here = {uid for uid in uids if (record := self._records.get(uid)) is None or record.boot == self._records.boot}
        return frozenset() if blind else self._processes.living(here)

    def _report_changes(self, now: tuple[Orphan, ...]) -> None:
        if now == self.reported:
            return
        before = {orphan.uid for orphan in self.reported}
        for orphan in now:
            if orphan.uid not in before:
                log.warning(
                    "a pod is not in the API any more and its processes run on: its capacity stays reserved",
                    pod=orphan.key, uid=orphan.uid, gpus=[gpu.uuid for gpu in orphan.held],
                )  # fmt: skip
        for orphan in self.reported:
            if orphan.uid not in {one.uid for one in now}:
                log.info("the processes of a pod that the API lacks are gone", pod=orphan.key, uid=orphan.uid)
        self.reported = now
        self._report(now)
