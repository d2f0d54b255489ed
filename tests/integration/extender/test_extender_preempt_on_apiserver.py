"""The extender's own evictions against a real API server: no fake shows what it refuses."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.builders import PodBuilder, node, pod
from tests.integration.extender.harness import PATIENCE_S, Extender, ExtenderOnApiServer, allocated_pods

FULL_MIB = 81_920
HALF_MIB = FULL_MIB // 2
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


def create(cluster: ExtenderOnApiServer, built: PodBuilder, service_class: str) -> dict[str, Any]:
    """A pod with a PriorityClass: the API server fills in its priority."""
    plain = built.plain()
    plain["spec"]["priorityClassName"] = service_class
    plain["metadata"] = {"name": built.name}
    del plain["status"]
    made: dict[str, Any] = cluster.api("POST", "/api/v1/namespaces/default/pods", plain)
    return made


async def place(cluster: ExtenderOnApiServer, extender: Extender, name: str, mib: int) -> dict[str, Any]:
    made = create(cluster, pod(name).asking(mib=mib), "low")
    await extender.comes_to(lambda _: True)
    assert (await extender.filter(made, "n1"))["NodeNames"] == ["n1"]
    assert await extender.bind(made, "n1") == ""
    return made


async def test_a_pod_is_nominated_and_the_least_victim_evicted_and_both_are_reported(
    cluster: ExtenderOnApiServer,
) -> None:
    for name, value in (("low", 1), ("high", 1000)):
        cluster.api("POST", CLASSES, {"metadata": {"name": name}, "value": value})
    try:
        cluster.add(node("n1").with_gpus(2))
        extender = await cluster.extender()
        victims = [await place(cluster, extender, "big", HALF_MIB + 1024)]
        victims += [await place(cluster, extender, "small", HALF_MIB)]
        await extender.comes_to(lambda known: set(allocated_pods(known).values()) == {"seen bound"})
        urgent = create(cluster, pod("urgent").asking(mib=FULL_MIB), "high")
        found: dict[str, Any] = {}
        async with asyncio.timeout(PATIENCE_S):
            while not any("deletionTimestamp" in one["metadata"] for one in found.values()):
                assert (await extender.filter(urgent, "n1"))["NodeNames"] == []
                await asyncio.sleep(0.2)  # as often as a scheduler might call again
                found = {one["metadata"]["name"]: one for one in map(cluster.get, [*victims, urgent])}
        leaving = [name for name, one in found.items() if "deletionTimestamp" in one["metadata"]]
        assert len(leaving) == 1
        assert cluster.get(urgent)["status"]["nominatedNodeName"] == "n1"
        known = await extender.snapshot()
        assert ("urgent", "kept") in {(one.key.partition("/")[2], one.stage) for one in known.pods}
        cluster.delete(found[leaving[0]])
        await extender.comes_to(lambda known: leaving[0] not in allocated_pods(known))
        late = cluster.create(pod("late").asking(mib=HALF_MIB + 2048))
        assert (await extender.filter(late, "n1"))["NodeNames"] == [], "the capacity stays reserved"
        assert (await extender.filter(urgent, "n1"))["NodeNames"] == ["n1"]
        assert await extender.bind(urgent, "n1") == ""
        events = cluster.api("GET", "/apis/events.k8s.io/v1/namespaces/default/events")["items"]
        reported = {(one["reason"], one["regarding"]["name"]) for one in events}
        assert reported >= {("Preempted", leaving[0]), ("Preempting", "urgent")}
    finally:
        for name in ("low", "high"):
            cluster.api("DELETE", f"{CLASSES}/{name}")
