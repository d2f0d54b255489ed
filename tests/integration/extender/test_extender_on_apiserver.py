"""The extender as a process with a real kube-apiserver: killed, disconnected, called twice. No GPU is assigned twice, and nothing leaks."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.builders import node, pod
from tests.fake_api import lose_reply
from tests.integration.extender.harness import (
    Extender,
    ExtenderOnApiServer,
    HeldBinding,
    allocated_pods,
    free_mib,
    names_of,
)
from vgpu.api.codec import assignment_from_json
from vgpu.api.names import DEFAULT

FULL_MIB = 81_920


def is_assigned(found: dict[str, Any]) -> bool:
    """Has the pod a node and its GPUs? One without the other must never be seen."""
    both = "nodeName" in found["spec"], DEFAULT.assignment in found["metadata"].get("annotations", {})
    assert both in ((True, True), (False, False)), found
    return both[0]


async def test_a_pod_gets_node_and_assignment_in_one_write(cluster: ExtenderOnApiServer) -> None:
    cluster.add(node("n1").with_gpus(2))
    asking = cluster.create(pod("a").asking(mib=8192, core=30))
    extender = await cluster.extender()
    assert (await extender.filter(asking, "n1"))["NodeNames"] == ["n1"]
    assert await extender.bind(asking, "n1") == ""
    (after,) = cluster.versions(asking)
    assert is_assigned(after)
    annotations = after["metadata"]["annotations"]
    (assigned,) = assignment_from_json(annotations[DEFAULT.assignment]).containers["main"]
    assert (assigned.mib, assigned.core_percent, annotations[DEFAULT.gpus_of("main")]) == (8192, 30, assigned.uuid)
    snapshot = await extender.comes_to(lambda now: allocated_pods(now) == {"a": "seen bound"})
    assert sorted(free_mib(snapshot, "n1")) == [FULL_MIB - 8192, FULL_MIB]


async def test_killed_between_filter_and_bind_the_next_one_binds(cluster: ExtenderOnApiServer) -> None:
    cluster.add(node("n1").with_gpus(1))
    asking, other = (cluster.create(pod(name).asking(mib=FULL_MIB)) for name in "ab")
    first = await cluster.extender()
    await first.filter(asking, "n1")
    await first.kill()
    second = await cluster.extender()
    assert await second.bind(asking, "n1") == ""
    assert list((await second.filter(other, "n1"))["FailedNodes"]) == ["n1"]
    assert is_assigned(cluster.get(asking))


async def test_killed_between_filter_and_bind_it_refuses_when_another_pod_has_reserved_the_place(
    cluster: ExtenderOnApiServer,
) -> None:
    cluster.add(node("n1").with_gpus(1))
    asking, other = (cluster.create(pod(name).asking(mib=FULL_MIB)) for name in "ab")
    first = await cluster.extender()
    await first.filter(asking, "n1")
    await first.kill()
    second = await cluster.extender()
    assert (await second.filter(other, "n1"))["NodeNames"] == ["n1"]
    assert "pod default/a does not fit node n1 any more" in await second.bind(asking, "n1")
    assert await second.bind(other, "n1") == ""
    assert names_of(cluster.bound()) == {"b"}
    assert not is_assigned(cluster.get(asking))


async def test_a_lost_reply_and_a_second_and_third_call_make_one_binding(cluster: ExtenderOnApiServer) -> None:
    cluster.add(node("n1").with_gpus(1))
    asking = cluster.create(pod("a").asking(mib=8192))
    first = await cluster.extender()
    await first.filter(asking, "n1")
    cluster.proxy.faults.append(lose_reply("POST", "/binding", after=True))
    assert await first.bind(asking, "n1") == ""
    assert await first.bind(asking, "n1") == ""
    await first.kill()
    second = await cluster.extender()
    assert await second.bind(asking, "n1") == ""
    assert len(cluster.versions(asking)) == 1
    snapshot = await second.snapshot()
    assert (allocated_pods(snapshot), free_mib(snapshot, "n1")) == ({"a": "seen bound"}, [FULL_MIB - 8192])


async def test_a_pod_that_another_scheduler_bound_elsewhere_is_refused_and_its_place_released(
    cluster: ExtenderOnApiServer,
) -> None:
    cluster.add(node("n1").with_gpus(1), node("n2").with_gpus(1))
    asking = cluster.create(pod("a").asking(mib=FULL_MIB))
    extender = await cluster.extender()
    await extender.filter(asking, "n1")
    cluster.proxy.reporting.clear()
    cluster.bind_past_us(asking, "n2")
    assert "is bound to node n2" in await extender.bind(asking, "n1")
    snapshot = await extender.snapshot()
    assert (allocated_pods(snapshot), free_mib(snapshot, "n1")) == ({}, [FULL_MIB])
    assert len(cluster.versions(asking)) == 1


async def test_a_pod_deleted_between_filter_and_bind_is_refused_and_its_place_released(
    cluster: ExtenderOnApiServer,
) -> None:
    cluster.add(node("n1").with_gpus(1))
    asking = cluster.create(pod("a").asking(mib=FULL_MIB))
    extender = await cluster.extender()
    await extender.filter(asking, "n1")
    cluster.delete(asking)
    again = cluster.create(pod("a").asking(mib=FULL_MIB))
    assert "a" in await extender.bind(asking, "n1")
    await extender.comes_to(lambda now: free_mib(now, "n1") == [FULL_MIB])
    assert not is_assigned(cluster.get(again)), "the pod that has its name now is another one"
    assert (await extender.filter(again, "n1"))["NodeNames"] == ["n1"]


async def test_the_passive_replica_takes_over_in_mid_burst_and_fills_the_cluster_exactly(
    cluster: ExtenderOnApiServer,
) -> None:
    names = ["n1", "n2", "n3"]
    cluster.add(*(node(name).with_gpus(2) for name in names))
    waiting = [cluster.create(pod(f"p{at}").asking(mib=FULL_MIB // 4)) for at in range(26)]
    active, passive = await asyncio.gather(cluster.extender(), cluster.extender())

    async def schedule(extender: Extender, asking: dict[str, Any]) -> None:
        if found := (await extender.filter(asking, *names))["NodeNames"]:
            await extender.bind(asking, found[0])

    await asyncio.gather(*(schedule(active, asking) for asking in waiting[:8]))
    held = HeldBinding()
    cluster.proxy.faults.append(held)
    burst = [asyncio.create_task(schedule(active, asking)) for asking in waiting[8:14]]
    await held.reached.wait()
    await active.kill()
    await asyncio.gather(*burst, return_exceptions=True)
    held.go.set()
    await held.done.wait()  # the write that was under way happened after its sender had ended
    await passive.comes_to(lambda now: set(allocated_pods(now)) == names_of(cluster.bound()))
    left = [asking for asking in waiting if asking["metadata"]["name"] not in names_of(cluster.bound())]
    await asyncio.gather(*(schedule(passive, asking) for asking in left))
    assert list(cluster.assigned_mib().values()) == [FULL_MIB] * 6
    assert len(cluster.bound()) == 24
    assert all(is_assigned(found) for found in cluster.bound())


async def test_an_assignment_that_cannot_be_read_takes_its_node_out_until_the_pod_is_gone(
    cluster: ExtenderOnApiServer,
) -> None:
    cluster.add(node("n1").with_gpus(1), node("n2").with_gpus(1))
    broken = cluster.create(pod("broken").asking(mib=8192).assigned(text='{"v":1,"containers":'))
    cluster.bind_past_us(broken, "n1")
    asking = cluster.create(pod("a").asking(mib=8192))
    for _ in range(2):
        extender = await cluster.extender()
        answer = await extender.filter(asking, "n1")
        assert answer["FailedAndUnresolvableNodes"] == {
            "n1": "a pod on the node has a GPU assignment that cannot be read"
        }
        assert "assignment that cannot be read" in await extender.bind(asking, "n1")
    cluster.delete(broken)
    await extender.comes_to(lambda now: not any(one.excluded for one in now.nodes))
    assert (await extender.filter(asking, "n1"))["NodeNames"] == ["n1"]
    assert await extender.bind(asking, "n1") == ""


async def test_what_happened_while_the_api_server_was_away_is_known_after_its_old_versions_are_gone(
    cluster: ExtenderOnApiServer,
) -> None:
    cluster.add(node("n1").with_gpus(1), node("n2").with_gpus(1))
    stays, goes, comes = (cluster.create(pod(name).asking(mib=FULL_MIB // 2)) for name in ("stays", "goes", "comes"))
    extender, other = await asyncio.gather(cluster.extender(), cluster.extender())
    for asking in (stays, goes):
        await extender.filter(asking, "n1")
        assert await extender.bind(asking, "n1") == ""
    await extender.comes_to(lambda now: allocated_pods(now) == {"stays": "seen bound", "goes": "seen bound"})
    await other.kill()
    cluster.proxy.close()
    cluster.delete(goes)
    text = cluster.get(stays)["metadata"]["annotations"][DEFAULT.assignment]
    moved = cluster.create(pod("moved").asking(mib=FULL_MIB // 2).assigned(text=text.replace(uuid(1), uuid(2))))
    cluster.bind_past_us(moved, "n2")
    cluster.add(node("n3").with_gpus(1))
    cluster.api.stop()
    cluster.api.start()
    cluster.api.compact()
    cluster.proxy.closed = False
    snapshot = await extender.comes_to(
        lambda now: (
            allocated_pods(now) == {"stays": "seen bound", "moved": "seen bound"} and free_mib(now, "n3") == [FULL_MIB]
        )
    )
    assert [free_mib(snapshot, name) for name in ("n1", "n2")] == [[FULL_MIB // 2]] * 2
    assert await extender.relists() >= {"gone"}
    assert (await extender.filter(comes, "n1", "n2", "n3"))["NodeNames"] == ["n1"]
    assert await extender.bind(comes, "n1") == ""


def uuid(number: int) -> str:
    """Of the GPU of node n<number>."""
    return node(f"n{number}").with_gpus(1).gpus[0].uuid
