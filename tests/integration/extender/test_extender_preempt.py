"""Preemption over HTTP: kube-scheduler's own bodies, evictions where it never calls, and reservations that no other pod takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from extender.preemption import background
from extender.snapshot import snapshot_of
from tests.builders import PodBuilder, node, pod
from tests.fake_api import FakeApi, answer_with
from tests.integration.extender.preempting import (
    FULL_MIB,
    HALF_MIB,
    bound,
    evict_at_once,
    preempt,
    two_nodes,
    uids,
    urgent,
)
from tests.integration.extender.scheduler import Scheduler, running
from vgpu.scheduling.victims.victim_search import VictimSearch


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    evict_at_once(monkeypatch)


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with two_nodes() as server:
        yield server


def budget(name: str, allowed: int, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"},
        "spec": {"selector": {"matchLabels": labels}},
        "status": {"disruptionsAllowed": allowed},
    }


# --- the verb ---


async def test_the_victims_are_those_of_one_gpu_not_those_of_the_totals(api: FakeApi) -> None:
    for name, row, mib in (("a", 0, HALF_MIB), ("b", 1, HALF_MIB), ("c", 0, HALF_MIB)):
        api.put(bound(name, "n1", row, mib).plain())
    api.put(urgent().plain())
    async with running(api) as scheduler:
        # half a GPU more is what the totals lack; on GPU 1 one pod leaving is enough
        answer = await preempt(scheduler, urgent(), n1=uids("a"), n2=[])
        assert answer == {"n1": {"Pods": uids("b"), "NumPDBViolations": 0}}, (
            "n2 has enough free: an empty list is an error there"
        )


async def test_an_empty_list_is_filled_where_totals_fit_and_no_gpu_does(api: FakeApi) -> None:
    api.put(bound("a", "n1", 0, HALF_MIB).plain())
    api.put(bound("b", "n1", 1, HALF_MIB).annotated(**{"class": "best-effort"}).plain())
    api.put(urgent().plain())
    async with running(api) as scheduler:
        assert await preempt(scheduler, urgent(), n1=None) == {"n1": {"Pods": uids("b"), "NumPDBViolations": 0}}


async def test_a_node_where_only_best_effort_pods_go_is_answered_rather_than_one_where_a_standard_pod_goes(
    api: FakeApi,
) -> None:
    """If it chose, kube-scheduler would evict the fewest."""
    low = {"class": "best-effort"}
    for name, at, row, mib, more in (
        ("one", "n1", 0, FULL_MIB, {}), ("beside", "n1", 1, FULL_MIB, {}), ("x", "n2", 0, HALF_MIB, low),
        ("y", "n2", 0, HALF_MIB, low), ("z", "n2", 1, FULL_MIB, {}),
    ):  # fmt: skip
        api.put(bound(name, at, row, mib).annotated(**more).plain())
    api.put(urgent().plain())
    async with running(api) as scheduler:
        answer = await preempt(scheduler, urgent(), n1=uids("one"), n2=uids("z"))
        assert answer == {"n2": {"Pods": uids("x", "y"), "NumPDBViolations": 0}}


async def test_whole_pods_are_read_as_well_as_uids(api: FakeApi) -> None:
    victims = [bound("a", "n1", row, FULL_MIB) if row == 0 else bound("b", "n1", 1, FULL_MIB) for row in (0, 1)]
    for one in victims:
        api.put(one.plain())
    api.put(urgent().plain())
    async with running(api) as scheduler:
        await scheduler.extender.preemption.verb.informed.wait()
        named = {"n1": {"Pods": [one.plain() for one in victims], "NumPDBViolations": 0}}
        body = {"Pod": urgent().plain(), "NodeNameToVictims": named, "NodeNameToMetaVictims": None}
        answer = await scheduler.call("preempt", body)
        assert answer == {"NodeNameToMetaVictims": {"n1": {"Pods": uids("a"), "NumPDBViolations": 0}}}


async def test_a_node_that_is_not_known_and_uids_that_are_not_there_are_never_answered(api: FakeApi) -> None:
    for row in (0, 1):
        api.put(bound(f"a{row}", "n1", row, FULL_MIB).plain())
        api.put(bound(f"b{row}", "n2", row, FULL_MIB).plain())
    api.put(urgent().plain())
    async with running(api) as scheduler:
        assert await preempt(scheduler, urgent(), n9=uids("a0"), n1=uids("b0"), n2=uids("unknown")) == {}
        assert await preempt(scheduler, urgent(), n2=uids("b1")) == {"n2": {"Pods": uids("b0"), "NumPDBViolations": 0}}


@pytest.mark.parametrize("case", ["equal", "leaving", "never", "placed"])
async def test_no_pod_is_named_that_must_not_be_evicted(api: FakeApi, case: str) -> None:
    for row in (0, 1):
        one = bound(f"a{row}", "n1", row, FULL_MIB).of_priority(1000 if case == "equal" else 0)
        api.put((one.terminating() if case == "leaving" else one).plain())
    preemptor = urgent().of_priority(1000, "Never") if case == "never" else urgent()
    api.put(preemptor.plain())
    async with running(api) as scheduler:
        if case == "placed":
            assert (await scheduler.filter(preemptor, "n2"))["NodeNames"] == ["n2"]
        assert await preempt(scheduler, preemptor, n1=uids("a0", "a1")) == {}


async def test_budgets_are_kept_to_and_violations_counted(api: FakeApi) -> None:
    for row in (0, 1):
        api.put(bound(f"a{row}", "n1", row, FULL_MIB).labelled(app="kept").plain())
        api.put(bound(f"b{row}", "n2", row, FULL_MIB).labelled(app="kept" if row == 0 else "free").plain())
    api.put(budget("kept", 0, app="kept"))
    api.put(urgent().plain())
    async with running(api) as scheduler:
        violated = {"n1": {"Pods": uids("a0"), "NumPDBViolations": 1}}
        assert await preempt(scheduler, urgent(), n1=uids("a0")) == violated
        kept = {"n2": {"Pods": uids("b1"), "NumPDBViolations": 0}}
        assert await preempt(scheduler, urgent(), n1=uids("a0"), n2=uids("b0")) == kept


async def test_victims_without_a_gpu_stay_named_and_what_ours_would_free_is_made_up_for(api: FakeApi) -> None:
    cpu = pod("cpu").on("n1").with_phase("Running")
    api.put(cpu.plain())
    for row, amount in ((0, "1"), (1, "4")):
        plain = bound(f"a{row}", "n1", row, FULL_MIB).plain()
        plain["spec"]["containers"][0]["resources"]["requests"]["cpu"] = amount
        api.put(plain)
    api.put(urgent().plain())
    async with running(api) as scheduler:
        answer = await preempt(scheduler, urgent(), n1=uids("cpu", "a1"))
        assert answer == {"n1": {"Pods": uids("a1", "cpu"), "NumPDBViolations": 0}}, "a0 frees too little CPU"


async def test_a_pod_that_requests_none_of_ours_is_answered_as_it_was_requested(api: FakeApi) -> None:
    async with running(api) as scheduler:
        named = {"n1": uids("x", "y"), "n7": uids("z")}
        answer = await preempt(scheduler, pod("plain").of_priority(5), **named)
        assert answer == {name: {"Pods": pods, "NumPDBViolations": 0} for name, pods in named.items()}


@pytest.mark.parametrize("body", [b"", b"{", b'{"Pod":7}', b"\xff", b"null", b'{"Pod":{},"NodeNameToMetaVictims":[]}'])
async def test_a_body_that_cannot_be_read_evicts_no_pod(api: FakeApi, body: bytes) -> None:
    async with running(api) as scheduler:
        assert await scheduler.call("preempt", body) == {"NodeNameToMetaVictims": {}}


async def test_with_preemption_off_no_pod_is_evicted(api: FakeApi) -> None:
    api.put(bound("a", "n1", 0, HALF_MIB).plain())
    api.put(bound("b", "n1", 1, HALF_MIB).plain())
    api.put(urgent().plain())
    async with running(api, preemption=False) as scheduler:
        body = {"Pod": urgent().plain(), "NodeNameToMetaVictims": {"n1": {"Pods": uids("a"), "NumPDBViolations": 0}}}
        assert await scheduler.call("preempt", body) == {"NodeNameToMetaVictims": {}}


async def test_capacity_is_reserved_from_the_answer_on_for_victims_may_be_gone_before_the_scheduler_nominates(
    api: FakeApi,
) -> None:
    victim = bound("a", "n1", 0, FULL_MIB)
    for one in (victim, bound("b", "n1", 1, FULL_MIB).of_priority(1000), urgent()):
        api.put(one.plain())
    async with running(api) as scheduler:
        assert list(await preempt(scheduler, urgent(), n1=uids("a"))) == ["n1"]
        api.remove(victim.plain())
        await scheduler.comes_true(lambda: scheduler.extender.state.allocations.get("uid-default-a") is None)
        assert (await scheduler.filter(pod("late").asking(mib=1024), "n1"))["NodeNames"] == []
        assert (await scheduler.filter(urgent(), "n1"))["NodeNames"] == ["n1"]


async def test_capacity_for_which_the_scheduler_evicted_is_reserved_for_the_nominated_pod(api: FakeApi) -> None:
    victim, other, asking = bound("a", "n1", 0, FULL_MIB), bound("b", "n1", 1, FULL_MIB).of_priority(9999), urgent()
    for one in (victim, other, asking):
        api.put(one.plain())
    async with running(api) as scheduler:
        assert await preempt(scheduler, asking, n1=uids("a")) == {"n1": {"Pods": uids("a"), "NumPDBViolations": 0}}
        api.put(asking.nominated_to("n1").plain())
        reservations = scheduler.extender.preemption.reservations
        await scheduler.comes_true(lambda: len(reservations) == 1)
        api.remove(victim.plain())
        await scheduler.comes_true(lambda: scheduler.extender.state.allocations.get("uid-default-a") is None)
        assert (await scheduler.filter(pod("late").asking(mib=1024), "n1"))["NodeNames"] == []
        assert (await scheduler.filter(asking, "n1"))["NodeNames"] == ["n1"]
        assert await scheduler.bind(asking, "n1") == ""
        await scheduler.comes_true(lambda: len(reservations) == 0)
        assert scheduler.extender.state.fleet.overcommitted() == []


async def test_a_nomination_from_before_a_restart_keeps_the_capacity_that_comes_free(api: FakeApi) -> None:
    api.put(bound("a", "n1", 0, FULL_MIB).terminating().plain())
    api.put(bound("b", "n1", 1, FULL_MIB).plain())
    async with running(api) as scheduler:
        nominated = urgent().nominated_to("n1").plain()
        nominated["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        ]  # in the same write
        api.put(nominated)
        await scheduler.comes_true(lambda: len(scheduler.extender.preemption.reservations) == 1)
        api.remove(bound("a", "n1", 0, FULL_MIB).plain())
        await scheduler.comes_true(lambda: scheduler.extender.state.allocations.get("uid-default-a") is None)
        assert (await scheduler.filter(pod("late").asking(mib=1024), "n1"))["NodeNames"] == []


# --- the extender's own evictions ---


async def fragmented(api: FakeApi) -> list[PodBuilder]:
    """Both GPUs of n1 are half free: a whole one's worth, and no single GPU has it."""
    pods = [bound("a", "n1", 0, HALF_MIB).of_priority(5), bound("b", "n1", 1, HALF_MIB), urgent()]
    for one in pods:
        api.put(one.plain())
    return pods


async def evicted(scheduler: Scheduler, count: int = 1) -> None:
    await scheduler.comes_true(lambda: scheduler.extender.preemption.evicted() >= count)


async def test_where_totals_fit_and_no_gpu_does_the_least_pod_is_evicted_and_its_capacity_reserved(
    api: FakeApi,
) -> None:
    _, victim, asking = await fragmented(api)
    async with running(api) as scheduler:
        assert (await scheduler.filter(asking, "n1"))["NodeNames"] == []
        await scheduler.comes_true(lambda: "default/b" in api.evictions)
        assert api.evictions == ["default/b"]
        found = api.pod("default/urgent")
        assert found
        assert found["status"]["nominatedNodeName"] == "n1"
        assert (await scheduler.filter(pod("late").asking(mib=HALF_MIB).of_priority(9), "n1"))["NodeNames"] == ["n1"], (
            "the other GPU is free to all"
        )
        assert (await scheduler.filter(pod("later").asking(mib=1024), "n1"))["NodeNames"] == []
        assert scheduler.extender.state.fleet.overcommitted() == []
        api.remove(victim.plain())
        await scheduler.comes_true(lambda: scheduler.extender.state.allocations.get("uid-default-b") is None)
        assert (await scheduler.filter(pod("later").asking(mib=1024), "n1"))["NodeNames"] == []
        assert (await scheduler.filter(asking, "n1"))["NodeNames"] == ["n1"]
        assert await scheduler.bind(asking, "n1") == ""
        await scheduler.comes_true(lambda: len(scheduler.extender.preemption.reservations) == 0)
    reported = {(event["reason"], event["regarding"]["name"]): event["note"] for event in api.events}
    assert set(reported) == {("Preempted", "b"), ("Preempting", "urgent")}
    assert "for pod default/urgent of priority 1000" in reported["Preempted", "b"]
    assert "no single GPU of node n1" in reported["Preempting", "urgent"]


async def test_calls_are_answered_during_a_search_for_victims_and_a_node_may_go(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, asking = await fragmented(api)
    for row in (0, 1):
        api.put(bound(f"c{row}", "n2", row, HALF_MIB).of_priority(500).plain())
    monkeypatch.setattr(background, "WORK_S", -1.0)
    begun, go = asyncio.Event(), False
    steps = VictimSearch.steps

    def slow(search: VictimSearch) -> Iterator[None]:
        begun.set()
        while not go:
            yield
        yield from steps(search)

    monkeypatch.setattr(VictimSearch, "steps", slow)
    async with running(api) as scheduler:
        await scheduler.filter(asking, "n1", "n2")
        async with asyncio.timeout(10):
            await begun.wait()
        assert (await scheduler.filter(pod("other").asking(mib=HALF_MIB), "n2"))["NodeNames"] == ["n2"]
        api.remove(node("n2").plain())
        async with asyncio.timeout(10):
            while scheduler.extender.nodes.get("n2") is not None:
                await scheduler.extender.nodes.changed()
        go = True
        await scheduler.comes_true(lambda: api.evictions == ["default/b"])


async def test_a_snapshot_shows_preemption_reservations(api: FakeApi) -> None:
    _, _, asking = await fragmented(api)
    async with running(api) as scheduler:
        await scheduler.filter(asking, "n1")
        await scheduler.comes_true(lambda: bool(api.evictions))
        snapshot = snapshot_of(scheduler.extender.state).whole()
        assert {(pod.key, pod.stage) for pod in snapshot.pods} >= {("default/urgent", "kept")}


@pytest.mark.parametrize("why", ["never", "equal", "budget", "answered", "protected"])
async def test_no_pod_is_evicted_without_need_or_right(api: FakeApi, why: str) -> None:
    for row, name in enumerate("ab"):
        one = bound(name, "n1", row, HALF_MIB).labelled(app="kept").of_priority(1000 if why == "equal" else 0)
        api.put(one.plain())
    if why == "budget":
        api.put(budget("kept", 0, app="kept"))
    asking = urgent().of_priority(1000, "Never") if why == "never" else urgent()
    observer = pod("observer").asking(mib=FULL_MIB).of_priority(500)
    api.put(asking.plain())
    api.put(observer.plain())
    async with running(api) as scheduler:
        preemption = scheduler.extender.preemption
        if why == "answered":
            preemption._evictor._grace_s = 0.5  # so that the scheduler's own preemption comes first
        if why == "protected":
            for name in "ab":
                for times in range(3):
                    before = replace(bound(name, "n1", 0, 1024), uid=f"uid-{name}-{times}")
                    preemption._history.preempted(before.build())
        await preemption.verb.informed.wait()
        await scheduler.filter(asking, "n1")
        if why == "answered":
            assert await preempt(scheduler, asking, n1=uids("a"))
        # the next one, for which an eviction helps, shows that the first was searched for
        api.put(bound("c", "n2", 0, HALF_MIB).plain())
        api.put(bound("d", "n2", 1, HALF_MIB).plain())
        await scheduler.comes_true(lambda: scheduler.extender.state.allocations.get("uid-default-d") is not None)
        await scheduler.filter(observer, "n2")
        await scheduler.comes_true(lambda: bool(api.evictions))
    assert api.evictions == ["default/c"]


async def test_an_eviction_that_a_budget_refuses_is_tried_again(api: FakeApi) -> None:
    _, _, asking = await fragmented(api)
    api.faults.append(answer_with("POST", "/eviction", 429, "TooManyRequests", "Cannot evict pod: disruption budget"))
    async with running(api) as scheduler:
        await scheduler.filter(asking, "n1")
        await scheduler.comes_true(lambda: api.evictions == ["default/b"])
        assert api.requests.count("POST /api/v1/namespaces/default/pods/b/eviction") == 2
