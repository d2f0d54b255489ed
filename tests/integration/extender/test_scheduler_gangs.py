"""Gangs through the real kube-scheduler: it tries their pods in one cycle, and tells the extender neither of its end nor of pods that it refuses itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Final

import pytest

from tests.builders import PodBuilder, node, pod
from tests.integration.extender.harness import holders
from tests.integration.extender.ledger import Ledger
from tests.integration.extender.scheduling import Follower, Kubelet, Pair, Stack, Thing, node_object, pod_object

PODS: Final = "/api/v1/namespaces/default/pods"
GROUPS: Final = "/apis/scheduling.k8s.io/v1alpha2/namespaces/default/podgroups"
BACK_S: Final = 4.0
"""From the last filter call to the moment in which the room of a gang that failed is free again. Specified."""

GPUS: Final = 4
FULL_MIB: Final = 81_920
TAINT: Final = {"key": "reserved", "value": "batch", "effect": "NoSchedule"}


class World:
    """A node with four GPUs, a kubelet that runs what is bound, and a count of it all."""

    def __init__(self, stack: Stack, follower: Follower, ledger: Ledger, pair: Pair) -> None:
        self.api, self.follower, self.ledger = stack.api, follower, ledger
        assert pair.extender is not None
        self.extender = pair.extender
        self._events = 0

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

    async def delete(self, uids: list[str]) -> None:
        for uid in uids:
            await self.api.delete(self.ledger.alive[uid], gracePeriodSeconds=0)

    async def bound(self, uids: list[str], what: str = "they are bound") -> None:
        await self.follower.until(lambda: self.count(uids) == len(uids), what)

    def count(self, uids: list[str]) -> int:
        """How many of them are bound."""
        return sum("nodeName" in self.ledger.alive[uid]["spec"] for uid in uids if uid in self.ledger.alive)

    async def refused(self, uids: list[str]) -> None:
        """Return when kube-scheduler says that none of them can be scheduled."""
        await self.follower.until(lambda: all(map(self._is_refused, uids)), "they are refused")

    def _is_refused(self, uid: str) -> bool:
        conditions = self.ledger.alive.get(uid, {"status": {}})["status"].get("conditions", [])
        return any(one.get("reason") == "Unschedulable" for one in conditions)

    def in_gang(self, stages: dict[str, str]) -> set[str]:
        return {name for name, stage in stages.items() if stage == "in gang"}

    async def fails_once(self, reserved: int) -> None:
        """Return when room was reserved for so many pods of a gang, and is free again in time."""
        await self.extender.comes_to(lambda known: len(self.in_gang(holders(known))) == reserved)
        async with asyncio.timeout(BACK_S):
            await self.extender.comes_to(lambda known: not self.in_gang(holders(known)))

    async def try_again(self) -> None:
        """An event in the API after which kube-scheduler tries pods again: a node that is of no use to any."""
        self._events += 1
        one = node_object(node(f"another-{self._events}").with_gpus(8))
        one["spec"] = {"taints": [{"key": "nobody", "effect": "NoSchedule"}]}
        one["status"]["allocatable"] = one["status"]["allocatable"] | {"cpu": "1000"}
        await self.api.create("/api/v1/nodes", [one])


def members(group: str, *, mib: int = FULL_MIB, count: int = GPUS, **more: str) -> list[PodBuilder]:
    """Pods of a group, each with a GPU."""
    return [pod(f"{group}-{at}").in_group(group).asking(mib=mib, **more) for at in range(count)]


@pytest.fixture
async def world(gang_stack: Stack) -> AsyncIterator[World]:
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
        yield World(gang_stack, follower, ledger, await gang_stack.pair())
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


@pytest.mark.timeout(240)
@pytest.mark.parametrize("refused", [refused_for_a_gpu, refused_for_cpu, refused_by_a_taint])
async def test_the_room_of_a_gang_that_lacks_one_pod_is_soon_free_at_each_attempt(
    world: World, refused: Callable[[World], AsyncIterator[list[str]]]
) -> None:
    await world.group("gang", GPUS)
    uids = await refused(world)  # type: ignore[misc]
    await world.fails_once(GPUS - 1)
    await world.refused(uids)
    await world.try_again()
    await world.fails_once(GPUS - 1)
    assert world.count(uids) == 0
