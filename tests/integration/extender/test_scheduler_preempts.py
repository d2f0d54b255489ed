"""Evictions through the real kube-scheduler: it proposes by totals of a node, and what the extender answers it carries out."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tests.builders import PodBuilder, gpu, node, pod
from tests.integration.extender.following import WatchedCluster, priority_classes, watched
from tests.integration.extender.scheduling import SchedulerPair, Stack, Thing, pod_object

FULL_MIB = 81_920
HALF_MIB = FULL_MIB // 2
PODS = "/api/v1/namespaces/default/pods"


class PreemptionSetup:
    """Nodes with two GPUs each, a kubelet that runs what is bound, and a count of it all."""

    def __init__(self, cluster: WatchedCluster, pair: SchedulerPair) -> None:
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
        """Pods that fit nowhere. Their UIDs."""
        made = await self.api.create(PODS, (pod_object(one, service_class) for one in built))
        return [one["metadata"]["uid"] for one in made]

    async def bound(self, uids: list[str]) -> None:
        await self.follower.until(lambda: set(uids) <= set(self.ledger.held), "the preemptors are bound")

    async def refused(self, uid: str) -> set[str]:
        """Return when kube-scheduler has reported that the pod fits nowhere, and the extender's own search for victims is over, too.

        An observer pod shows that: it is refused later and served after it, on a node whose GPUs are too small for others. Returns the
        pods that were evicted for the observer.
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
        await self.follower.until(lambda: bool(made & self.ledger.leaving), "a pod is evicted for the observer")
        return made & self.ledger.leaving

    async def calls(self, verb: str, outcome: str) -> int:
        """How often the extender was called, and answered so."""
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
async def setup(stack: Stack, request: pytest.FixtureRequest) -> AsyncIterator[PreemptionSetup]:
    nodes = [node(f"n{at:02}").with_gpus(2) for at in range(20)]
    async with priority_classes(stack.api, low=1, high=1000), watched(stack.api, *nodes) as cluster:
        yield PreemptionSetup(cluster, await stack.pair(ahead=request.param))


async def test_each_preemptor_takes_one_gpu_of_best_effort_pods_and_is_bound_where_they_were(
    setup: PreemptionSetup,
) -> None:
    whole = (pod(f"standard-{at}").annotated(placement="spread").asking(mib=FULL_MIB) for at in range(20))
    standard = await setup.run("low", *whole)
    lesser = await setup.run(
        "low", *(pod(f"lesser-{at}").annotated(**{"class": "best-effort"}).asking(mib=HALF_MIB) for at in range(40))
    )
    urgent = await setup.request("high", *(pod(f"urgent-{at}").asking(mib=FULL_MIB) for at in range(8)))
    await setup.bound(urgent)
    ledger = setup.ledger
    assert ledger.leaving.isdisjoint(standard), "on its node a best-effort pod is evicted first"
    assert ledger.leaving <= set(lesser)
    assert len(ledger.leaving) == 2 * len(urgent), "two halves for each, and no pod in vain"
    made_free = {gpu for uid in ledger.leaving for gpu in ledger.gpus_of(uid)}
    assert {gpu for uid in urgent for gpu in ledger.gpus_of(uid)} == made_free
    assert ledger.wrong == []
    assert await setup.calls("preempt", "victims") >= len(urgent)


async def test_no_pod_is_evicted_for_a_pod_that_would_not_fit_all_the_same(setup: PreemptionSetup) -> None:
    """On each node, pods that may be evicted use 80 GiB: by its totals enough, and half of each GPU."""
    halves = (pod(f"stays-{at}").asking(mib=HALF_MIB) for at in range(40))
    await setup.run("high", *(one.annotated(placement="spread") for one in halves))
    await setup.run("low", *(pod(f"may-go-{at}").asking(mib=HALF_MIB) for at in range(40)))
    (urgent,) = await setup.request("high", pod("urgent").asking(mib=FULL_MIB))
    for_observer = await setup.refused(urgent)
    assert await setup.calls("preempt", "no_victims") >= 1, "kube-scheduler did propose"
    assert (setup.ledger.leaving, setup.ledger.wrong) == (for_observer, [])
    (fits,) = await setup.request("high", pod("fits").asking(mib=HALF_MIB))
    await setup.bound([fits])
    assert len(setup.ledger.leaving - for_observer) == 1
    assert urgent not in setup.ledger.held


async def test_a_pod_that_no_single_gpu_can_take_gets_one_by_our_own_eviction(setup: PreemptionSetup) -> None:
    """Totals fit on every node, so kube-scheduler never calls /preempt."""
    spread = (pod(f"thin-{at}").annotated(placement="spread").asking(mib=HALF_MIB // 2) for at in range(40))
    await setup.run("low", *spread)
    urgent = await setup.request("high", *(pod(f"urgent-{at}").asking(mib=FULL_MIB) for at in range(3)))
    await setup.bound(urgent)
    assert len(setup.ledger.leaving) == 3
    made_free = {gpu for uid in setup.ledger.leaving for gpu in setup.ledger.gpus_of(uid)}
    assert {gpu for uid in urgent for gpu in setup.ledger.gpus_of(uid)} == made_free
    assert setup.ledger.wrong == []
