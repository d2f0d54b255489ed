"""Preemption and nomination reservations: which yields to which, and what is read back after a restart."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from extender.protocol import PreemptionArgs, PreemptionResult
from kube.objects import Condition, Pod
from tests.builders import PodBuilder, gpu, pod, share
from tests.unit.extender.world import FULL_MIB, HALF_MIB, World, answer_of, step_by_step


def turned_down(built: PodBuilder, reason: str = "Unschedulable", message: str = "") -> Pod:
    """The scheduler has been there, and found no place."""
    one = built.build()
    condition = Condition("PodScheduled", status="False", reason=reason, message=message)
    return msgspec.structs.replace(one, status=msgspec.structs.replace(one.status, conditions=(condition,)))


def test_capacity_of_a_nomination_that_yields_is_reserved_for_the_preemptor() -> None:
    world = World(n1=1)
    world.report(pod("v").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(0), HALF_MIB)))
    low, urgent = pod("low").asking(mib=HALF_MIB), pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    world.report(low)
    world.plan(low, "n1")
    world.report(urgent)
    assert world.filter(urgent, "n1").node_names == []
    assert list(world.preempt(urgent, n1=["v"]).nodes) == ["n1"]
    assert world.filter(low, "n1").node_names == []
    assert world.state.fleet.overcommitted() == []
    world.end("v")
    assert world.filter(urgent, "n1").node_names == ["n1"]


def test_a_plan_that_is_not_in_the_way_is_taken_up_again() -> None:
    world = World(n1=2)
    for row in (0, 1):
        world.report(pod(f"v{row}").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(row), HALF_MIB)))
    low, urgent = pod("low").asking(mib=HALF_MIB), pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    world.report(low)
    world.plan(low, "n1")
    world.report(urgent)
    assert list(world.preempt(urgent, n1=["v0"]).nodes) == ["n1"]
    taken = world.state.allocations.get("uid-default-low")
    kept = world.state.allocations.get("uid-default-urgent")
    assert kept is not None
    assert taken is None or taken.assignment.held()[0].uuid != kept.assignment.held()[0].uuid


def test_a_pod_that_has_plans_yield_is_given_one_place_whatever_its_policy() -> None:
    world = World(n1=1, n2=1)
    for name, where in (("l1", "n1"), ("l2", "n2")):
        low = pod(name).asking(mib=FULL_MIB)
        world.report(low)
        world.plan(low, where)
    listed = pod("s").asking(mib=FULL_MIB).of_priority(1000).annotated(placement="scheduler")
    world.report(listed)
    (where,) = world.filter(listed, "n1", "n2").node_names
    reservation = world.state.reservations.get("uid-default-s")
    assert reservation is not None
    assert reservation.node == where
    assert len(world.nominator.reservations) == 1
    assert world.state.fleet.overcommitted() == []


@pytest.mark.parametrize("order", [("low", "urgent"), ("urgent", "low")])
def test_after_a_restart_room_made_by_eviction_goes_before_room_that_was_planned(order: tuple[str, ...]) -> None:
    world = World(n1=1)
    found = {
        "urgent": turned_down(pod("urgent").asking(mib=FULL_MIB).of_priority(9).nominated_to("n1")),
        "low": pod("low").asking(mib=HALF_MIB).nominated_to("n1").build(),
    }
    for name in order:
        world.pods.by_key[f"default/{name}"] = found[name]
    assert world.filter(pod("late").asking(mib=1024), "n1").node_names == []
    assert len(world.preemption.reservations) == 1
    assert len(world.nominator.reservations) == 0


@pytest.mark.parametrize("evicted_for", [True, False])
def test_a_nomination_is_a_hold_only_where_the_scheduler_found_no_place(evicted_for: bool) -> None:
    """Others were nominated ahead of their turn, by another replica: that yields."""
    world = World(n1=1)
    world.report(pod("t").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(0), HALF_MIB)).terminating())
    other = pod("other").asking(mib=FULL_MIB).nominated_to("n1")
    world.report(turned_down(other) if evicted_for else other)
    assert len(world.preemption.reservations) == (1 if evicted_for else 0)


def test_nobody_is_evicted_for_a_pod_that_is_gone_and_nothing_is_remembered_of_it() -> None:
    world = World(n1=1)
    world.report(pod("v").asking(mib=FULL_MIB).on("n1").assigned(share(gpu(0), FULL_MIB)))
    urgent = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    world.report(urgent)
    world.end("urgent")
    assert world.preempt(urgent, n1=["v"]).nodes == {}
    assert len(world.preemption.reservations) == 0
    assert world.preemption.verb.remembered == 0


def test_answers_are_forgotten_once_they_can_matter_no_more() -> None:
    world = World(n1=1)
    world.report(pod("v").asking(mib=FULL_MIB).on("n1").assigned(share(gpu(0), FULL_MIB)))
    urgent = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    world.report(urgent)
    world.preempt(urgent, n1=["v"])
    assert world.preemption.verb.remembered == 1
    world.now_s = 301.0
    world.preemption.expire()
    assert world.preemption.verb.remembered == 0


def test_pods_are_turned_down_that_wait_and_fit_nowhere() -> None:
    """Not those that kube-scheduler tries again by itself, as it could not reach an extender, nor those that it does not look at yet."""
    world = World(n1=1)
    waits = pod("waits").asking(mib=FULL_MIB)
    world.report(pod("new").asking(mib=FULL_MIB))
    world.report(turned_down(pod("again").asking(mib=FULL_MIB), "SchedulerError"))
    world.report(turned_down(pod("gated").asking(mib=FULL_MIB), "SchedulingGated"))
    world.report(turned_down(pod("leaving").asking(mib=FULL_MIB).terminating()))
    world.report(turned_down(pod("bound").asking(mib=FULL_MIB).on("n1").assigned(share(gpu(0), FULL_MIB))))
    assert world.preemption.waiting() == []
    world.report(turned_down(waits))
    assert [one.key for one in world.preemption.waiting()] == ["default/waits"]


def test_a_preempt_call_that_came_before_enough_was_known_is_remembered() -> None:
    world = World(n1=1)
    world.report(pod("v").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(0), HALF_MIB)))
    urgent = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    world.report(urgent)
    assert world.preempt(urgent, n1=["v"]).nodes
    assert not world.preemption.verb.missed
    world.preemption.verb.informed.clear()
    assert not world.preempt(urgent, n1=["v"]).nodes
    assert world.preemption.verb.missed


def test_a_victim_counts_by_its_peak_and_not_by_the_sum_of_its_containers() -> None:
    """By the sum the best-effort pod would free the 4 CPUs that the preemptor lacks, and be evicted in vain."""
    world = World(n1=1)
    frees_3 = pod("low").asking(init=True, container="init", cpu="3").asking(mib=HALF_MIB, cpu="3")
    frees_3 = frees_3.annotated(**{"class": "best-effort"})
    world.report(frees_3.on("n1").assigned(share(gpu(0), HALF_MIB)))
    world.report(pod("high").asking(mib=HALF_MIB, cpu="4").on("n1").assigned(share(gpu(0), HALF_MIB)))
    urgent = pod("urgent").asking(mib=HALF_MIB, cpu="4").of_priority(1000)
    world.report(urgent)
    (chosen,) = world.preempt(urgent, n1=["high"]).nodes.values()
    assert [victim.uid for victim in chosen.pods or ()] == ["uid-default-high"]


def searching(world: World, built: PodBuilder, *where: str) -> Coroutine[Any, Any, PreemptionResult]:
    """The call, which gives others their turn after every node."""
    named: dict[str, Any] = {one: {"Pods": []} for one in where}
    body = {"Pod": built.plain(), "NodeNameToMetaVictims": named}
    args = msgspec.json.decode(msgspec.json.encode(body), type=PreemptionArgs)
    return world.preemption.verb.preempt(args, world.preemption.verb.deadline())


def three_nodes() -> tuple[World, PodBuilder]:
    """Of the pods that may be evicted on each, the last node's costs least."""
    world = World(n1=1, n2=1, n3=1)
    for at, name in enumerate(("n1", "n2", "n3")):
        victim = pod(f"v{name}").asking(mib=FULL_MIB).of_priority(30 - at).on(name)
        world.report(victim.assigned(share(gpu(0, node=name), FULL_MIB)))
    asking = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    world.report(asking)
    return world, asking


def test_when_time_is_up_the_best_answer_so_far_is_given_or_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vgpu.scheduling.victims.choice.TOGETHER", 1)
    answers = []
    for turns in range(1, 60):
        world, asking = three_nodes()

        def time_passes(turn: int, world: World = world, last: int = turns) -> None:
            world.now_s = 100.0 if turn == last else world.now_s

        with step_by_step():
            answers.append(tuple(answer_of(searching(world, asking, "n1", "n2", "n3"), time_passes).nodes))
        assert len(world.preemption.reservations) == len(answers[-1]), "room is kept where somebody is evicted"
    assert answers[0] == ()
    assert answers[-1] == ("n3",)
    assert ("n1",) in answers
    assert answers == sorted(answers, key=[(), ("n1",), ("n2",), ("n3",)].index), "it only becomes better"


@pytest.mark.parametrize("turns", range(1, 30))
def test_victims_are_proved_again_on_what_has_happened_meanwhile(turns: int) -> None:
    world, asking = three_nodes()

    def goes(turn: int) -> None:
        if turn == turns:
            leaving = pod("vn3").asking(mib=FULL_MIB).of_priority(28).on("n3").terminating()
            world.report(leaving.assigned(share(gpu(0, node="n3"), FULL_MIB)))

    with step_by_step():
        (node,) = answer_of(searching(world, asking, "n1", "n2", "n3"), goes).nodes
    assert node == ("n2" if "vn3" in {one.metadata.name for one in world.leaving()} else "n3")


def test_a_pod_that_went_while_its_victims_were_chosen_has_nobody_evicted() -> None:
    world, asking = three_nodes()
    with step_by_step():
        answer = answer_of(searching(world, asking, "n1", "n2"), lambda turn: turn == 1 and world.end("urgent"))
    assert answer.nodes == {}
    assert len(world.preemption.reservations) == 0


def test_a_plan_that_is_made_meanwhile_is_in_nobodys_way() -> None:
    world, asking = three_nodes()
    world.end("vn3")
    low = pod("low").asking(mib=HALF_MIB)
    world.report(low)
    world.plan(low, "n3")
    world.report(pod("keeps").asking(mib=HALF_MIB).of_priority(1).on("n3").assigned(share(gpu(0, node="n3"), HALF_MIB)))
    with step_by_step():
        (chosen,) = answer_of(searching(world, asking, "n2", "n3")).nodes.values()
    assert [one.uid for one in chosen.pods or ()] == ["uid-default-keeps"]


def test_a_pod_that_was_planned_and_has_others_evicted_has_one_allocation_and_one_reservation() -> None:
    world = World(n1=1)
    urgent = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    world.report(urgent)
    world.plan(urgent, "n1")
    world.report(pod("v").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(0), HALF_MIB)))
    assert list(world.preempt(urgent, n1=["v"]).nodes) == ["n1"]
    assert [one.stage for one in world.state.reservations] == ["kept"]
    assert world.state.fleet.overcommitted() == []
    world.end("v")
    allocation = world.state.allocations.get("uid-default-urgent")
    assert allocation is not None
    assert not allocation.own
    assert world.preemption.reservations.is_whole("uid-default-urgent")


def test_processors_of_a_planned_pod_that_somebody_else_bound_stay_counted() -> None:
    world = World(n1=1)
    world.state.resources.set_node("n1", {"cpu": 8000})
    built = pod("p").asking(mib=1024)
    world.report(built)
    world.plan(built, "n1")
    bound = built.on("n1").plain()
    bound["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "3"
    world.report(msgspec.convert(bound, Pod))
    assert world.state.unassigned == {"uid-default-p"}
    assert world.state.allocations.get("uid-default-p") is None
    assert len(world.state.reservations) == 0
    assert world.state.resources.free_cpu_milli("n1") == 5000


def test_a_call_whose_answer_is_always_out_of_date_ends_after_some_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    world, asking = three_nodes()
    requested = list[bool]()

    def dearer(*_: object, at_any_cost: bool) -> None:
        requested.append(at_any_cost)

    monkeypatch.setattr(world.preemption.verb, "_reserved", dearer)
    assert answer_of(searching(world, asking, "n1")).nodes == {}
    assert requested == [False, False, True]


@pytest.mark.parametrize(("most_pods", "nodes"), [("2", ["n1"]), ("3", [])])
def test_a_pod_goes_where_the_node_runs_as_many_as_it_may_though_its_gpu_has_room(
    most_pods: str, nodes: list[str]
) -> None:
    world = World(n1=2)
    world.resources("n1", pods=most_pods)
    for at in range(2):
        world.report(pod(f"v{at}").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(at, node="n1"), HALF_MIB)))
    urgent = pod("urgent").asking(mib=HALF_MIB).of_priority(1000)
    world.report(urgent)
    answer = world.preempt(urgent, n1=["v0"]).nodes
    assert list(answer) == nodes
    assert all(len(victims.pods or ()) == 1 for victims in answer.values())
