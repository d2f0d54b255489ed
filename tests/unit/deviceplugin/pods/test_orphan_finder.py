"""From the moment that the API loses a pod until its last process is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from deviceplugin.device_ledger import DeviceLedger
from deviceplugin.pods import orphan_finder
from deviceplugin.pods.orphan_finder import OrphanFinder
from deviceplugin.pods.usage_records import UsageRecord, UsageRecords
from tests.unit.deviceplugin.builders import KnownPods, inventory, node_pod, share, uuid
from vgpu.api.errors import Refused
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Orphan
from vgpu.api.names import DEFAULT

MEM, GPU = DEFAULT.gpu_mem, DEFAULT.gpu
HELD = (AssignedGpu(uuid(0), 0, 12 * 1024, 30),)


class NodeWithProcesses:
    """The API's pods by UID, the processes by UID, and what was reported."""

    def __init__(self, folder: Path) -> None:
        self.api: dict[str, Any] = {}
        self.alive: set[str] = set()
        self.blind, self.synced = False, True
        self.looks = 0
        self.reported: list[tuple[Orphan, ...]] = []
        self.records = UsageRecords(folder, "boot")
        self.change = asyncio.Event()
        self.orphan_finder = OrphanFinder(self.records, self, self, self.reported.append, check_s=0.01)

    def pods(self) -> dict[str, Any]:
        return self.api

    async def changed(self) -> None:
        await self.change.wait()

    def living(self, uids: Collection[str]) -> frozenset[str]:
        self.looks += 1
        return frozenset(self.alive.intersection(uids))

    def runs(self, uid: str, held: tuple[AssignedGpu, ...] = HELD, ids: tuple[str, ...] = ()) -> None:
        self.api[uid] = object()
        self.alive.add(uid)
        self.records.enter(UsageRecord(uid, "default", uid, held), {MEM: ids})

    def lost(self, uid: str) -> None:
        """The API has it no longer."""
        del self.api[uid]
        self.change.set()
        self.change = asyncio.Event()


@pytest.fixture
def node(tmp_path: Path) -> NodeWithProcesses:
    return NodeWithProcesses(tmp_path)


async def test_a_pod_that_the_api_loses_uses_its_gpus_until_its_last_process_is_gone(node: NodeWithProcesses) -> None:
    node.runs("a")
    await node.orphan_finder.once()
    assert (node.reported, node.looks) == ([], 0)
    node.lost("a")
    assert [record.uid for record in node.orphan_finder.still_using()] == ["a"]  # before the first look
    await node.orphan_finder.once()
    await node.orphan_finder.once()
    assert node.reported == [(Orphan("a", "default", "a", HELD),)]
    node.alive.clear()
    await node.orphan_finder.once()
    assert node.reported[1:] == [()]
    assert node.orphan_finder.still_using() == []
    assert node.records.get("a") is None


async def test_a_pod_that_ended_in_order_is_not_reported(node: NodeWithProcesses) -> None:
    node.runs("a")
    node.alive.clear()
    node.lost("a")
    await node.orphan_finder.once()
    assert node.reported == []
    assert list(node.records) == []


async def test_before_the_api_has_reported_its_pods_no_pod_is_an_orphan(node: NodeWithProcesses) -> None:
    node.runs("a")
    node.synced = False
    node.lost("a")
    await node.orphan_finder.once()
    assert (node.reported, [record.uid for record in node.records]) == ([], ["a"])


async def test_a_watch_that_was_behind_makes_no_orphan_and_costs_no_record(node: NodeWithProcesses) -> None:
    node.runs("a")
    del node.api["a"]
    node.alive.clear()
    look, living = node.orphan_finder, node.living

    def late(uids: Collection[str]) -> frozenset[str]:
        found = living(uids)
        node.api["a"] = object()  # the watch brings it while we look
        return found

    node.living = late  # type: ignore[method-assign]
    await look.once()
    assert node.records.get("a") is not None


async def test_no_process_of_an_earlier_boot_lives(node: NodeWithProcesses, tmp_path: Path) -> None:
    node.runs("a")
    node.lost("a")
    after = UsageRecords(tmp_path, "another boot")
    after.load()
    looking = OrphanFinder(after, node, node, node.reported.append)
    await looking.once()
    assert (node.reported, list(after)) == ([], [])


async def test_an_orphan_outlives_the_plugin(node: NodeWithProcesses, tmp_path: Path) -> None:
    node.runs("a")
    node.lost("a")
    again = UsageRecords(tmp_path, "boot")
    again.load()
    looking = OrphanFinder(again, node, node, node.reported.append)
    assert [record.uid for record in looking.still_using()] == ["a"]
    await looking.once()
    assert [orphan.uid for orphan in looking.reported] == ["a"]


async def test_where_processes_cannot_be_seen_that_is_reported_once_and_capacity_is_free_at_once(
    node: NodeWithProcesses,
) -> None:
    node.blind = True
    with capture_logs() as logs:
        for uid in "ab":
            node.runs(uid)
            node.lost(uid)
            await node.orphan_finder.once()
    assert node.orphan_finder.blind
    assert [line["event"] for line in logs if "no hostPID" in line["event"]] == [
        "the node's processes cannot be seen (no hostPID): the capacity of a pod that is deleted by force is free at once"
    ]
    assert list(node.records) == []


async def test_the_loop_checks_again_while_there_is_an_orphan_and_only_then(node: NodeWithProcesses) -> None:
    node.runs("a")
    work = asyncio.create_task(node.orphan_finder.run())
    await asyncio.sleep(0.05)
    assert node.looks == 0
    node.lost("a")
    async with asyncio.timeout(10):
        while not node.reported:  # noqa: ASYNC110 (a thread looks)
            await asyncio.sleep(0.01)
        gone = asyncio.create_task(node.orphan_finder.changed())
        node.alive.clear()
        await gone
    assert node.reported[-1] == ()
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work


async def test_a_record_that_cannot_be_removed_keeps_its_capacity_and_is_tried_again(
    node: NodeWithProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.runs("a")
    node.alive.clear()
    node.lost("a")

    def full(_: object) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(node.records, "forget", full)
    with pytest.raises(OSError, match="no space left"):
        await node.orphan_finder.once()
    assert [record.uid for record in node.orphan_finder.still_using()] == ["a"]


def ledger_of(node: NodeWithProcesses, pods: KnownPods, pod_wait_s: float = 0.0) -> DeviceLedger:
    return DeviceLedger(
        pods,
        lambda: inventory(1),
        DEFAULT,
        orphans=node.orphan_finder,
        users=node.records.users,
        pod_wait_s=pod_wait_s,
    )


async def test_allocate_refuses_the_capacity_of_an_orphan_and_names_its_pod(node: NodeWithProcesses) -> None:
    node.runs("a")
    node.lost("a")
    pods = KnownPods()
    pods.show(node_pod("b", 0, share("main", 8), on=[0]))
    with pytest.raises(
        Refused, match=r"20480 MiB .* counting pod default/a, deleted by force, whose processes still run"
    ):
        await ledger_of(node, pods).allocate(MEM, [f"{uuid(0)}-{slot}" for slot in range(8)])


async def test_allocate_waits_for_an_orphan_that_ends_in_time(node: NodeWithProcesses) -> None:
    node.runs("a")
    node.lost("a")
    pods = KnownPods()
    pods.show(node_pod("b", 0, share("main", 8), on=[0]))
    waiting = asyncio.create_task(
        ledger_of(node, pods, pod_wait_s=20.0).allocate(MEM, [f"{uuid(0)}-{slot}" for slot in range(8)])
    )
    await asyncio.sleep(0.05)
    assert not waiting.done()
    node.alive.clear()
    await node.orphan_finder.once()
    assert (await waiting).node_pod.name == "b"


async def test_devices_of_a_living_process_are_neither_named_nor_given(node: NodeWithProcesses) -> None:
    """The kubelet has lost its checkpoint: it takes all devices for free."""
    all_ids = [f"{uuid(0)}-{slot}" for slot in range(16)]
    started = node_pod("a", 0, share("main", 4), on=[0])
    pods = KnownPods()
    pods.show(started)
    pods.admitted(started)
    node.runs(started.uid, (AssignedGpu(uuid(0), 0, 4096),), tuple(all_ids[:4]))
    pods.show(node_pod("b", 1, share("main", 4), on=[0]))
    ledger = ledger_of(node, pods)
    preferred = await ledger.prefer(MEM, all_ids, [], 4)
    assert set(preferred).isdisjoint(all_ids[:4])
    with pytest.raises(Refused, match="processes of pod default/a use some of them"):
        await ledger.allocate(MEM, all_ids[2:6])
    assert (await ledger.allocate(MEM, preferred)).node_pod.name == "b"


def beside_a_pod_that_is_ending(node: NodeWithProcesses) -> tuple[list[str], KnownPods]:
    """IDs of two GPUs, and a pod that was assigned half of the first. Processes of a deleted pod still use three quarters of it."""
    all_ids = [f"{uuid(number)}-{slot}" for number in range(2) for slot in range(16)]
    node.runs("a", (AssignedGpu(uuid(0), 0, 12288),), tuple(all_ids[:12]))
    node.lost("a")
    pods = KnownPods()
    pods.show(node_pod("b", 0, share("main", 8), on=[0]))
    return all_ids, pods


async def test_preferred_devices_wait_for_pods_that_are_just_ending(node: NodeWithProcesses) -> None:
    """The kubelet has theirs back already. On another GPU the container could not be allocated what it was assigned."""
    all_ids, pods = beside_a_pod_that_is_ending(node)
    preferred = asyncio.create_task(ledger_of(node, pods, pod_wait_s=20.0).prefer(MEM, all_ids, (), 8))
    await asyncio.sleep(0.05)
    assert not preferred.done()
    node.alive.clear()
    await node.orphan_finder.once()
    assert set(await preferred) <= set(all_ids[:16])


async def test_preferred_devices_wait_no_longer_than_the_kubelet_does(node: NodeWithProcesses) -> None:
    all_ids, pods = beside_a_pod_that_is_ending(node)
    preferred = await ledger_of(node, pods, pod_wait_s=0.01).prefer(MEM, all_ids, (), 8)
    assert set(preferred).isdisjoint(all_ids[:12])


async def test_devices_of_a_pod_that_has_not_started_are_the_kubelets_to_give(node: NodeWithProcesses) -> None:
    ids = [f"{uuid(0)}-{slot}" for slot in range(4)]
    waits = node_pod("a", 0, share("main", 4), on=[0])
    pods = KnownPods()
    pods.show(waits)
    node.api[waits.uid] = waits
    node.records.enter(UsageRecord(waits.uid, "default", "a", HELD), {MEM: ids})
    assert sorted(await ledger_of(node, pods).prefer(MEM, ids, [], 4)) == ids
    assert (await ledger_of(node, pods).allocate(MEM, ids)).node_pod.name == "a"


async def test_a_whole_gpu_of_an_orphan_is_refused(node: NodeWithProcesses) -> None:
    from vgpu.api.request import GpuRequest

    node.runs("a", (AssignedGpu(uuid(0), 0, 16 * 1024, 100, "whole"),))
    node.lost("a")
    pods = KnownPods()
    pods.show(node_pod("b", 0, GpuRequest("main", "whole", 1), on=[0]))
    with pytest.raises(
        Refused, match="was assigned to one container alone and to others as well, counting pod default/a"
    ):
        await ledger_of(node, pods).allocate(GPU, [uuid(0)])


async def test_pods_that_go_together_are_checked_together_unless_a_call_waits(
    node: NodeWithProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphan_finder, "REST_S", 30.0)
    looked = asyncio.Event()
    living = node.living
    monkeypatch.setattr(node, "living", lambda *of: looked.set() or living(*of))
    for uid in ("a", "b", "c"):
        node.runs(uid)
    node.alive.clear()
    following = asyncio.create_task(node.orphan_finder.run())
    try:
        await asyncio.sleep(0)
        for uid in ("a", "b", "c"):
            node.lost(uid)
            await asyncio.sleep(0.01)
        assert (node.looks, len(node.orphan_finder.still_using())) == (0, 3)  # their capacity stays reserved meanwhile
        async with asyncio.timeout(10):
            await node.orphan_finder.changed()
        assert looked.is_set()
        assert (node.looks, node.orphan_finder.still_using()) == (1, [])
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
