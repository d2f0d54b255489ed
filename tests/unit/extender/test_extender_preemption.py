"""Room that is kept and room that is planned: who yields to whom, and what is known of it after a restart."""

from __future__ import annotations

import msgspec
import pytest

from kube.objects import Condition, Pod
from tests.builders import PodBuilder, card, pod, share
from tests.unit.extender.world import FULL_MIB, HALF_MIB, World


def turned_down(built: PodBuilder, reason: str = "Unschedulable") -> Pod:
    """The scheduler has been there, and found no place."""
    one = built.build()
    condition = Condition("PodScheduled", status="False", reason=reason)
    return msgspec.structs.replace(one, status=msgspec.structs.replace(one.status, conditions=(condition,)))


def test_room_that_a_lower_plan_had_is_kept_for_whom_others_are_evicted() -> None:
    world = World(n1=1)
    world.tell(pod("v").asking(mib=HALF_MIB).on("n1").assigned(share(card(0), HALF_MIB)))
    low, urgent = pod("low").asking(mib=HALF_MIB), pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    world.tell(low)
    world.plan(low, "n1")
    world.tell(urgent)
    assert world.filter(urgent, "n1").node_names == []
    assert list(world.preempt(urgent, n1=["v"]).nodes) == ["n1"]
    assert world.filter(low, "n1").node_names == []
    assert world.state.fleet.overcommitted() == []
    world.end("v")
    assert world.filter(urgent, "n1").node_names == ["n1"]


def test_a_plan_that_is_not_in_the_way_is_taken_up_again() -> None:
    world = World(n1=2)
    for row in (0, 1):
        world.tell(pod(f"v{row}").asking(mib=HALF_MIB).on("n1").assigned(share(card(row), HALF_MIB)))
    low, urgent = pod("low").asking(mib=HALF_MIB), pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    world.tell(low)
    world.plan(low, "n1")
    world.tell(urgent)
    assert list(world.preempt(urgent, n1=["v0"]).nodes) == ["n1"]
    taken = world.state.claims.get("uid-default-low")
    kept = world.state.claims.get("uid-default-urgent")
    assert kept is not None
    assert taken is None or taken.assignment.held()[0].uuid != kept.assignment.held()[0].uuid


def test_a_pod_that_has_plans_yield_is_given_one_place_whatever_its_policy() -> None:
    world = World(n1=1, n2=1)
    for name, where in (("l1", "n1"), ("l2", "n2")):
        low = pod(name).asking(mib=FULL_MIB)
        world.tell(low)
        world.plan(low, where)
    listed = pod("s").asking(mib=FULL_MIB).of_priority(1000).annotated(placement="scheduler")
    world.tell(listed)
    (where,) = world.filter(listed, "n1", "n2").node_names
    reservation = world.state.reservations.get("uid-default-s")
    assert reservation is not None
    assert reservation.node == where
    assert len(world.ahead.plans) == 1
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
    assert len(world.preemption.holds) == 1
    assert len(world.ahead.plans) == 0


@pytest.mark.parametrize("evicted_for", [True, False])
def test_a_nomination_is_a_hold_only_where_the_scheduler_found_no_place(evicted_for: bool) -> None:
    """Others were nominated ahead of their turn, by another replica: that yields."""
    world = World(n1=1)
    world.tell(pod("t").asking(mib=HALF_MIB).on("n1").assigned(share(card(0), HALF_MIB)).terminating())
    other = pod("other").asking(mib=FULL_MIB).nominated_to("n1")
    world.tell(turned_down(other) if evicted_for else other)
    assert len(world.preemption.holds) == (1 if evicted_for else 0)


def test_nobody_is_evicted_for_a_pod_that_is_gone_and_nothing_is_remembered_of_it() -> None:
    world = World(n1=1)
    world.tell(pod("v").asking(mib=FULL_MIB).on("n1").assigned(share(card(0), FULL_MIB)))
    urgent = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    world.tell(urgent)
    world.end("urgent")
    assert world.preempt(urgent, n1=["v"]).nodes == {}
    assert len(world.preemption.holds) == 0
    assert world.preemption.remembered == 0


def test_answers_are_forgotten_once_they_can_matter_no_more() -> None:
    world = World(n1=1)
    world.tell(pod("v").asking(mib=FULL_MIB).on("n1").assigned(share(card(0), FULL_MIB)))
    urgent = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    world.tell(urgent)
    world.preempt(urgent, n1=["v"])
    assert world.preemption.remembered == 1
    world.now_s = 301.0
    world.preemption.expire()
    assert world.preemption.remembered == 0


def test_pods_are_turned_down_that_wait_and_fit_nowhere() -> None:
    """Not those that kube-scheduler tries again by itself, as it could not reach an extender, nor those that it does not look at yet."""
    world = World(n1=1)
    waits = pod("waits").asking(mib=FULL_MIB)
    world.tell(pod("new").asking(mib=FULL_MIB))
    world.tell(turned_down(pod("again").asking(mib=FULL_MIB), "SchedulerError"))
    world.tell(turned_down(pod("gated").asking(mib=FULL_MIB), "SchedulingGated"))
    world.tell(turned_down(pod("leaving").asking(mib=FULL_MIB).terminating()))
    world.tell(turned_down(pod("bound").asking(mib=FULL_MIB).on("n1").assigned(share(card(0), FULL_MIB))))
    assert world.preemption.waiting() == []
    world.tell(turned_down(waits))
    assert [one.key for one in world.preemption.waiting()] == ["default/waits"]


def test_a_preempt_call_that_came_before_enough_was_known_is_remembered() -> None:
    world = World(n1=1)
    world.tell(pod("v").asking(mib=HALF_MIB).on("n1").assigned(share(card(0), HALF_MIB)))
    urgent = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    world.tell(urgent)
    assert world.preempt(urgent, n1=["v"]).nodes
    assert not world.preemption.missed
    world.preemption.informed.clear()
    assert not world.preempt(urgent, n1=["v"]).nodes
    assert world.preemption.missed


def test_a_pod_that_was_planned_and_has_others_evicted_has_one_claim_and_one_reservation() -> None:
    world = World(n1=1)
    urgent = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    world.tell(urgent)
    world.plan(urgent, "n1")
    world.tell(pod("v").asking(mib=HALF_MIB).on("n1").assigned(share(card(0), HALF_MIB)))
    assert list(world.preempt(urgent, n1=["v"]).nodes) == ["n1"]
    assert [one.stage for one in world.state.reservations] == ["kept"]
    assert world.state.fleet.overcommitted() == []
    world.end("v")
    claim = world.state.claims.get("uid-default-urgent")
    assert claim is not None
    assert not claim.own
    assert world.preemption.holds.is_whole("uid-default-urgent")


def test_processors_of_a_planned_pod_that_somebody_else_bound_stay_counted() -> None:
    world = World(n1=1)
    world.state._processors.set_node("n1", 8000)
    built = pod("p").asking(mib=1024)
    world.tell(built)
    world.plan(built, "n1")
    bound = built.on("n1").plain()
    bound["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "3"
    world.tell(msgspec.convert(bound, Pod))
    assert world.state.unassigned == {"uid-default-p"}
    assert world.state.claims.get("uid-default-p") is None
    assert len(world.state.reservations) == 0
    assert world.state._processors.free_milli("n1") == 5000
