"""Which instances a node makes, keeps and removes, and what it says when it does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.gpus.offer import Offer
from deviceplugin.mig.instances import InstanceReplaced, NoRoom
from deviceplugin.mig.on_demand import MigOnDemand
from deviceplugin.pod_resources import ContainerDevices, KubeletUnreachable
from nvml.messages import MigReply
from tests.unit.deviceplugin.mig.double import MigDouble, PodsThatHave, mig_gpu, on_demand_of
from vgpu.api.errors import Refused
from vgpu.api.inventory import WITHDRAWN, AccessMode, GpuCondition, Inventory, Withdrawal
from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import slot_device
from vgpu.api.names import DEFAULT

GPU = mig_gpu()
SMALL, HALF = (slot_device(GPU.uuid, one) for one in (MigSlot(6, "1g.10gb"), MigSlot(4, "3g.40gb")))
RESOURCE = DEFAULT.mig("1g.10gb")


@dataclass
class KnownNode:
    """A node, its clock, and the kubelet's records."""

    folder: Path
    access: AccessMode = "cdi"
    idle_s: float = 10.0
    now_s: float = 0.0
    driver: MigDouble = field(default_factory=MigDouble)
    pods: PodsThatHave = field(default_factory=PodsThatHave)
    listed: list[str] | None = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    offer: Offer = field(init=False)
    node: MigOnDemand = field(init=False)

    async def begin(self) -> KnownNode:
        more: dict[str, Any] = {"holdings": self.holdings, "report": self.reports.append, "idle_s": self.idle_s}
        self.offer, self.node = on_demand_of(self.driver, self.pods, self.folder, clock=lambda: self.now_s, **more)
        await self.probe(Inventory((GPU,), access=self.access))
        return self

    async def probe(self, inventory: Inventory) -> None:
        await self.node.prepare(inventory)
        self.offer.set_inventory(inventory)

    async def holdings(self) -> Sequence[ContainerDevices]:
        if self.listed is None:
            raise KubeletUnreachable("the kubelet does not answer")
        return [ContainerDevices("default", one, "main", RESOURCE, frozenset((one,))) for one in self.listed]

    async def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        await self.node._tidy()


async def test_an_instance_stays_for_its_time_when_no_pod_has_it(tmp_path: Path) -> None:
    known = await KnownNode(tmp_path).begin()
    await known.node.allocate([SMALL])
    known.pods.have([SMALL])
    await known.pass_s(60)
    known.pods.have([])
    await known.pass_s(0)
    await known.pass_s(9)
    assert known.driver.layout() == (MigSlot(6, "1g.10gb"),)
    known.pods.have([SMALL])
    await known.pass_s(1)
    known.pods.have([])
    await known.pass_s(5)
    await known.pass_s(9)
    assert known.driver.layout() != (), "its time began again"
    await known.pass_s(1)
    assert known.driver.layout() == ()


async def test_nothing_is_removed_while_the_kubelets_records_are_not_known(tmp_path: Path) -> None:
    known = await KnownNode(tmp_path, idle_s=0.0).begin()
    await known.node.allocate([SMALL])
    known.listed = None
    await known.pass_s(60)
    assert known.driver.layout() != ()
    known.listed = [SMALL]
    await known.pass_s(60)
    assert known.driver.layout() != (), "the kubelet still names its pod"
    known.listed = []
    await known.pass_s(60)
    assert known.driver.layout() == ()


async def test_room_that_older_records_of_the_kubelet_deny_is_found_by_newer_ones(tmp_path: Path) -> None:
    known = await KnownNode(tmp_path).begin()
    known.listed = [SMALL]
    await known.node.allocate([SMALL])
    await known.pass_s(60)
    known.listed = []
    await known.node.allocate([HALF])
    assert known.driver.layout() == (MigSlot(4, "3g.40gb"),)
    assert not known.pods.waited_for.is_set()


async def test_room_is_waited_for_while_the_watch_is_late(tmp_path: Path) -> None:
    known = await KnownNode(tmp_path).begin()
    await known.node.allocate([SMALL])
    known.pods.have([SMALL])
    waiting = asyncio.create_task(known.node.allocate([HALF]))
    await known.pods.waited_for.wait()
    assert not waiting.done()
    known.pods.have([])
    await waiting
    assert known.driver.layout() == (MigSlot(4, "3g.40gb"),)


async def test_no_room_is_refused_in_the_end_and_removes_nothing(tmp_path: Path) -> None:
    known = await KnownNode(tmp_path).begin()
    await known.node.allocate([SMALL])
    known.pods.have([SMALL])
    waiting = asyncio.create_task(known.node.allocate([HALF]))
    await known.pods.waited_for.wait()
    known.now_s += 2
    known.pods.have([SMALL])
    with pytest.raises(NoRoom, match=r"in use are 1g\.10gb at slice 6"):
        await waiting
    assert known.driver.destroyed == []


async def test_no_instance_is_made_on_an_unhealthy_gpu_and_a_restart_there_finds_its_own(tmp_path: Path) -> None:
    known = await KnownNode(tmp_path).begin()
    await known.node.allocate([SMALL])
    known.pods.have([SMALL])
    await known.probe(Inventory((replace(GPU, healthy=False),)))
    with pytest.raises(Refused, match="is unhealthy: no MIG instance is made on it"):
        await known.node.allocate([HALF])
    await known.node.before_start([SMALL])
    assert [(device.id, device.healthy) for device in known.offer.devices(RESOURCE) if device.id == SMALL] == [
        (SMALL, False)
    ]


async def test_on_a_cordoned_gpu_nothing_is_made_what_is_in_use_stays_and_the_rest_goes(tmp_path: Path) -> None:
    known = await KnownNode(tmp_path, idle_s=0.0).begin()
    for slot in (SMALL, HALF.replace("3g.40gb-4", "3g.40gb-0")):
        await known.node.allocate([slot])
        known.pods.have([SMALL, slot])
    known.pods.have([SMALL])
    known.offer.in_use = lambda _: (SMALL,)
    known.offer.set_withdrawn("cordons", {GPU.uuid: GpuCondition(Withdrawal.CORDONED, WITHDRAWN, 1, "by hand")})
    assert [device.id for device in known.offer.devices(RESOURCE)] == [SMALL]
    with pytest.raises(Refused, match="is withdrawn, and no MIG instance is made on it: Cordoned: by hand"):
        await known.node.allocate([slot_device(GPU.uuid, MigSlot(0, "1g.10gb"))])
    await known.node.before_start([SMALL])
    await known.pass_s(60)
    assert known.driver.layout() == (MigSlot(6, "1g.10gb"),)
    known.offer.set_withdrawn("cordons", {GPU.uuid: GpuCondition(Withdrawal.RELEASED, WITHDRAWN, 1)})
    calls, known.driver.mig = known.driver.mig, None  # type: ignore[assignment, method-assign]
    await known.pass_s(60)
    known.driver.mig = calls  # type: ignore[method-assign]
    known.offer.set_withdrawn("cordons", {})
    assert len(known.offer.devices(RESOURCE)) == 7


@pytest.mark.parametrize("reason", [Withdrawal.CLASH, Withdrawal.UNKNOWN])
async def test_nothing_is_removed_that_another_device_plugin_may_have_given_away(
    tmp_path: Path, reason: Withdrawal
) -> None:
    known = await KnownNode(tmp_path, idle_s=0.0).begin()
    await known.node.allocate([SMALL])
    known.offer.set_withdrawn("owner", {GPU.uuid: GpuCondition(reason, WITHDRAWN, 1)})
    await known.pass_s(60)
    assert known.driver.layout() == (MigSlot(6, "1g.10gb"),)
    known.offer.set_withdrawn("owner", {})
    await known.pass_s(60)
    assert known.driver.layout() == ()


@pytest.mark.parametrize("access", ["cdi", "nvidia"])
async def test_after_a_reset_a_container_starts_again_only_where_a_name_can_stand_for_the_new_instance(
    tmp_path: Path, access: AccessMode
) -> None:
    known = await KnownNode(tmp_path, access).begin()
    (before,) = await known.node.allocate([SMALL])
    known.pods.have([SMALL])
    known.driver.reset()
    if access == "nvidia":
        with pytest.raises(InstanceReplaced, match=f"the container gets {before} .*: the pod has to be replaced"):
            await known.node.before_start([SMALL])
        return
    await known.node.before_start([SMALL])
    described, aliases = known.node.described(known.offer.reported)
    (instance,) = described.gpus[0].instances
    assert aliases == {before: instance.uuid}


async def test_foreign_instances_are_reported_once_and_end_the_offer(tmp_path: Path) -> None:
    known = await KnownNode(tmp_path).begin()
    await known.node.allocate([SMALL])
    known.pods.have([SMALL])
    foreign = known.driver.add(MigSlot(0, "2g.20gb"))
    for _ in range(2):
        await known.pass_s(60)
    assert known.reports == [
        f"GPU {GPU.uuid} makes no MIG instances on demand: it has 1 MIG instances that Tangram did not make, the first a 2g.20gb at slice 0"
    ]
    assert [device.id for device in known.offer.devices(RESOURCE)] == [SMALL], "in use"
    known.pods.have([])
    await known.pass_s(60)
    await known.pass_s(60)
    assert list(known.driver.instances.values()) == [foreign]


async def test_a_gpu_with_declared_instances_from_the_start_is_no_news(tmp_path: Path) -> None:
    known = KnownNode(tmp_path)
    known.driver.add(MigSlot(0, "2g.20gb"))
    await known.begin()
    await known.pass_s(60)
    assert known.reports == []
    assert not known.offer.inventory().gpus[0].on_demand
    known.driver.reset()
    await known.pass_s(60)
    assert known.offer.inventory().gpus[0].on_demand


async def test_a_slot_of_no_gpu_of_the_node_is_refused(tmp_path: Path) -> None:
    known = await KnownNode(tmp_path).begin()
    other = slot_device(mig_gpu(index=7).uuid, MigSlot(6, "1g.10gb"))
    with pytest.raises(Refused, match=f"{other} is no MIG slot of a GPU of this node"):
        await known.node.allocate([other])


async def test_an_allocation_that_was_given_up_removes_nothing_from_those_after_it(tmp_path: Path) -> None:
    """It waits for the driver, with what was in use when it began. Then a later container gets an instance, and has no process yet."""
    known = await KnownNode(tmp_path).begin()
    await known.node.allocate([SMALL])
    await known.pass_s(1)  # now the kubelet's records are known, too
    driver, entered, answers = known.driver, threading.Event(), threading.Event()
    reply = driver.mig

    def slow(uuid: str) -> MigReply:
        entered.set()
        assert answers.wait(30)
        return reply(uuid)

    driver.mig = slow  # type: ignore[method-assign]
    known.node._make_s = 0.05
    first = asyncio.create_task(known.node.before_start([SMALL]))  # it has the driver, and does not return
    assert await asyncio.to_thread(entered.wait, 30)
    first.cancel()
    stale = asyncio.create_task(known.node.allocate([HALF]))  # SMALL is idle and in its way
    await asyncio.wait([first, stale], timeout=30)
    assert isinstance(stale.exception(), Refused)
    known.pods.have([SMALL])
    known.node._make_s = 30.0
    answers.set()
    await known.node.allocate([SMALL])
    await asyncio.get_running_loop().shutdown_default_executor()
    assert driver.destroyed == []
    assert driver.layout() == (MigSlot(6, "1g.10gb"),)
