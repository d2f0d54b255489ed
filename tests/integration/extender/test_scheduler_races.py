"""The real kube-scheduler among a thousand nodes that change, pods that are deleted before they are placed, and replicas that are killed, whole or by half.

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
from tests.integration.extender.following import WatchedCluster, watched
from tests.integration.extender.scheduling import NODES, SchedulerPair, Stack, pod_object
from vgpu.scheduling.snapshot import Snapshot

NODE_COUNT: Final = int(os.environ.get("TANGRAM_SCHEDULER_NODES", "1000"))
POD_COUNT: Final = int(os.environ.get("TANGRAM_SCHEDULER_PODS", "1500"))
PATIENCE_S: Final = int(os.environ.get("TANGRAM_SCHEDULER_PATIENCE_S", "200"))
AHEAD: Final = pytest.mark.parametrize("ahead", ["never", "always"])
FULL_MIB: Final = 81_920
GIB: Final = 1_024
PODS: Final = "/api/v1/namespaces/default/pods"


class RaceSetup:
    """A cluster and a count of it all."""

    def __init__(self, stack: Stack, cluster: WatchedCluster) -> None:
        self.stack, self.api, self.follower, self.ledger = stack, cluster.api, cluster.follower, cluster.ledger
        self.add = cluster.add

    async def agrees(self, pair: SchedulerPair) -> None:
        """An extender's state is what the API reports; its watch may be behind ours for a moment, so the check is repeated."""
        await self._comes_to_no(pair, self.ledger.differences)

    async def agrees_on_bound_pods(self, pair: SchedulerPair) -> None:
        """As `agrees`, of an extender whose scheduler died: its reservations last until they lapse."""
        await self._comes_to_no(
            pair,
            lambda found: sorted({one.uid for one in found.pods if one.stage == "seen bound"} ^ set(self.ledger.held)),
        )

    @staticmethod
    async def _comes_to_no(pair: SchedulerPair, differences: Callable[[Snapshot], list[str]]) -> None:
        assert pair.extender is not None
        for _ in range(50):
            found = differences(await pair.extender.snapshot())
            if not found:
                return
            await asyncio.sleep(0.2)
        raise AssertionError(f"{len(found)} differences: {found[:5]}")


@pytest.fixture
async def setup(stack: Stack) -> AsyncIterator[RaceSetup]:
    async with watched(stack.api) as cluster:
        yield RaceSetup(stack, cluster)


class Changes:
    """What happens to nodes while pods are scheduled: one change for each few that the pods go through, so that they keep pace."""

    EACH: Final = 5

    def __init__(self, setup: RaceSetup, nodes: list[NodeBuilder], chance: random.Random) -> None:
        self._world, self._chance, self._nodes = setup, chance, nodes
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
    """A user that deletes pods: some at once, some when they are bound, some when they run."""

    def __init__(self, setup: RaceSetup, chance: random.Random) -> None:
        self._world, self._chance = setup, chance
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
    """Pods that were nominated before they were bound, by what the API server reports."""

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
        """Many were bound where they were nominated to, and none was nominated twice; or none was nominated."""
        assert self.twice == []
        assert self.followed > at_least if ahead == "always" else not self.followed and not self._to


@AHEAD
@pytest.mark.timeout(4 * PATIENCE_S)
async def test_nothing_is_booked_twice_or_lost_while_pods_go_and_nodes_change(setup: RaceSetup, ahead: str) -> None:
    chance = random.Random(1)
    nodes = [node(f"n{at:05}").with_gpus(2) for at in range(NODE_COUNT)]
    await setup.add(*nodes)
    pair = await setup.stack.pair(ahead=ahead)
    changes, impatient = Changes(setup, nodes, chance), Impatient(setup, chance)
    nominated = Nominated()
    setup.follower.reported += [changes.report, impatient.report, nominated.report]
    noise = [asyncio.create_task(one.run()) for one in (changes, impatient)]
    try:
        await setup.api.create(PODS, (pod_object(one) for one in various(POD_COUNT, chance)))
        await bound(setup, lambda _: setup.ledger.bound_ever >= POD_COUNT * 3 // 4)
        setup.follower.reported.remove(changes.report)
        noise[0].cancel()
        await asyncio.wait(noise[:1])
        await changes.mend()
        await settled(setup, impatient)
    finally:
        for one in noise:
            one.cancel()
        ended = await asyncio.gather(*noise, return_exceptions=True)
    assert [one for one in ended if not isinstance(one, asyncio.CancelledError)] == []
    assert setup.ledger.wrong == []
    assert changes.made > POD_COUNT // 10
    assert len(setup.ledger.held) + len(impatient.deleted) == POD_COUNT
    await setup.agrees(pair)
    nominated.check(ahead, at_least=POD_COUNT // 10)


async def settled(setup: RaceSetup, impatient: Impatient) -> None:
    """Return when all pods that stay run, and all others are gone."""
    ledger = setup.ledger

    def done() -> bool:
        assert ledger.wrong == []
        return len(ledger.names) == POD_COUNT and not ledger.waiting() and impatient.deleted.isdisjoint(ledger.alive)

    await setup.follower.until(done, "all pods that stay are bound and the others gone", timeout_s=3 * PATIENCE_S)


@AHEAD
@pytest.mark.timeout(2 * PATIENCE_S)
async def test_a_leading_pair_and_then_a_scheduler_alone_killed_under_load_lose_nothing_and_book_nothing_twice(
    setup: RaceSetup, ahead: str
) -> None:
    names, capacity = [f"n{at:03}" for at in range(100)], 400
    await setup.add(*(node(name).with_inventory(gpu(0, FULL_MIB, name), gpu(1, FULL_MIB, name)) for name in names))
    nominated = Nominated()
    setup.follower.reported.append(nominated.report)
    first = await setup.stack.pair(elected=True, ahead=ahead)
    await first.comes_to_lead()
    second = await setup.stack.pair(elected=True, ahead=ahead)
    asking = (pod(f"p{at}").asking(mib=FULL_MIB // 2, core=50) for at in range(capacity + 40))
    creating = asyncio.create_task(setup.api.create(PODS, map(pod_object, asking)))
    await bound(setup, lambda count: count >= capacity // 4)
    await first.kill()
    third = await setup.stack.pair(elected=True, ahead=ahead)
    await second.comes_to_lead()
    await bound(setup, lambda count: count >= capacity // 2)
    second.scheduler.kill()  # its extender lives on, and is not called
    await third.comes_to_lead()
    await bound(setup, lambda count: count >= capacity)
    await creating
    assert setup.ledger.wrong == []
    await setup.agrees(third)
    await setup.agrees_on_bound_pods(second)
    nominated.check(ahead, at_least=capacity // 10)
    assert len(setup.ledger.bound()) == capacity, "every GPU is full and none more than full"
    mib, percent = setup.ledger.used()
    assert set(mib.values()) == {FULL_MIB}
    assert set(percent.values()) == {100}


async def bound(setup: RaceSetup, enough: Callable[[int], bool]) -> None:
    """Return when so many pods are."""

    def true() -> bool:
        assert setup.ledger.wrong == []
        return enough(len(setup.ledger.held))

    await setup.follower.until(true, "so many pods are bound", timeout_s=3 * PATIENCE_S)
