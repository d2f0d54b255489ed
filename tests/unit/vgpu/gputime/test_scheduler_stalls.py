"""The effect of a stall of the arbiter on debts, time slices and waits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.vgpu.gputime.gpu_model import container, scheduler_with
from vgpu.gputime.events import Stalled, Switched, Work, from_lines, to_lines
from vgpu.gputime.scheduler import GpuTimeScheduler

WORTH = 0.1 * 0.05 * 3
"""Three frames of a container with a tenth of the GPU."""


def running(**names: bool) -> GpuTimeScheduler:
    """Containers with a tenth each and work from 0 s on; true = it is on."""
    scheduler = scheduler_with(**{name: container(cap=10) for name in names})
    for name, on in names.items():
        scheduler.apply(Work(0.0, name))
        scheduler.apply(Switched(0.0, name, on, 0.0))
    scheduler.decide(0.0)
    return scheduler


@pytest.mark.parametrize("stalled_s", [0.5, 2.2, 10.0])
def test_a_container_that_ran_during_a_stall_owes_three_frames(stalled_s: float) -> None:
    scheduler = running(a=True)
    scheduler.apply(Stalled(0.001 + stalled_s, "0", 0.001))
    assert scheduler.credit_s("a") == pytest.approx(-WORTH)


def test_ordinary_debt_carries_over() -> None:
    scheduler = running(a=True)
    scheduler.decide(1.0)
    before_s = scheduler.credit_s("a")
    assert before_s == pytest.approx(0.005 - 0.9)
    scheduler.apply(Stalled(3.0, "0", 1.0))
    assert scheduler.credit_s("a") == pytest.approx(before_s)


def test_a_stall_that_costs_less_is_paid_in_full() -> None:
    scheduler = running(a=True)
    scheduler.apply(Stalled(0.012, "0", 0.002))
    assert scheduler.credit_s("a") == pytest.approx(0.005 - 0.012 * 0.9)


def test_a_suspended_container_earns_the_maximum_credit() -> None:
    scheduler = running(a=False)
    scheduler.apply(Stalled(5.0, "0", 0.0))
    assert scheduler.credit_s("a") == pytest.approx(WORTH)


def test_a_stall_of_one_gpu_forgives_no_debt_on_another() -> None:
    scheduler = scheduler_with(a=container(cap=10), b=container(cap=10, gpus="1"))
    for name in "ab":
        scheduler.apply(Work(0.0, name))
    scheduler.apply(Stalled(2.0, "0", 0.0))
    assert scheduler.credit_s("a") == pytest.approx(-WORTH)
    assert scheduler.credit_s("b") == pytest.approx(0.005 - 1.8)


def test_a_stall_during_which_another_gpu_was_decided_for_is_forgiven_the_same() -> None:
    scheduler = scheduler_with(a=container(cap=10), b=container(cap=10, gpus="1"))
    for name in "ab":
        scheduler.apply(Work(0.0, name))
    for tenth in range(1, 20):
        scheduler.decide(tenth / 10)
    scheduler.apply(Stalled(2.0, "0", 0.0))
    assert scheduler.credit_s("a") == pytest.approx(-WORTH)
    assert scheduler.credit_s("b") == pytest.approx(0.005 - 1.8)


def test_a_container_that_ran_alone_in_a_stall_is_not_last_in_order() -> None:
    scheduler = scheduler_with(a=container(weight=1), b=container(weight=3))
    for name, on in (("a", True), ("b", False)):
        scheduler.apply(Work(0.0, name))
        scheduler.apply(Switched(0.0, name, on, 0.0))
    scheduler.decide(0.0)
    scheduler.apply(Stalled(10.0, "0", 0.0))
    served = {name: scheduler._states[name].served for name in "ab"}
    assert served == {"a": pytest.approx(0.0), "b": pytest.approx(0.0)}


def test_a_stall_is_no_waiting() -> None:
    scheduler = scheduler_with(a=container("latency-critical"), b=container("best-effort"))
    for name, on in (("a", True), ("b", False)):
        scheduler.apply(Work(0.0, name))
        scheduler.apply(Switched(0.0, name, on, 0.0))
    assert scheduler.decide(0.0).why["b"] == "waits"
    scheduler.apply(Stalled(10.5, "0", 0.5))
    assert scheduler.decide(10.5).why["b"] == "waits", "it has waited for half a second, not for ten"
    assert scheduler.decide(11.1).why["b"] == "starved"


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.25, 10.0), st.booleans()), min_size=1, max_size=8))
def test_stalls_alone_never_make_more_debt_than_three_frames(stalls: list[tuple[float, float, bool]]) -> None:
    scheduler, at_s = running(a=False), 0.0
    for pause_s, stalled_s, on in stalls:
        scheduler.apply(Switched(at_s, "a", False, 0.0))
        at_s += pause_s
        scheduler.apply(Switched(at_s, "a", on, 0.0))
        scheduler.apply(Stalled(at_s + stalled_s, "0", at_s))
        at_s += stalled_s
        assert -WORTH - 1e-9 <= scheduler.credit_s("a") <= WORTH + 1e-9


def test_a_stall_is_written_down_and_replayed() -> None:
    assert list(from_lines(to_lines([Stalled(2.0, "0", 1.0)]))) == [Stalled(2.0, "0", 1.0)]
