"""Evictions through the real kube-scheduler: it proposes by totals of a node, and what the extender answers it carries out."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tests.builders import PodBuilder, gpu, node, pod
from tests.integration.extender.following import Watched, priority_classes, watched
from tests.integration.extender.scheduling import Pair, Stack, Thing, pod_object

FULL_MIB = 81_920
HALF_MIB = FULL_MIB // 2
PODS = "/api/v1/namespaces/default/pods"


class World:
    """Nodes with two GPUs each, a kubelet that runs what is bound, and a count of it all."""

    def __init__(self, cluster: Watched, pair: Pair) -> None:
        self.api, self.follower, self.ledger, self.pair = cluster.api, cluster.follower, cluster.ledger, pair
        self.add = cluster.add

    async def run(self, service_class: str, *built: PodBuilder) -> list[str]:
        """Pods that are to run before anything else happens. Their UIDs."""
        made = await self.api.create(PODS, (pod_object(one, service_class) for one in built))
        uids = [one["metadata"]["uid"] for one in made]
        await self.follower.until(lambda: all(map(self._runs, uids)), "all of them run")
        return uids

    def _runs(self, uid: str) -> bool:
        return uid in self.ledger.held and self.ledger.alive[uid]["status"]["phase"] == "Running"

    async def request(self, service_class: str, *built: PodBuilder) -> list[str]:
        """Pods that find no room. Their UIDs."""
        made = await self.api.create(PODS, (pod_object(one, service_class) for one in built))
        return [one["metadata"]["uid"] for one in made]

    async def bound(self, uids: list[str]) -> None:
        await self.follower.until(lambda: set(uids) <= set(self.ledger.held), "the preemptors are bound")

    async def refused(self, uid: str) -> set[str]:
        """Return when kube-scheduler has said that the pod fits nowhere, and our own eviction has had its look as well.

        That is known by an observer, which is turned away later and helped after it, on a node whose GPUs are too small for others. Answers
        who was evicted for the observer.
        """
        await self.follower.until(
            lambda: (
                uid in self.ledger.alive
                and any(
                    one.get("reason") == "Unschedulable"
                    for one in self.ledger.alive[uid]["status"].get("conditions", [])
                )
            ),
            "it is reported to fit nowhere",
        )
        await self.add(node("observer").with_inventory(*(gpu(row, HALF_MIB, "observer") for row in range(2))))
        quarter = pod("quarter").asking(mib=HALF_MIB // 2)
        victims = [there(replace(quarter, name=f"quarter-{at}"), "low") for at in range(2)]
        for thing in victims:
            thing["metadata"]["annotations"] = {"tangram.sh/placement": "spread"}
        made = {one["metadata"]["uid"] for one in await self.api.create(PODS, victims)}
        await self.follower.until(lambda: all(map(self._runs, made)), "the observer's victims run")
        await self.api.create(PODS, [there(pod("observer").asking(mib=HALF_MIB), "high")])
        await self.follower.until(lambda: bool(made & self.ledger.leaving), "somebody is evicted for the observer")
        return made & self.ledger.leaving

    async def calls(self, verb: str, outcome: str) -> int:
        """How often the extender was asked, and answered so."""
        assert self.pair.extender is not None
        text = await self.pair.extender.metrics()
        found = re.search(rf'requests_total{{outcome="{outcome}",verb="{verb}"}} (\d+)', text)
        return int(found[1]) if found else 0


def there(built: PodBuilder, service_class: str) -> Thing:
    """A pod for the node of the observer."""
    thing = pod_object(built, service_class)
    thing["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "observer"}
    return thing


@pytest.fixture(params=["never", "always"])
async def world(stack: Stack, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    nodes = [node(f"n{at:02}").with_gpus(2) for at in range(20)]
    async with priority_classes(stack.api, low=1, high=1000), watched(stack.api, *nodes) as cluster:
        yield World(cluster, await stack.pair(ahead=request.param))


async def test_each_preemptor_takes_one_gpu_of_best_effort_pods_and_is_bound_where_they_were(world: World) -> None:
    whole = (pod(f"standard-{at}").annotated(placement="spread").asking(mib=FULL_MIB) for at in range(20))
    standard = await world.run("low", *whole)
    lesser = await world.run(
        "low", *(pod(f"lesser-{at}").annotated(**{"class": "best-effort"}).asking(mib=HALF_MIB) for at in range(40))
    )
    urgent = await world.request("high", *(pod(f"urgent-{at}").asking(mib=FULL_MIB) for at in range(8)))
    await world.bound(urgent)
    ledger = world.ledger
    assert ledger.leaving.isdisjoint(standard), "on its node a best-effort pod goes first"
    assert ledger.leaving <= set(lesser)
    assert len(ledger.leaving) == 2 * len(urgent), "two halves for each, and nobody for nothing"
    made_free = {gpu for uid in ledger.leaving for gpu in ledger.gpus_of(uid)}
    assert {gpu for uid in urgent for gpu in ledger.gpus_of(uid)} == made_free
    assert ledger.wrong == []
    assert await world.calls("preempt", "victims") >= len(urgent)


async def test_nobody_is_evicted_for_a_pod_that_would_not_fit_all_the_same(world: World) -> None:
    """On each node 80 GiB are held by pods that may go: by its totals enough, and half of each GPU."""
    halves = (pod(f"stays-{at}").asking(mib=HALF_MIB) for at in range(40))
    await world.run("high", *(one.annotated(placement="spread") for one in halves))
    await world.run("low", *(pod(f"may-go-{at}").asking(mib=HALF_MIB) for at in range(40)))
    (urgent,) = await world.request("high", pod("urgent").asking(mib=FULL_MIB))
    for_observer = await world.refused(urgent)
    assert await world.calls("preempt", "no_victims") >= 1, "kube-scheduler did propose"
    assert (world.ledger.leaving, world.ledger.wrong) == (for_observer, [])
    (fits,) = await world.request("high", pod("fits").asking(mib=HALF_MIB))
    await world.bound([fits])
    assert len(world.ledger.leaving - for_observer) == 1
    assert urgent not in world.ledger.held


async def test_a_pod_that_no_single_gpu_can_take_gets_one_by_our_own_eviction(world: World) -> None:
    """Totals fit on every node, so kube-scheduler never calls /preempt."""
    spread = (pod(f"thin-{at}").annotated(placement="spread").asking(mib=HALF_MIB // 2) for at in range(40))
    await world.run("low", *spread)
    urgent = await world.request("high", *(pod(f"urgent-{at}").asking(mib=FULL_MIB) for at in range(3)))
    await world.bound(urgent)
    assert len(world.ledger.leaving) == 3
    made_free = {gpu for uid in world.ledger.leaving for gpu in world.ledger.gpus_of(uid)}
    assert {gpu for uid in urgent for gpu in world.ledger.gpus_of(uid)} == made_free
    assert world.ledger.wrong == []
