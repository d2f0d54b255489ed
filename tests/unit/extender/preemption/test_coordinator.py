"""Preemption and nomination reservations: which yields to which, and what is read back after a restart."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from extender.protocol import PreemptionArgs, PreemptionResult
from kube.objects import Condition, Pod
from tests.builders import PodBuilder, gpu, pod, share
from tests.unit.extender.extender_parts import FULL_MIB, HALF_MIB, ExtenderParts, answer_of, step_by_step


def turned_down(built: PodBuilder, reason: str = "Unschedulable", message: str = "") -> Pod:
    """The scheduler has tried the pod, and found no node."""
    one = built.build()
    condition = Condition("PodScheduled", status="False", reason=reason, message=message)
    return msgspec.structs.replace(one, status=msgspec.structs.replace(one.status, conditions=(condition,)))


def test_capacity_of_a_nomination_that_yields_is_reserved_for_the_preemptor() -> None:
    parts = ExtenderParts(n1=1)
    parts.report(pod("v").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(0), HALF_MIB)))
    low, urgent = pod("low").asking(mib=HALF_MIB), pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    parts.report(low)
    parts.plan(low, "n1")
    parts.report(urgent)
    assert parts.filter(urgent, "n1").node_names == []
    assert list(parts.preempt(urgent, n1=["v"]).nodes) == ["n1"]
    assert parts.filter(low, "n1").node_names == []
    assert parts.state.fleet.overcommitted() == []
    parts.end("v")
    assert parts.filter(urgent, "n1").node_names == ["n1"]


def test_a_nomination_that_blocks_no_pod_is_made_again() -> None:
    parts = ExtenderParts(n1=2)
    for row in (0, 1):
        parts.report(pod(f"v{row}").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(row), HALF_MIB)))
    low, urgent = pod("low").asking(mib=HALF_MIB), pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    parts.report(low)
    parts.plan(low, "n1")
    parts.report(urgent)
    assert list(parts.preempt(urgent, n1=["v0"]).nodes) == ["n1"]
    taken = parts.state.allocations.get("uid-default-low")
    kept = parts.state.allocations.get("uid-default-urgent")
    assert kept is not None
    assert taken is None or taken.assignment.held()[0].uuid != kept.assignment.held()[0].uuid


def test_a_pod_that_has_plans_yield_is_given_one_place_whatever_its_policy() -> None:
    parts = ExtenderParts(n1=1, n2=1)
    for name, where in (("l1", "n1"), ("l2", "n2")):
        low = pod(name).asking(mib=FULL_MIB)
        parts.report(low)
        parts.plan(low, where)
    listed = pod("s").asking(mib=FULL_MIB).of_priority(1000).annotated(placement="scheduler")
    parts.report(listed)
    (where,) = parts.filter(listed, "n1", "n2").node_names
    reservation = parts.state.reservations.get("uid-default-s")
    assert reservation is not None
    assert reservation.node == where
    assert len(parts.nominator.reservations) == 1
    assert parts.state.fleet.overcommitted() == []


@pytest.mark.parametrize("order", [("low", "urgent"), ("urgent", "low")])
def test_after_a_restart_preemption_reservations_come_before_nominations(order: tuple[str, ...]) -> None:
    parts = ExtenderParts(n1=1)
    found = {
        "urgent": turned_down(pod("urgent").asking(mib=FULL_MIB).of_priority(9).nominated_to("n1")),
        "low": pod("low").asking(mib=HALF_MIB).nominated_to("n1").build(),
    }
    for name in order:
        parts.pods.by_key[f"default/{name}"] = found[name]
    assert parts.filter(pod("late").asking(mib=1024), "n1").node_names == []
    assert len(parts.preemption.reservations) == 1
    assert len(parts.nominator.reservations) == 0


@pytest.mark.parametrize("evicted_for", [True, False])
def test_a_nomination_is_a_preemption_reservation_only_where_the_scheduler_found_no_place(evicted_for: bool) -> None:
    """Other pods were nominated early, by another replica: such a nomination yields."""
    parts = ExtenderParts(n1=1)
    parts.report(pod("t").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(0), HALF_MIB)).terminating())
    other = pod("other").asking(mib=FULL_MIB).nominated_to("n1")
    parts.report(turned_down(other) if evicted_for else other)
    assert len(parts.preemption.reservations) == (1 if evicted_for else 0)


def test_no_pod_is_evicted_for_a_pod_that_is_gone_and_nothing_is_remembered_of_it() -> None:
    parts = ExtenderParts(n1=1)
    parts.report(pod("v").asking(mib=FULL_MIB).on("n1").assigned(share(gpu(0), FULL_MIB)))
    urgent = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    parts.report(urgent)
    parts.end("urgent")
    assert parts.preempt(urgent, n1=["v"]).nodes == {}
    assert len(parts.preemption.reservations) == 0
    assert parts.preemption.verb.remembered == 0


def test_answers_are_forgotten_once_they_can_matter_no_more() -> None:
    parts = ExtenderParts(n1=1)
    parts.report(pod("v").asking(mib=FULL_MIB).on("n1").assigned(share(gpu(0), FULL_MIB)))
    urgent = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    parts.report(urgent)
    parts.preempt(urgent, n1=["v"])
    assert parts.preemption.verb.remembered == 1
    parts.now_s = 301.0
    parts.preemption.expire()
    assert parts.preemption.verb.remembered == 0


def test_waiting_pods_that_fit_nowhere_are_listed() -> None:
    """Not those that kube-scheduler tries again by itself, as it could not reach an extender, nor those that it does not look at yet."""
    parts = ExtenderParts(n1=1)
    waits = pod("waits").asking(mib=FULL_MIB)
    parts.report(pod("new").asking(mib=FULL_MIB))
    parts.report(turned_down(pod("again").asking(mib=FULL_MIB), "SchedulerError"))
    parts.report(turned_down(pod("gated").asking(mib=FULL_MIB), "SchedulingGated"))
    parts.report(turned_down(pod("leaving").asking(mib=FULL_MIB).terminating()))
    parts.report(turned_down(pod("bound").asking(mib=FULL_MIB).on("n1").assigned(share(gpu(0), FULL_MIB))))
    assert parts.preemption.waiting() == []
    parts.report(turned_down(waits))
    assert [one.key for one in parts.preemption.waiting()] == ["default/waits"]


def test_a_preempt_call_that_came_before_enough_was_known_is_remembered() -> None:
    parts = ExtenderParts(n1=1)
    parts.report(pod("v").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(0), HALF_MIB)))
    urgent = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    parts.report(urgent)
    assert parts.preempt(urgent, n1=["v"]).nodes
    assert not parts.preemption.verb.missed
    parts.preemption.verb.informed.clear()
    assert not parts.preempt(urgent, n1=["v"]).nodes
    assert parts.preemption.verb.missed


def test_a_victim_counts_by_its_peak_and_not_by_the_sum_of_its_containers() -> None:
    """By the sum the best-effort pod would free the 4 CPUs that the preemptor lacks, and be evicted in vain."""
    parts = ExtenderParts(n1=1)
    frees_3 = pod("low").asking(init=True, container="init", cpu="3").asking(mib=HALF_MIB, cpu="3")
    frees_3 = frees_3.annotated(**{"class": "best-effort"})
    parts.report(frees_3.on("n1").assigned(share(gpu(0), HALF_MIB)))
    parts.report(pod("high").asking(mib=HALF_MIB, cpu="4").on("n1").assigned(share(gpu(0), HALF_MIB)))
    urgent = pod("urgent").asking(mib=HALF_MIB, cpu="4").of_priority(1000)
    parts.report(urgent)
    (chosen,) = parts.preempt(urgent, n1=["high"]).nodes.values()
    assert [victim.uid for victim in chosen.pods or ()] == ["uid-default-high"]


def searching(parts: ExtenderParts, built: PodBuilder, *where: str) -> Coroutine[Any, Any, PreemptionResult]:
    """The call, which yields to other tasks after every node."""
    named: dict[str, Any] = {one: {"Pods": []} for one in where}
    body = {"Pod": built.plain(), "NodeNameToMetaVictims": named}
    args = msgspec.json.decode(msgspec.json.encode(body), type=PreemptionArgs)
    return parts.preemption.verb.preempt(args, parts.preemption.verb.deadline())


def three_nodes() -> tuple[ExtenderParts, PodBuilder]:
    """Of the pods that may be evicted on each, the last node's costs least."""
    parts = ExtenderParts(n1=1, n2=1, n3=1)
    for at, name in enumerate(("n1", "n2", "n3")):
        victim = pod(f"v{name}").asking(mib=FULL_MIB).of_priority(30 - at).on(name)
        parts.report(victim.assigned(share(gpu(0, node=name), FULL_MIB)))
    asking = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    parts.report(asking)
    return parts, asking


def test_when_time_is_up_the_best_answer_so_far_is_given_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vgpu.scheduling.victims.victim_search.TOGETHER", 1)
    answers = []
    for steps in range(1, 60):
        parts, asking = three_nodes()

        def time_passes(step: int, parts: ExtenderParts = parts, last: int = steps) -> None:
            parts.now_s = 100.0 if step == last else parts.now_s

        with step_by_step():
            answers.append(tuple(answer_of(searching(parts, asking, "n1", "n2", "n3"), time_passes).nodes))
        assert len(parts.preemption.reservations) == len(answers[-1]), "capacity is reserved where a pod is evicted"
    assert answers[0] == ()
    assert answers[-1] == ("n3",)
    assert ("n1",) in answers
    assert answers == sorted(answers, key=[(), ("n1",), ("n2",), ("n3",)].index), "it only becomes better"


@pytest.mark.parametrize("steps", range(1, 30))
def test_victims_are_proved_again_on_what_has_happened_meanwhile(steps: int) -> None:
    parts, asking = three_nodes()

    def goes(step: int) -> None:
        if step == steps:
            leaving = pod("vn3").asking(mib=FULL_MIB).of_priority(28).on("n3").terminating()
            parts.report(leaving.assigned(share(gpu(0, node="n3"), FULL_MIB)))

    with step_by_step():
        (node,) = answer_of(searching(parts, asking, "n1", "n2", "n3"), goes).nodes
    assert node == ("n2" if "vn3" in {one.metadata.name for one in parts.leaving()} else "n3")


def test_no_pod_is_evicted_for_a_pod_that_was_deleted_while_its_victims_were_chosen() -> None:
    parts, asking = three_nodes()
    with step_by_step():
        answer = answer_of(searching(parts, asking, "n1", "n2"), lambda step: step == 1 and parts.end("urgent"))
    assert answer.nodes == {}
    assert len(parts.preemption.reservations) == 0


def test_a_nomination_that_is_made_meanwhile_blocks_no_pod() -> None:
    parts, asking = three_nodes()
    parts.end("vn3")
    low = pod("low").asking(mib=HALF_MIB)
    parts.report(low)
    parts.plan(low, "n3")
    parts.report(pod("keeps").asking(mib=HALF_MIB).of_priority(1).on("n3").assigned(share(gpu(0, node="n3"), HALF_MIB)))
    with step_by_step():
        (chosen,) = answer_of(searching(parts, asking, "n2", "n3")).nodes.values()
    assert [one.uid for one in chosen.pods or ()] == ["uid-default-keeps"]


def test_a_pod_that_was_planned_and_has_others_evicted_has_one_allocation_and_one_reservation() -> None:
    parts = ExtenderParts(n1=1)
    urgent = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    parts.report(urgent)
    parts.plan(urgent, "n1")
    parts.report(pod("v").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(0), HALF_MIB)))
    assert list(parts.preempt(urgent, n1=["v"]).nodes) == ["n1"]
    assert [one.stage for one in parts.state.reservations] == ["kept"]
    assert parts.state.fleet.overcommitted() == []
    parts.end("v")
    allocation = parts.state.allocations.get("uid-default-urgent")
    assert allocation is not None
    assert not allocation.own
    assert parts.preemption.reservations.is_complete("uid-default-urgent")


def test_cpu_of_a_nominated_pod_that_another_scheduler_bound_stays_counted() -> None:
    parts = ExtenderParts(n1=1)
    parts.state.resources.set_node("n1", {"cpu": 8000})
    built = pod("p").asking(mib=1024)
    parts.report(built)
    parts.plan(built, "n1")
    bound = built.on("n1").plain()
    bound["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "3"
    parts.report(msgspec.convert(bound, Pod))
    assert parts.state.unassigned == {"uid-default-p"}
    assert parts.state.allocations.get("uid-default-p") is None
    assert len(parts.state.reservations) == 0
    assert parts.state.resources.free_cpu_milli("n1") == 5000


def test_a_call_whose_answer_is_always_out_of_date_ends_after_some_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, asking = three_nodes()
    requested = list[bool]()

    def dearer(*_: object, at_any_cost: bool) -> None:
        requested.append(at_any_cost)

    monkeypatch.setattr(parts.preemption.verb, "_reserved", dearer)
    assert answer_of(searching(parts, asking, "n1")).nodes == {}
    assert requested == [False, False, True]


@pytest.mark.parametrize(("most_pods", "nodes"), [("2", ["n1"]), ("3", [])])
def test_a_pod_is_evicted_where_the_node_has_reached_its_pod_limit_though_its_gpu_has_enough_free(
    most_pods: str, nodes: list[str]
) -> None:
    parts = ExtenderParts(n1=2)
    parts.resources("n1", pods=most_pods)
    for at in range(2):
        parts.report(pod(f"v{at}").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(at, node="n1"), HALF_MIB)))
    urgent = pod("urgent").asking(mib=HALF_MIB).of_priority(1000)
    parts.report(urgent)
    answer = parts.preempt(urgent, n1=["v0"]).nodes
    assert list(answer) == nodes
    assert all(len(victims.pods or ()) == 1 for victims in answer.values())
