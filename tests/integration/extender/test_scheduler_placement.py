"""A pod's preferences for its node, through the real kube-scheduler: with policy `scheduler` by its own plugins, with others by ours."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from tests.builders import NodeBuilder, PodBuilder, node, pod
from tests.integration.extender.following import WatchedCluster, watched
from tests.integration.extender.scheduling import SchedulerPair, Stack, Thing, node_object, pod_object

FULL_MIB = 81_920
HALF_MIB = FULL_MIB // 2
PODS = "/api/v1/namespaces/default/pods"
ZONE = "topology.kubernetes.io/zone"
ZONES = {"n0": "east", "n1": "east", "n2": "west", "n3": "west"}


def in_zone(built: PodBuilder, zone: str) -> Thing:
    """A pod that prefers this zone."""
    made = pod_object(built)
    term = {"matchExpressions": [{"key": ZONE, "operator": "In", "values": [zone]}]}
    preferred = [{"weight": 100, "preference": term}]
    made["spec"]["affinity"] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    return made


def apart(built: PodBuilder) -> Thing:
    """A pod that prefers not to share a zone with others of its app."""
    made = pod_object(built)
    made["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": built.labels},
        }
    ]  # fmt: skip
    return made


class PlacementSetup:
    """Four nodes with two GPUs each, in two zones."""

    def __init__(self, cluster: WatchedCluster, pair: SchedulerPair) -> None:
        self.api, self.follower, self.ledger, self.pair = cluster.api, cluster.follower, cluster.ledger, pair

    async def place(self, *things: Thing) -> list[str]:
        """Create pods, and return the nodes that they were bound to when all of them are."""
        made = await self.api.create(PODS, things)
        uids = [one["metadata"]["uid"] for one in made]
        await self.follower.until(lambda: set(uids) <= set(self.ledger.held), "all of them are bound")
        return [self.ledger.alive[uid]["spec"]["nodeName"] for uid in uids]

    async def remove_all(self) -> None:
        """Return when no pods are left."""
        await self.api.call("DELETE", PODS, {"gracePeriodSeconds": 0})
        await self.follower.until(lambda: not self.ledger.alive, "all of them are gone")

    async def calls(self, verb: str) -> dict[str, int]:
        """Outcome -> how often the extender was called, and answered so."""
        assert self.pair.extender is not None
        found = re.findall(
            rf'requests_total{{outcome="(\w+)",verb="{verb}"}} (\d+)', await self.pair.extender.metrics()
        )
        return {outcome: int(times) for outcome, times in found}


@pytest.fixture
async def setup(stack: Stack) -> AsyncIterator[PlacementSetup]:
    nodes = [node(name).with_gpus(2) for name in ZONES]
    async with watched(stack.api, *nodes, made=of_its_zone, runs=False) as cluster:
        yield PlacementSetup(cluster, await stack.pair())
        assert cluster.ledger.wrong == []


def of_its_zone(built: NodeBuilder) -> Thing:
    """A node with labels for its location."""
    thing = node_object(built)
    thing["metadata"]["labels"][ZONE] = ZONES[built.name]
    return thing


async def test_with_policy_scheduler_kube_schedulers_own_preferences_choose_the_node(setup: PlacementSetup) -> None:
    await setup.place(pod_object(pod("first").asking(mib=HALF_MIB)))
    assert await setup.calls("prioritize") == {}, "of a pod that packs one node is left"
    liking = [in_zone(pod(f"west-{at}").asking(mib=4096).annotated(placement="scheduler"), "west") for at in range(6)]
    assert {ZONES[name] for name in await setup.place(*liking)} == {"west"}
    assert (await setup.calls("prioritize"))["rated"] >= len(liking)


async def test_pods_without_a_gpu_go_where_fewest_gpus_are_left_though_processors_are_scarcer_there(
    setup: PlacementSetup,
) -> None:
    full = await setup.place(*(pod_object(pod(f"full-{at}").asking(mib=FULL_MIB)) for at in range(2)))
    assert full[0] == full[1]
    plain = [pod_object(pod(f"plain-{at}")) for at in range(3)]
    for thing in plain:
        thing["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "64", "memory": "64Gi"}}
    made = await setup.api.create(PODS, plain)
    uids = [one["metadata"]["uid"] for one in made]

    def nodes() -> list[str | None]:
        return [setup.ledger.alive.get(uid, {}).get("spec", {}).get("nodeName") for uid in uids]

    await setup.follower.until(lambda: all(nodes()), "all of them are bound")
    assert nodes() == [full[0]] * 3
    assert await setup.calls("spare") == {"rated": 3}


async def test_pods_without_a_reservation_never_get_the_same_memory(setup: PlacementSetup) -> None:
    """By its totals a node fits three of them, and on its GPUs two: a pod that is bound too late is refused and placed again."""
    for attempt in range(10):
        many = [
            in_zone(pod(f"p{attempt}-{at}").asking(mib=50 * 1024).annotated(placement="scheduler"), "east")
            for at in range(8)
        ]
        nodes = await setup.place(*many)
        assert {name: nodes.count(name) for name in ZONES} == dict.fromkeys(ZONES, 2)
        if (await setup.calls("bind")).get("refused"):
            break
        await setup.remove_all()  # each was bound before the next was tried
    calls = await setup.calls("bind")
    assert calls["refused"] > 0
    assert calls["bound"] == 8 * (attempt + 1)
    assert "error" not in calls


async def test_other_policies_honour_preferences_among_gpus_that_are_as_good(setup: PlacementSetup) -> None:
    assert [ZONES[name] for name in await setup.place(in_zone(pod("a").asking(mib=FULL_MIB), "west"))] == ["west"]
    replicas = [apart(pod(f"r{at}").asking(mib=FULL_MIB).labelled(app="r")) for at in range(4)]
    zones = []
    for replica in replicas:
        (name,) = await setup.place(replica)
        zones.append(ZONES[name])
    assert sorted(zones[:2]) == sorted(zones[2:]) == ["east", "west"]
