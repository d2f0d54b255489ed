"""Compute limits: what a container earns, pays and owes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.vgpu.gputime.gpu_model import (
    BE,
    STANDARD,
    Program,
    SimulatedNode,
    always,
    container,
    requests,
    scheduler_with,
)
from vgpu.gputime.events import (
    Join,
    Late,
    Switched,
    Work,
)
from vgpu.gputime.scheduler import GpuTimeScheduler


@pytest.mark.parametrize("cap", [10, 30, 50, 70, 90])
def test_a_cap_is_met_to_half_a_point_by_a_container_that_is_alone(cap: int) -> None:
    node = SimulatedNode({"a": always(cap=cap, weight=cap)})
    node.run(20.0)
    assert node.on_s("a") / 20 * 100 == pytest.approx(cap, abs=0.5)


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.integers(5, 60), min_size=2, max_size=4).filter(lambda caps: sum(caps) <= 90), st.integers(0, 9))
def test_caps_that_leave_time_for_switches_are_all_met_to_half_a_point(caps: list[int], seed: int) -> None:
    node = SimulatedNode({f"t{at}": always(cap=cap, weight=cap) for at, cap in enumerate(caps)}, seed=seed)
    node.run(20.0)
    for at, cap in enumerate(caps):
        assert node.on_s(f"t{at}", 1.0) / 19 * 100 == pytest.approx(cap, abs=0.5), (caps, at)


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(5, 95), st.floats(0.005, 0.2), st.floats(0.001, 0.3), st.integers(0, 9))
def test_no_second_gives_more_than_the_cap_and_what_may_be_saved_up(
    cap: int, period: float, work: float, seed: int
) -> None:
    node = SimulatedNode({"a": requests(STANDARD, period, work, 10.0, cap), "b": always(BE)}, seed=seed)
    node.run(10.0)
    most = cap / 100 * (1.0 + 3 * 0.05) + 0.001
    for since_s in range(9):
        assert node.on_s("a", since_s, since_s + 1) <= most


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.integers(5, 95), st.floats(0.0, 0.2)), min_size=1, max_size=5), st.floats(0.2, 0.4))
def test_the_time_to_decide_anew_is_each_gpus_own(begins: list[tuple[int, float]], at_s: float) -> None:
    ordered = sorted(begins, key=lambda one: one[1])

    def share_of(numbers: Iterable[int]) -> GpuTimeScheduler:
        scheduler = scheduler_with(
            **{f"t{number}": container(cap=ordered[number][0], gpus=str(number)) for number in numbers}
        )
        for number in numbers:
            scheduler.apply(Work(ordered[number][1], f"t{number}"))
            scheduler.apply(Switched(ordered[number][1], f"t{number}", True, 0.0))
        return scheduler

    found = share_of(range(len(ordered))).decide(at_s)
    alone = {str(number): share_of([number]).decide(at_s).decide_again_s for number in range(len(ordered))}
    assert found.again_s == pytest.approx(alone)
    assert found.decide_again_s == min(found.again_s.values())


def test_a_container_with_several_gpus_causes_a_decision_on_each_of_them() -> None:
    scheduler = scheduler_with(a=container(cap=20, gpus="01"), b=container(gpus="2"))
    for name in "ab":
        scheduler.apply(Work(0.0, name))
    decided = scheduler.decide(0.01)
    assert decided.again_s["0"] == decided.again_s["1"] == decided.decide_again_s
    assert decided.again_s["2"] > decided.decide_again_s, "no thread wakes for another GPU's container"


def test_credit_saved_up_in_idleness_is_three_frames_and_no_more() -> None:
    node = SimulatedNode({"a": Program(container(cap=20), requests=[(8.0, 100.0)])})
    node.run(9.0)
    assert node.on_s("a", 8.0, 9.0) == pytest.approx(0.2 + 0.2 * 3 * 0.05, abs=0.012)


def test_work_that_is_reported_late_is_paid_as_far_as_it_was_not_paid_anyway() -> None:
    scheduler = GpuTimeScheduler()
    scheduler.apply(Join(0.0, "a", container(cap=20)))
    scheduler.apply(Late(1.0, "a", 0.02))
    scheduler.apply(Work(1.0, "a"))
    assert scheduler.usage("a").on_s == pytest.approx(0.02)
    assert scheduler.credit_s("a") == pytest.approx(0.03 - 0.02), "three frames of credit were saved up"
    scheduler.decide(1.1)
    scheduler.apply(Late(1.1, "a", 0.05))
    assert scheduler.usage("a").on_s == pytest.approx(0.12), "it was on with work: that is paid already"
    scheduler.apply(Switched(1.1, "a", on=False, took_s=0.0))
    scheduler.apply(Late(1.13, "a", 0.05))
    assert scheduler.usage("a").on_s == pytest.approx(0.15)


def test_late_work_costs_three_frames_at_most() -> None:
    scheduler = GpuTimeScheduler()
    scheduler.apply(Join(0.0, "a", container(cap=20)))
    scheduler.apply(Late(60.0, "a", 50.0))
    assert scheduler.usage("a").on_s == pytest.approx(3 * 0.05)
    assert scheduler.credit_s("a") == pytest.approx(0.03 - 0.15)


def test_late_work_alone_makes_no_more_debt_than_three_frames_and_forgives_none() -> None:
    scheduler = GpuTimeScheduler()
    scheduler.apply(Join(0.0, "a", container(cap=1)))
    for at in range(1, 100):
        scheduler.apply(Late(at / 10, "a", 0.1))
    assert scheduler.credit_s("a") == pytest.approx(-3 * 0.05)
    scheduler.apply(Work(10.0, "a"))
    scheduler.decide(11.0)
    owed_s = scheduler.credit_s("a")
    scheduler.apply(Late(11.0, "a", 0.1))
    assert scheduler.credit_s("a") == owed_s < -0.9


def test_a_cap_of_everything_is_never_switched_off_while_alone() -> None:
    node = SimulatedNode({"a": always(cap=100, weight=100)})
    node.run(5.0)
    assert node.scheduler.usage("a").suspends == 0


def test_a_container_without_a_cap_uses_what_the_capped_one_leaves() -> None:
    node = SimulatedNode({"capped": always(cap=30, weight=30), "free": always(weight=70)})
    node.run(10.0)
    assert node.on_s("capped") / 10 == pytest.approx(0.30, abs=0.005)
    assert node.on_s("free") / 10 > 0.64, "what is left but for the switches"
