"""The real kube-scheduler among a thousand nodes that change, and pods that go before they are placed, and replicas that die, whole or by half.

TANGRAM_SCHEDULER_NODES=10000 TANGRAM_SCHEDULER_PODS=10000 TANGRAM_SCHEDULER_PATIENCE_S=3600 is the large form of the first test.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from tests.builders import NodeBuilder, PodBuilder, gpu, node, pod
from tests.integration.extender.following import Watched, watched
from tests.integration.extender.scheduling import NODES, Pair, Stack, pod_object
from vgpu.scheduling.snapshot import Snapshot

NODE_COUNT: Final = int(os.environ.get("TANGRAM_SCHEDULER_NODES", "1000"))
POD_COUNT: Final = int(os.environ.get("TANGRAM_SCHEDULER_PODS", "1500"))
PATIENCE_S: Final = int(os.environ.get("TANGRAM_SCHEDULER_PATIENCE_S", "200"))
AHEAD: Final = pytest.mark.parametrize("ahead", ["never", "always"])
FULL_MIB: Final = 81_920
GIB: Final = 1_024
PODS: Final = "/api/v1/namespaces/default/pods"


class World:
    """A cluster and a count of it all."""

    def __init__(self, stack: Stack, cluster: Watched) -> None:
        self.stack, self.api, self.follower, self.ledger = stack, cluster.api, cluster.follower, cluster.ledger
        self.add = cluster.add

    async def agrees(self, pair: Pair) -> None:
        """An extender believes what the API says; its watch may be behind ours for a moment, and so is asked again."""
        await self._comes_to_no(pair, self.ledger.differences)

    async def agrees_on_who_is_bound(self, pair: Pair) -> None:
        """As `agrees`, of an extender whose scheduler died: its reservations last until they lapse."""
        await self._comes_to_no(
            pair,
            lambda said: sorted({one.uid for one in said.pods if one.stage == "seen bound"} ^ set(self.ledger.held)),
        )

    @staticmethod
    async def _comes_to_no(pair: Pair, differences: Callable[[Snapshot], list[str]]) -> None:
        assert pair.extender is not None
        for _ in range(50):
            found = differences(await pair.extender.snapshot())
            if not found:
                return
            await asyncio.sleep(0.2)
        raise AssertionError(f"{len(found)} differences: {found[:5]}")


@pytest.fixture
async def world(stack: Stack) -> AsyncIterator[World]:
    async with watched(stack.api) as cluster:
        yield World(stack, cluster)


class Changes:
    """What happens to nodes while pods are scheduled: one change for each few that the pods go through, so that they keep pace."""

    EACH: Final = 5

    def __init__(self, world: World, nodes: list[NodeBuilder], chance: random.Random) -> None:
        self._world, self._chance, self._nodes = world, chance, nodes
        self._heard = 0
        self._due = asyncio.Semaphore(0)
        self._changed: set[str] = set()
        self.made = 0

    def report(self, _kind: str, _pod: dict[str, Any]) -> None:
        """As a Follower does."""
        self._heard += 1
        if self._heard % self.EACH == 0:
            self._due.release()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._due.acquire()
            built = self._chance.choice(self._nodes)
            self._changed.add(built.name)
            await self._world.api.patch(f"{NODES}/{built.name}", self._chance.choice(self._all(built)))
            self.made += 1

    async def mend(self) -> None:
        """Every node is as it was."""
        for built in self._nodes:
            if built.name in self._changed:
                await self._world.api.patch(f"{NODES}/{built.name}", change(built) | {"spec": {"unschedulable": None}})

    @staticmethod
    def _all(built: NodeBuilder) -> list[dict[str, Any]]:
        first, *rest = built.gpus
        return [
            {"spec": {"unschedulable": True}},
            {"spec": {"unschedulable": None}},
            change(built.with_inventory(replace(first, healthy=False), *rest)),
            change(built.with_inventory(*rest)),
            change(built.with_text('{"v":1,"inventory":')),
            {"metadata": {"annotations": {"tangram.sh/inventory": None}}},
            change(built),
        ]


def change(built: NodeBuilder) -> dict[str, Any]:
    """The patch by which a device plugin publishes this."""
    return {"metadata": {"annotations": built.plain()["metadata"]["annotations"]}}


def various(count: int, chance: random.Random) -> Iterator[PodBuilder]:
    """Pods that leave gaps between them."""
    for at in range(count):
        mib, core = chance.choice((20, 30, 34, 40, 46, 50, 80)) * GIB, chance.choice((0, 20, 30, 45))
        if at % 10 == 0:
            yield pod(f"p{at}").annotated(gpu_count="2").asking(mib=2 * mib, core=2 * core)
        else:
            yield pod(f"p{at}").asking(mib=mib, core=core)


class Impatient:
    """Who deletes pods: some at once, some when they are bound, some when they run."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self._world, self._chance = world, chance
        self._plans: dict[str, str] = {}
        self._due: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.deleted: set[str] = set()

    def report(self, kind: str, pod: dict[str, Any]) -> None:
        """As a Follower does."""
        uid = pod["metadata"]["uid"]
        if kind == "ADDED":
            self._plans[uid] = self._chance.choices(("keep", "made", "bound", "runs"), (12, 1, 1, 1))[0]
        now = "runs" if pod["status"]["phase"] == "Running" else "bound" if "nodeName" in pod["spec"] else "made"
        if self._plans.get(uid) == now and uid not in self.deleted:
            self.deleted.add(uid)
            self._due.put_nowait(pod)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._world.api.delete(await self._due.get())


class Nominated:
    """Pods that were nominated before they were bound, by what the API server says."""

    def __init__(self) -> None:
        self._to: dict[str, str] = {}
        self.followed, self.twice = 0, list[str]()

    def report(self, _kind: str, pod: dict[str, Any]) -> None:
        """As a Follower does."""
        uid, to = pod["metadata"]["uid"], pod["status"].get("nominatedNodeName", "")
        if "nodeName" in pod["spec"]:
            self.followed += self._to.pop(uid, "") == pod["spec"]["nodeName"]
        elif to and self._to.setdefault(uid, to) != to:
            self.twice.append(pod["metadata"]["name"])

    def check(self, ahead: str, *, at_least: int) -> None:
        """Many went where they were nominated to, and nobody was nominated again; or nobody was."""
        assert self.twice == []
        assert self.followed > at_least if ahead == "always" else not self.followed and not self._to


@AHEAD
@pytest.mark.timeout(4 * PATIENCE_S)
async def test_nothing_is_booked_twice_or_lost_while_pods_go_and_nodes_change(world: World, ahead: str) -> None:
    chance = random.Random(1)
    nodes = [node(f"n{at:05}").with_gpus(2) for at in range(NODE_COUNT)]
    await world.add(*nodes)
    pair = await world.stack.pair(ahead=ahead)
    changes, impatient = Changes(world, nodes, chance), Impatient(world, chance)
    nominated = Nominated()
    world.follower.reported += [changes.report, impatient.report, nominated.report]
    noise = [asyncio.create_task(one.run()) for one in (changes, impatient)]
    try:
        await world.api.create(PODS, (pod_object(one) for one in various(POD_COUNT, chance)))
        await bound(world, lambda _: world.ledger.bound_ever >= POD_COUNT * 3 // 4)
        world.follower.reported.remove(changes.report)
        noise[0].cancel()
        await asyncio.wait(noise[:1])
        await changes.mend()
        await settled(world, impatient)
    finally:
        for one in noise:
            one.cancel()
        ended = await asyncio.gather(*noise, return_exceptions=True)
    assert [one for one in ended if not isinstance(one, asyncio.CancelledError)] == []
    assert world.ledger.wrong == []
    assert changes.made > POD_COUNT // 10
    assert len(world.ledger.held) + len(impatient.deleted) == POD_COUNT
    await world.agrees(pair)
    nominated.check(ahead, at_least=POD_COUNT // 10)


async def settled(world: World, impatient: Impatient) -> None:
    """Return when all pods that stay run, and all others are gone."""
    ledger = world.ledger

    def done() -> bool:
        assert ledger.wrong == []
        return len(ledger.names) == POD_COUNT and not ledger.waiting() and impatient.deleted.isdisjoint(ledger.alive)

    await world.follower.until(done, "all pods that stay are bound and the others gone", timeout_s=3 * PATIENCE_S)


@AHEAD
@pytest.mark.timeout(2 * PATIENCE_S)
async def test_a_leading_pair_and_then_a_scheduler_alone_killed_under_load_lose_nothing_and_book_nothing_twice(
    world: World, ahead: str
) -> None:
    names, room = [f"n{at:03}" for at in range(100)], 400
    await world.add(*(node(name).with_inventory(gpu(0, FULL_MIB, name), gpu(1, FULL_MIB, name)) for name in names))
    nominated = Nominated()
    world.follower.reported.append(nominated.report)
    first = await world.stack.pair(elected=True, ahead=ahead)
    await first.comes_to_lead()
    second = await world.stack.pair(elected=True, ahead=ahead)
    asking = (pod(f"p{at}").asking(mib=FULL_MIB // 2, core=50) for at in range(room + 40))
    creating = asyncio.create_task(world.api.create(PODS, map(pod_object, asking)))
    await bound(world, lambda count: count >= room // 4)
    await first.kill()
    third = await world.stack.pair(elected=True, ahead=ahead)
    await second.comes_to_lead()
    await bound(world, lambda count: count >= room // 2)
    second.scheduler.kill()  # its extender lives on, and is not called
    await third.comes_to_lead()
    await bound(world, lambda count: count >= room)
    await creating
    assert world.ledger.wrong == []
    await world.agrees(third)
    await world.agrees_on_who_is_bound(second)
    nominated.check(ahead, at_least=room // 10)
    assert len(world.ledger.bound()) == room, "every GPU is full and none more than full"
    mib, percent = world.ledger.used()
    assert set(mib.values()) == {FULL_MIB}
    assert set(percent.values()) == {100}


async def bound(world: World, enough: Callable[[int], bool]) -> None:
    """Return when so many pods are."""

    def true() -> bool:
        assert world.ledger.wrong == []
        return enough(len(world.ledger.held))

    await world.follower.until(true, "so many pods are bound", timeout_s=3 * PATIENCE_S)
