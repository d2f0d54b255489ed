"""Pending pods are nominated ahead of their scheduling cycle: once, to where they fit, and no other pod loses capacity by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from extender.snapshot import snapshot_of
from tests.builders import PodBuilder, node, pod
from tests.fake_api import FakeApi, answer_with
from tests.integration.extender.scheduler import Scheduler, running
from vgpu.scheduling.nominate import BACKLOG, FRONT

FULL_MIB = 81_920
HALF_MIB = FULL_MIB // 2
NODES = tuple(f"n{at}" for at in range(4))
Changes = dict[str, Any]


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    """Four nodes with 8 GPUs: 64 pods that request half a GPU fill them."""
    async with FakeApi() as server:
        for name in NODES:
            server.put(node(name).with_gpus(8).plain())
        yield server


def half(name: str, priority: int = 0) -> PodBuilder:
    return pod(name).asking(mib=HALF_MIB).of_priority(priority)


def small(name: str) -> PodBuilder:
    return pod(name).asking(mib=1024)


def put(api: FakeApi, built: PodBuilder, **spec: Any) -> None:
    plain = built.plain()
    plain["spec"] |= spec
    api.put(plain)


def nominations(api: FakeApi) -> dict[str, str]:
    """Pod -> node, of those that are nominated."""
    pods = api.objects["/api/v1/pods"].values()
    found = {one["metadata"]["name"]: one["status"].get("nominatedNodeName", "") for one in pods}
    return {name: where for name, where in found.items() if where}


def writes(api: FakeApi) -> int:
    return sum(one.startswith("PATCH") for one in api.requests)


async def waiting(api: FakeApi, scheduler: Scheduler, count: int) -> list[PodBuilder]:
    """So many pods wait, and the scheduler comes to the first of them."""
    built = [half(f"p{at:02}") for at in range(count)]
    for one in built:
        put(api, one)
    await scheduler.comes_true(lambda: len(scheduler.extender.pods) >= count)
    assert (await scheduler.filter(built[0], *NODES))["NodeNames"]
    return built


async def test_those_that_come_next_are_nominated_once_and_go_there(api: FakeApi) -> None:
    async with running(api, nominate_ahead="always") as scheduler:
        built = await waiting(api, scheduler, 40)
        counts, fleet = scheduler.extender.nominator.counts, scheduler.extender.state.fleet
        await scheduler.comes_true(lambda: len(nominations(api)) == 39)
        for one in built[1:]:
            where = nominations(api)[one.name]
            assert (await scheduler.filter(one, where))["NodeNames"] == [where]
            assert await scheduler.bind(one, where) == ""
        await scheduler.comes_true(lambda: counts["taken"] == 39)
        assert writes(api) == counts["written"] == 39
        assert counts["left"] == counts["refused"] == 0
        assert len(scheduler.extender.nominator.reservations) == 0
        assert int(fleet.free_mib.sum()) == 32 * FULL_MIB - 40 * HALF_MIB
        assert fleet.overcommitted() == []


async def test_no_more_pods_are_planned_than_fit(api: FakeApi) -> None:
    async with running(api, nominate_ahead="always") as scheduler:
        await waiting(api, scheduler, 80)
        ahead, fleet = scheduler.extender.nominator, scheduler.extender.state.fleet
        await scheduler.comes_true(lambda: len(nominations(api)) == 63)
        assert len(ahead.reservations) == 63, "and one reserved"
        assert int(fleet.free_mib.sum()) == 0
        assert fleet.overcommitted() == []
        where = list(nominations(api).values())
        assert {name: where.count(name) for name in NODES} == {"n0": 15, "n1": 16, "n2": 16, "n3": 16}
        snapshot = snapshot_of(scheduler.extender.state).whole()
        assert sum(one.stage == "planned" for one in snapshot.pods) == 63


@pytest.mark.parametrize("why", ["few", "fast", "off"])
async def test_no_pod_is_nominated_where_it_does_not_pay(api: FakeApi, why: str) -> None:
    async with running(api, nominate_ahead={"few": "always", "fast": "auto", "off": "never"}[why]) as scheduler:
        count = BACKLOG if why == "few" else 40
        built = await waiting(api, scheduler, count)  # one less waits once the first is called for
        for one in built[1:4]:
            await scheduler.filter(one, *NODES)
        await scheduler.extender.nominator.flush()
        assert writes(api) == 0
        if why == "few":
            for at in range(8):
                put(api, half(f"q{at}"))
        await scheduler.comes_true(lambda: len(scheduler.extender.pods) >= count)
        if why == "few":
            await scheduler.filter(built[4], *NODES)
            await scheduler.comes_true(lambda: writes(api) > 0)


async def test_an_extender_that_was_not_called_lately_is_not_the_active_one(api: FakeApi) -> None:
    async with running(api, nominate_ahead="always") as scheduler:
        for at in range(40):
            put(api, half(f"p{at:02}"))
        await scheduler.comes_true(lambda: len(scheduler.extender.pods) >= 40)
        await scheduler.extender.nominator.flush()
        assert writes(api) == 0
        await scheduler.filter(half("p00"), *NODES)
        await scheduler.comes_true(lambda: writes(api) > 0)


async def test_labels_and_taints_are_kept_to_and_other_conditions_left_to_the_scheduler(api: FakeApi) -> None:
    gpu = node("n5").with_gpus(8).plain()
    gpu["metadata"]["labels"] = {"pool": "a"}
    api.put(gpu)
    tainted = node("n6").with_gpus(8).plain()
    tainted["metadata"]["labels"] = {"pool": "b"}
    tainted["spec"]["taints"] = [{"key": "gpu", "effect": "NoSchedule"}]
    api.put(tainted)
    cordoned = node("n7").with_gpus(8).plain()
    cordoned["metadata"]["labels"] = {"pool": "a"}
    cordoned["spec"]["unschedulable"] = True
    api.put(cordoned)
    near = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}}
    async with running(api, nominate_ahead="always") as scheduler:
        for at in range(20):
            put(api, small(f"a{at}"), nodeSelector={"pool": "a"})
            put(api, small(f"b{at}"), nodeSelector={"pool": "b"})
            put(api, small(f"t{at}"), nodeSelector={"pool": "b"}, tolerations=[{"key": "gpu", "operator": "Exists"}])
            put(api, small(f"x{at}"), affinity=near)
            put(api, small(f"y{at}"), schedulerName="default-scheduler")
            put(api, pod(f"z{at}"))
        turned_down = half("down").plain()
        turned_down["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
        api.put(turned_down)
        put(api, half("nominated").nominated_to("n1"))
        await scheduler.comes_true(lambda: len(scheduler.extender.pods) == 122)
        for at in range(FRONT):  # those in front are not waited for
            await scheduler.filter(small(f"a{at}"), "n5")
        wanted = {f"a{at}" for at in range(FRONT, 20)} | {f"t{at}" for at in range(20)}
        await scheduler.comes_true(lambda: wanted <= set(nominations(api)))
        found = nominations(api)
        assert {name: where for name, where in found.items() if name[0] in "bxyzd"} == {}
        assert {where for name, where in found.items() if name[0] == "a"} <= {"n5"}
        assert {where for name, where in found.items() if name[0] == "t"} == {"n6"}
        assert found["nominated"] == "n1"


async def test_a_nomination_that_the_scheduler_does_not_follow_is_not_made_again(api: FakeApi) -> None:
    async with running(api, nominate_ahead="always") as scheduler:
        built = await waiting(api, scheduler, 30)
        ahead = scheduler.extender.nominator
        await scheduler.comes_true(lambda: {"p20", "p21"} <= set(nominations(api)))
        # it tried the node and all others, and none fits
        found = api.pod("default/p20")
        assert found
        unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        api.put(found | {"status": {"phase": "Pending", "conditions": [unplaced]}})
        await scheduler.comes_true(lambda: ahead.counts["left"] == 1)
        assert built[20].build().uid not in ahead.reservations
        # another it placed elsewhere
        (elsewhere, *_) = [name for name in NODES if name != nominations(api)["p21"]]
        assert (await scheduler.filter(built[21], elsewhere))["NodeNames"] == [elsewhere]
        assert await scheduler.bind(built[21], elsewhere) == ""
        await scheduler.comes_true(lambda: ahead.counts["left"] == 2)
        put(api, half("last"))
        for one in built[1 : 1 + FRONT]:
            await scheduler.filter(one, *NODES)
        await scheduler.comes_true(lambda: "last" in nominations(api))
        assert "p20" not in nominations(api)
        assert scheduler.extender.state.fleet.overcommitted() == []


async def test_a_write_that_is_refused_ends_the_reservation_and_is_not_tried_again(api: FakeApi) -> None:
    api.faults.append(answer_with("PATCH", "/p10/status", 409, "Conflict", "the object has been modified"))
    async with running(api, nominate_ahead="always") as scheduler:
        await waiting(api, scheduler, 30)
        ahead = scheduler.extender.nominator
        await scheduler.comes_true(lambda: len(nominations(api)) == 28)
        await ahead.flush()
        assert ahead.counts["refused"] == 1
        assert "p10" not in nominations(api)
        assert "uid-default-p10" not in ahead.reservations
        assert api.requests.count("PATCH /api/v1/namespaces/default/pods/p10/status") == 1


async def test_a_nomination_reservation_yields_to_a_pod_that_comes_first_and_to_no_other(api: FakeApi) -> None:
    async with running(api, nominate_ahead="always") as scheduler:
        for at in range(70):
            put(api, half(f"p{at:02}", priority=5))
        await scheduler.comes_true(lambda: len(scheduler.extender.pods) == 70)
        await scheduler.filter(half("p00", 5), *NODES)
        ahead = scheduler.extender.nominator
        await scheduler.comes_true(lambda: len(nominations(api)) == 63)
        assert (await scheduler.filter(half("low", 4), *NODES))["NodeNames"] == []
        whole = pod("high").asking(mib=FULL_MIB).of_priority(6)
        assert len((await scheduler.filter(whole, *NODES))["NodeNames"]) == 1
        assert len(ahead.reservations) == 61
        assert scheduler.extender.state.fleet.overcommitted() == []


async def test_an_extender_that_starts_reserves_for_pods_that_were_nominated_before(api: FakeApi) -> None:
    for at in range(3):
        put(api, pod(f"p{at}").asking(mib=8 * FULL_MIB).annotated(gpu_count="8").nominated_to(f"n{at}"))
    whole = pod("late").asking(mib=8 * FULL_MIB).annotated(gpu_count="8")
    async with running(api, nominate_ahead="always") as scheduler:
        assert (await scheduler.filter(whole.of_priority(-1), "n0", "n1"))["NodeNames"] == []
        assert (await scheduler.filter(whole.of_priority(-1), *NODES))["NodeNames"] == ["n3"]
        assert len(scheduler.extender.nominator.reservations) == 3
        first = pod("p0").asking(mib=8 * FULL_MIB).annotated(gpu_count="8")
        assert (await scheduler.filter(first, "n0"))["NodeNames"] == ["n0"]
        assert await scheduler.bind(first, "n0") == ""
        assert scheduler.extender.state.fleet.overcommitted() == []


async def test_a_preemption_reservation_is_kept_over_a_restart_also_when_the_victims_are_gone(api: FakeApi) -> None:
    waiting_for_it = pod("urgent").asking(mib=8 * FULL_MIB).annotated(gpu_count="8").of_priority(9).nominated_to("n0")
    plain = waiting_for_it.plain()
    plain["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
    api.put(plain)
    async with running(api) as scheduler:
        late = half("late", priority=10)
        assert (await scheduler.filter(late, "n0"))["NodeNames"] == [], (
            "no nomination reservation, which would yield: pods were evicted for it"
        )
        assert len(scheduler.extender.preemption.reservations) == 1
        assert (await scheduler.filter(waiting_for_it, "n0"))["NodeNames"] == ["n0"]
        assert await scheduler.bind(waiting_for_it, "n0") == ""
        await scheduler.comes_true(lambda: len(scheduler.extender.preemption.reservations) == 0)


async def test_a_replica_that_takes_over_reserves_for_pods_that_the_other_nominated_and_nominates_none_anew(
    api: FakeApi,
) -> None:
    async with running(api, nominate_ahead="always") as scheduler:
        built = [half(f"p{at:02}") for at in range(40)]
        for one in built:
            put(api, one)
        await scheduler.comes_true(lambda: len(scheduler.extender.pods) >= 40)
        by_other = {one.name: NODES[at % 4] for at, one in enumerate(built[1:])}
        for one in built[1:]:
            put(api, one.nominated_to(by_other[one.name]))
        ahead, fleet = scheduler.extender.nominator, scheduler.extender.state.fleet
        await scheduler.comes_true(lambda: len(ahead.reservations) == 39)
        assert int(fleet.free_mib.sum()) == 32 * FULL_MIB - 39 * HALF_MIB
        assert (await scheduler.filter(built[0], *NODES))["NodeNames"]
        await ahead.flush()
        assert writes(api) == 0
        assert nominations(api) == by_other
        for one in built[1:]:
            assert (await scheduler.filter(one, by_other[one.name]))["NodeNames"] == [by_other[one.name]]
            assert await scheduler.bind(one, by_other[one.name]) == ""
        await scheduler.comes_true(lambda: len(ahead.reservations) == 0)
        assert fleet.overcommitted() == []
        assert ahead.counts == {"written": 0, "refused": 0, "taken": 0, "left": 0}, "they were not ours"


async def test_a_pod_that_another_replica_nominates_elsewhere_is_left_there(api: FakeApi) -> None:
    async with running(api, nominate_ahead="always") as scheduler:
        await waiting(api, scheduler, 30)
        ahead = scheduler.extender.nominator
        await scheduler.comes_true(lambda: len(nominations(api)) == 29)
        written = writes(api)
        elsewhere = "n3"
        assert nominations(api)["p20"] != elsewhere
        put(api, half("p20").nominated_to(elsewhere))
        allocations = scheduler.extender.state.allocations
        await scheduler.comes_true(lambda: (held := allocations.get("uid-default-p20")) and held.node == elsewhere)
        await ahead.flush()
        assert nominations(api)["p20"] == elsewhere
        assert writes(api) == written
        assert scheduler.extender.state.fleet.overcommitted() == []


async def test_a_pod_that_is_bound_before_its_nomination_was_written_is_not_counted_as_taken(api: FakeApi) -> None:
    bound = asyncio.Event()

    async def late() -> web.StreamResponse:
        await bound.wait()
        return web.json_response({"code": 409, "reason": "Conflict"}, status=409)

    api.faults.append(lambda request, _: late() if request.path.endswith("/p10/status") else None)
    async with running(api, nominate_ahead="always") as scheduler:
        built = await waiting(api, scheduler, 30)
        counts, allocations = scheduler.extender.nominator.counts, scheduler.extender.state.allocations
        await scheduler.comes_true(lambda: len(nominations(api)) == 28)
        planned = allocations.get("uid-default-p10")
        assert planned
        assert (await scheduler.filter(built[10], planned.node))["NodeNames"] == [planned.node]
        assert await scheduler.bind(built[10], planned.node) == ""
        known = scheduler.extender.pods
        await scheduler.comes_true(lambda: bool((one := known.get("default/p10")) and one.spec.node_name))
        bound.set()
        await scheduler.extender.nominator.flush()
        assert counts == {"written": 28, "refused": 1, "taken": 0, "left": 0}


@pytest.mark.parametrize(("reason", "nominated"), [("SchedulerError", 39), ("Unschedulable", 0)])
async def test_pods_that_the_scheduler_could_not_try_are_nominated_and_those_that_fit_nowhere_are_not(
    api: FakeApi, reason: str, nominated: int
) -> None:
    for at in range(40):
        plain = half(f"p{at:02}").plain()
        plain["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": reason}]
        api.put(plain)
    async with running(api, nominate_ahead="always") as scheduler:
        await scheduler.filter(half("p00"), *NODES)
        await scheduler.extender.nominator.flush()
        assert len(nominations(api)) == nominated
