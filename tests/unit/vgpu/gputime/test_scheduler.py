"""The policy of GPU time, under a simulated clock and a GPU whose switches take as long as real ones."""

from __future__ import annotations

from itertools import pairwise
from math import nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.examples import examples
from tests.unit.vgpu.gputime.gpu_model import (
    BE,
    LC,
    STANDARD,
    Program,
    SimulatedNode,
    always,
    container,
    requests,
    scheduler_with,
)
from vgpu.api.errors import BadDocument
from vgpu.gputime.events import (
    Idle,
    Join,
    SchedulingParameters,
    Switched,
    Work,
)

# -- caps ---------------------------------------------------------------------------------------------------------------


# -- pace ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cap", "pace"), [(10, 0.05), (10, 0.2), (30, 0.5), (50, 0.9), (30, 1.0), (10, 0.0)])
def test_time_is_paid_for_at_its_pace(cap: int, pace: float) -> None:
    """So a cap limits the counted GPU time, and does not suspend a container that computes less."""
    node = SimulatedNode({"a": Program(replace(container(cap=cap, weight=cap), pace=pace), always=True)})
    node.run(20.0)
    assert node.on_s("a") / 20 * pace * 100 == pytest.approx(min(cap, pace * 100), abs=0.5)
    if pace * 100 <= cap:
        assert node.scheduler.usage("a").suspends == 0


def test_a_pace_is_no_way_to_more_than_a_part_of_a_gpu_that_is_shared() -> None:
    scheduler = scheduler_with(
        a=SchedulingParameters(frozenset("0"), STANDARD, 2, 0, 1.0, 0.7), b=container(), c=container()
    )
    for name in "abc":
        scheduler.apply(Work(0.0, name))
    scheduler.decide(3.0)
    assert scheduler.usage("a").on_s == pytest.approx(1.0), "the driver slices time among three"


@pytest.mark.parametrize(("pace", "refused"), [(0.0, False), (0.02, False), (1.0, True)])
def test_one_that_is_accused_wrongly_pays_for_no_more_than_was_seen_of_it(pace: float, *, refused: bool) -> None:
    """A latency-critical one with a cap of 10 %: 0.5 ms every 10 ms, and all other time it counts as working best-effort."""
    reported, silent = container(LC, cap=10), replace(container(BE, cap=10), pace=pace)
    scheduler = scheduler_with(lc=reported, be=container(BE))
    scheduler.apply(Work(0.0, "lc"))
    scheduler.apply(Work(0.0, "be"))
    on, without_credit = {"lc", "be"}, 0
    for step in range(1000):
        at_s = step // 2 * 0.01 + step % 2 * 0.0005
        scheduler.apply(Join(at_s, "lc", silent if step % 2 else reported))
        decision = scheduler.decide(at_s)
        without_credit += step % 2 == 0 and decision.why["lc"] == "no credit"
        for name in on ^ decision.on:
            scheduler.apply(Switched(at_s, name, name in decision.on, 0.0005))
        on = set(decision.on)
    assert (without_credit > 100) is refused
    assert refused or without_credit == 0


@pytest.mark.parametrize("pace", [-0.1, 1.1, nan])
def test_a_pace_is_a_part(pace: float) -> None:
    with pytest.raises(BadDocument, match="0 to 1"):
        replace(container(), pace=pace)


# -- equals ---------------------------------------------------------------------------------------------------------------


def test_equals_without_caps_are_left_to_the_driver() -> None:
    node = SimulatedNode({name: always() for name in "abc"})
    node.run(3.0)
    assert [node.scheduler.usage(name).suspends for name in "abc"] == [0, 0, 0]
    assert node.on_s("a") == pytest.approx(1.0)


@settings(max_examples=examples(12), deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 5, 8]), min_size=2, max_size=5).filter(lambda ws: len(set(ws)) > 1))
def test_equals_with_weights_get_time_in_proportion(weights: list[int]) -> None:
    node = SimulatedNode({f"t{at}": always(weight=weight) for at, weight in enumerate(weights)})
    node.run(20.0)
    got = [node.on_s(f"t{at}") for at in range(len(weights))]
    assert sum(got) > 20 * 0.80
    for weight, seconds in zip(weights, got, strict=True):
        assert seconds / sum(got) == pytest.approx(weight / sum(weights), abs=0.02)


def test_idleness_earns_no_right_to_be_first() -> None:
    late = Program(container(weight=2), requests=[(10.0, 100.0)])
    node = SimulatedNode({"early": always(weight=1), "late": late})
    node.run(11.0)
    assert node.on_s("early", 10.0, 11.0) > 0.25


# -- urgency ----------------------------------------------------------------------------------------------------------------


def test_latency_critical_work_clears_the_gpu_at_once_and_gives_it_back_after_its_grace() -> None:
    scheduler = scheduler_with(lc=container(LC), be=container(BE))
    scheduler.apply(Work(0.0, "be"))
    assert "be" in scheduler.decide(0.5).on
    scheduler.apply(Work(1.0, "lc"))
    assert scheduler.decide(1.0).on == {"lc"}
    scheduler.apply(Switched(1.0007, "be", False, 0.0007))
    scheduler.apply(Idle(1.002, "lc"))
    in_grace = scheduler.decide(1.002)
    assert in_grace.on == {"lc"}
    assert in_grace.decide_again_s == pytest.approx(1.0022)
    assert scheduler.decide(in_grace.decide_again_s).on == {"lc", "be"}


def test_what_a_request_waits_is_the_time_until_the_gpu_is_cleared_for_it() -> None:
    scheduler = scheduler_with(lc=container(LC), be=container(BE))
    scheduler.apply(Work(0.0, "be"))
    scheduler.decide(0.5)
    scheduler.apply(Work(1.0, "lc"))
    scheduler.decide(1.0)
    scheduler.apply(Switched(1.0007, "be", False, 0.0007))
    scheduler.decide(1.5)
    lc, be = scheduler.usage("lc"), scheduler.usage("be")
    assert (lc.arrivals, lc.off_s, lc.clearing_s) == (1, 0.0, pytest.approx(0.0007))
    assert (be.arrivals, be.clearing_s, be.suspended_s) == (1, 0.0, pytest.approx(0.4993))


def test_a_lower_level_number_goes_first_inside_a_class() -> None:
    scheduler = scheduler_with(first=container(LC, level=0), second=container(LC, level=1))
    scheduler.apply(Work(0.0, "first"))
    scheduler.apply(Work(0.0, "second"))
    assert scheduler.decide(0.0).on == {"first"}


def test_requests_beside_a_busy_best_effort_container_wait_for_one_suspend_only() -> None:
    node = SimulatedNode({"lc": requests(LC, 0.010, 0.000250, 5.0), "be": always(BE)})
    node.run(5.0)
    latencies = sorted(node.programs["lc"].latencies_s)
    assert len(latencies) > 450
    assert latencies[-5] < 0.00125, "its own 0.25 ms, half of it shared, and a suspend"
    assert node.on_s("be") / 5 > 0.80


def test_an_idle_container_is_not_switched_for_nothing() -> None:
    scheduler = scheduler_with(idle=container(STANDARD, cap=30, weight=30), busy=container(STANDARD, cap=50, weight=50))
    scheduler.apply(Work(0.0, "busy"))
    assert scheduler.decide(0.0).on == {"idle", "busy"}
    scheduler.apply(Switched(0.001, "idle", False, 0.0006))
    assert scheduler.decide(0.001).on == {"busy"}


@settings(max_examples=examples(12), deadline=None)
@given(st.sampled_from([LC, STANDARD]), st.integers(1, 3))
def test_no_container_with_work_starves_under_more_urgent_work(service_class: str, starving: int) -> None:
    programs = {"urgent": always(service_class)} | {f"be{at}": always(BE) for at in range(starving)}
    node = SimulatedNode(programs)
    node.run(12.0)
    for at in range(starving):
        spans = [(a, b) for a, b, _ in node.spans[f"be{at}"]]
        gaps = [b - a for (_, a), (b, _) in pairwise([(0.0, 0.0), *spans, (12.0, 12.0)])]
        assert max(gaps) < 1.0 + starving * 0.025
    assert node.on_s("urgent") > 12 * (1 - 0.03 * starving)


# -- several GPUs ------------------------------------------------------------------------------------------------------------


def test_a_container_with_several_gpus_runs_on_all_of_them_alone_or_on_none() -> None:
    node = SimulatedNode({"gang": always(gpus="01"), "a": always(gpus="0"), "b": always(gpus="1")})
    node.run(5.0)
    for _, decision in node.decisions:
        assert decision.on in ({"gang"}, {"a", "b"}, {"a"}, {"b"})
    assert node.on_s("gang") == pytest.approx(2.5, abs=0.15)
    for name in "ab":
        assert node.on_s(name) > 2.2, "a GPU that the gang does not have is not left empty"


def test_a_container_with_several_gpus_is_not_starved_by_time_slices_that_end_at_different_times() -> None:
    node = SimulatedNode(
        {
            "gang": always(gpus="01"),
            "a": always(gpus="0", weight=2),
            "b": always(gpus="1", weight=3),
            "c": always(gpus="1"),
        }
    )
    node.run(10.0)
    assert node.on_s("gang") > 10 * 0.12


# -- whatever happens -----------------------------------------------------------------------------------------------------------
