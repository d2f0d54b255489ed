"""Gangs through the real kube-scheduler: it tries their pods in one cycle, and tells the extender neither of its end nor of pods that it refuses itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final

import pytest

from tests.builders import PodBuilder, node, pod
from tests.integration.extender.conftest import GANG_GATES
from tests.integration.extender.harness import holders
from tests.integration.extender.ledger import Ledger
from tests.integration.extender.scheduling import Follower, Kubelet, Pair, Stack, Thing, node_object, pod_object
from vgpu.gangs import QUIET_S
from vgpu.snapshot import Snapshot

PODS: Final = "/api/v1/namespaces/default/pods"
GROUPS: Final = "/apis/scheduling.k8s.io/v1alpha2/namespaces/default/podgroups"
BACK_S: Final = 4.0
"""From the last filter call, or from the moment in which others ask for it, to the room of a gang that failed. Specified."""

GPUS: Final = 4
FULL_MIB: Final = 81_920
TAINT: Final = {"key": "reserved", "value": "batch", "effect": "NoSchedule"}


class World:
    """A node with four GPUs, a kubelet that runs what is bound, and a count of it all."""

    def __init__(self, stack: Stack, follower: Follower, ledger: Ledger, pair: Pair) -> None:
        self.api, self.follower, self.ledger = stack.api, follower, ledger
        assert pair.extender is not None
        self.extender = pair.extender

    async def group(self, name: str, min_count: int | None) -> None:
        """A PodGroup: a gang, or without minCount one of policy Basic."""
        policy: Thing = {"basic": {}} if min_count is None else {"gang": {"minCount": min_count}}
        spec = {"schedulingPolicy": policy}
        await self.api.call("POST", GROUPS, {"metadata": {"name": name}, "spec": spec})

    async def create(self, *built: PodBuilder, tolerating: bool = True) -> list[str]:
        """Pods; their UIDs."""
        things = [pod_object(one) for one in built]
        for thing in things if tolerating else ():
            thing["spec"]["tolerations"] = [{"key": TAINT["key"], "operator": "Exists"}]
        return [one["metadata"]["uid"] for one in await self.api.create(PODS, things)]

    async def no_groups(self) -> None:
        """No PodGroup is left for the next test. Nobody is there who would take their finalizers."""
        for group in (await self.api.call("GET", GROUPS))["items"]:
            path = f"{GROUPS}/{group['metadata']['name']}"
            await self.api.patch(path, {"metadata": {"finalizers": None}})
            await self.api.call("DELETE", path)

    async def delete(self, uids: list[str]) -> None:
        for uid in uids:
            await self.api.delete(self.ledger.alive[uid], gracePeriodSeconds=0)

    async def bound(self, uids: list[str], what: str = "they are bound", *, timeout_s: float = 90) -> None:
        await self.follower.until(lambda: self.count(uids) == len(uids), what, timeout_s=timeout_s)

    def count(self, uids: list[str]) -> int:
        """How many of them are bound."""
        return sum("nodeName" in self.ledger.alive[uid]["spec"] for uid in uids if uid in self.ledger.alive)

    async def refused(self, uids: list[str]) -> None:
        """Return when kube-scheduler says that none of them can be scheduled."""
        await self.follower.until(lambda: all(map(self._is_refused, uids)), "they are refused")

    def _is_refused(self, uid: str) -> bool:
        conditions = self.ledger.alive.get(uid, {"status": {}})["status"].get("conditions", [])
        return any(one.get("reason") == "Unschedulable" for one in conditions)

    async def calls(self) -> int:
        """Filter calls until now."""
        found = re.findall(r'requests_total{outcome="[a-z_]+",verb="filter"} ([0-9]+)', await self.extender.metrics())
        return sum(map(int, found))

    async def fails(self, reserved: int) -> None:
        """Return when room was reserved for so many pods of a gang, and is free again soon after the last filter call."""
        await self.extender.comes_to(lambda known: len(in_gang(known)) == reserved)
        loop = asyncio.get_running_loop()
        calls, called_s = await self.calls(), loop.time()
        while in_gang(await self.extender.snapshot()) or loop.time() - called_s < QUIET_S:
            before, calls = calls, await self.calls()
            if calls != before:
                called_s = loop.time()
            assert loop.time() - called_s < BACK_S
            await asyncio.sleep(0.05)  # another process: no event comes from it


def in_gang(known: Snapshot) -> set[str]:
    """Pods of gangs that room is reserved for."""
    return {name for name, stage in holders(known).items() if stage == "in gang"}


def members(group: str, *, mib: int = FULL_MIB, count: int = GPUS, **more: str) -> list[PodBuilder]:
    """Pods of a group, each with a GPU."""
    return [pod(f"{group}-{at}").in_group(group).asking(mib=mib, **more) for at in range(count)]


@pytest.fixture(params=[True, False], ids=["tried-again-at-once", "tried-again-after-a-back-off"])
async def world(gang_stack: Stack, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """kube-scheduler tries a gang again at once where nothing else waits, unless it is told to wait for the back-off."""
    gang_stack.flags = (f"--feature-gates={GANG_GATES},SchedulerPopFromBackoffQ={request.param}",)
    one = node("n1").with_gpus(GPUS)
    ledger = Ledger({one.name: {card.uuid: card.mib for card in one.cards}})
    async with AsyncExitStack() as open_until_the_end:
        kubelet = await open_until_the_end.enter_async_context(Kubelet(gang_stack.api).running())
        follower = Follower(gang_stack.api)
        follower.told = [ledger.tell, kubelet.tell]
        await open_until_the_end.enter_async_context(follower.running())
        thing = node_object(one)
        thing["spec"] = {"taints": [TAINT]}
        await gang_stack.api.create("/api/v1/nodes", [thing])
        made = World(gang_stack, follower, ledger, await gang_stack.pair())
        yield made
        await made.no_groups()
    assert ledger.wrong == []


async def refused_for_a_gpu(world: World) -> list[str]:
    """The node has room for the fourth in total, and no GPU has."""
    await world.bound(await world.create(pod("before").asking(mib=FULL_MIB // 2)))
    return await world.create(*members("gang", mib=FULL_MIB * 3 // 4))


async def refused_for_cpu(world: World) -> list[str]:
    """The node has 256 processors; kube-scheduler does not call filter."""
    last = pod("large").in_group("gang").asking(mib=FULL_MIB, cpu="300")
    return await world.create(*members("gang", count=GPUS - 1), last)


async def refused_by_a_taint(world: World) -> list[str]:
    return [
        *await world.create(pod("strict").in_group("gang").asking(mib=FULL_MIB), tolerating=False),
        *await world.create(*members("gang", count=GPUS - 1)),
    ]


Lacking = Callable[[World], Awaitable[list[str]]]
LACKING: Final = [refused_for_a_gpu, refused_for_cpu, refused_by_a_taint]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [False], indirect=True, ids=["tried-again-after-a-back-off"])
@pytest.mark.parametrize("lacking", LACKING)
async def test_the_room_of_a_gang_that_lacks_one_pod_is_soon_free_at_each_attempt(
    world: World, lacking: Lacking
) -> None:
    await world.group("gang", GPUS)
    uids = await lacking(world)
    await world.fails(GPUS - 1)
    await world.fails(GPUS - 1)
    assert world.count(uids) == 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lacking", LACKING)
async def test_other_pods_have_the_room_of_a_gang_that_lacks_one_pod(world: World, lacking: Lacking) -> None:
    await world.group("gang", GPUS)
    uids = await lacking(world)
    await world.refused(uids)
    others = await world.create(*(pod(f"other-{at}").asking(mib=FULL_MIB) for at in range(GPUS - 1)))
    await world.bound(others, timeout_s=BACK_S)
    assert world.count(uids) == 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [False], indirect=True, ids=["tried-again-after-a-back-off"])
async def test_a_launcher_without_a_gpu_counts_until_it_is_refused(world: World) -> None:
    await world.group("runs", 2)
    launcher = pod("launcher").in_group("runs")
    runs = await world.create(launcher, *members("runs", count=1))
    await world.bound(runs)
    await world.group("gang", GPUS)
    uids = await world.create(pod("large").in_group("gang").asking(cpu="300"), *members("gang", count=GPUS - 1))
    await world.fails(GPUS - 1)
    await world.fails(GPUS - 1)
    assert world.count(uids) == 0
    await world.bound(await world.create(*(pod(f"other-{at}").asking(mib=FULL_MIB) for at in range(GPUS - 1))))


async def test_the_pods_of_a_gang_are_bound_together(world: World) -> None:
    await world.group("gang", GPUS)
    await world.bound(await world.create(*members("gang")))
    assert world.follower.told
    assert not in_gang(await world.extender.snapshot())


async def test_of_a_gang_that_needs_fewer_than_it_has_so_many_run_as_fit(world: World) -> None:
    await world.group("gang", GPUS - 1)
    uids = await world.create(*members("gang", count=GPUS + 1))
    await world.follower.until(lambda: world.count(uids) == GPUS, "as many are bound as there are GPUs")
    (left,) = [uid for uid in uids if "nodeName" not in world.ledger.alive[uid]["spec"]]
    await world.delete([next(uid for uid in uids if uid != left)])
    await world.bound([left], "the last has the room of one that ended")


async def test_pods_of_a_basic_group_are_bound_one_by_one(world: World) -> None:
    await world.group("basic", None)
    uids = await world.create(*members("basic", count=GPUS + 1))
    await world.follower.until(lambda: world.count(uids) == GPUS, "as many are bound as there are GPUs")
    assert "in gang" not in holders(await world.extender.snapshot()).values()


@pytest.mark.timeout(240)
async def test_of_two_gangs_that_want_the_same_gpus_one_runs_and_then_the_other(world: World) -> None:
    before = await world.create(pod("before").asking(mib=FULL_MIB))
    await world.bound(before)
    gangs = []
    for name in ("one", "two"):
        await world.group(name, GPUS)
        gangs.append(await world.create(*members(name)))
    await world.refused([*gangs[0], *gangs[1]])
    assert [world.count(gang) for gang in gangs] == [0, 0]
    await world.delete(before)
    await world.follower.until(lambda: GPUS in map(world.count, gangs), "one of them runs")
    gangs.sort(key=world.count)
    assert [world.count(gang) for gang in gangs] == [0, GPUS]
    await world.delete(gangs[1])
    await world.bound(gangs[0], "the other runs")


async def test_a_gang_that_fits_is_not_kept_from_it_by_one_that_does_not(world: World) -> None:
    await world.group("large", GPUS + 1)
    await world.group("small", GPUS)
    large = await world.create(*members("large", mib=FULL_MIB * 3 // 4, count=GPUS + 1))
    await world.refused(large)
    await world.bound(await world.create(*members("small")))
    assert world.count(large) == 0
