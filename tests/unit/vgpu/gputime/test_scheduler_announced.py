"""The policy of GPU time where work is announced: by a hint, or as a section with a begin and an end. As `test_share`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.vgpu.gputime.gpu_model import BE, LC, Program, SimulatedNode, always, container, scheduler_with
from vgpu.gputime.events import BeginSection, EndSection, Hint, Idle, Work
from vgpu.gputime.timing import Timing


def test_a_hint_clears_the_gpu_before_the_request() -> None:
    scheduler = scheduler_with(lc=container(LC), be=container(BE))
    scheduler.apply(Work(0.0, "be"))
    scheduler.apply(Hint(1.0, "lc", 0.010))
    before = scheduler.decide(1.0)
    assert "be" in before.on
    assert before.decide_again_s == pytest.approx(1.0085)
    assert scheduler.decide(1.0085).on == {"lc"}
    assert "be" in scheduler.decide(1.0151).on, "the request never came"


@pytest.mark.parametrize("early_s", [0.0, 0.0004], ids=["on time", "early"])
def test_what_was_announced_gives_the_gpu_back_when_it_is_done(early_s: float) -> None:
    scheduler = scheduler_with(lc=container(LC), be=container(BE))
    scheduler.apply(Work(0.0, "be"))
    scheduler.apply(Hint(1.0, "lc", 0.002))
    scheduler.apply(Work(1.002 - early_s, "lc"))
    assert scheduler.decide(1.002).on == {"lc"}
    scheduler.apply(Idle(1.0025, "lc"))
    in_grace = scheduler.decide(1.0025)
    assert in_grace.on == {"lc"}
    assert "be" in scheduler.decide(in_grace.decide_again_s).on
    assert in_grace.decide_again_s == pytest.approx(1.0027)


def test_what_ends_before_the_announced_time_or_was_there_before_the_hint_is_not_what_was_announced() -> None:
    scheduler = scheduler_with(lc=container(LC), be=container(BE))
    scheduler.apply(Work(0.0, "be"))
    scheduler.apply(Hint(1.0, "lc", 0.001))
    scheduler.apply(Work(1.0, "lc"))
    scheduler.apply(Idle(1.0002, "lc"))
    assert scheduler.decide(1.0009).on == {"lc"}, "it copied its input; the request comes"
    scheduler.apply(Work(1.05, "lc"))
    scheduler.apply(Hint(1.1, "lc", 0.001))
    scheduler.apply(Idle(1.102, "lc"))
    assert scheduler.decide(1.105).on == {"lc"}, "the request before the announced one"
    scheduler.apply(Work(1.1055, "lc"))
    scheduler.apply(Idle(1.1058, "lc"))
    assert "be" in scheduler.decide(1.1061).on


def test_idleness_inside_a_section_does_not_end_it() -> None:
    scheduler = scheduler_with(lc=container(LC), be=container(BE))
    scheduler.apply(Work(0.0, "be"))
    scheduler.apply(Hint(1.0, "lc", 0.001))
    scheduler.apply(BeginSection(1.001, "lc"))
    scheduler.apply(Work(1.002, "lc"))
    scheduler.apply(Idle(1.003, "lc"))
    assert scheduler.decide(1.5).on == {"lc"}


@settings(max_examples=examples(15), deadline=None)
@given(st.floats(0.012, 0.05), st.floats(0.0001, 0.003), st.floats(0.0, 0.003), st.integers(0, 9))
def test_announced_requests_cost_the_others_the_lead_the_work_and_two_switches(
    period_s: float, work_s: float, ahead_s: float, seed: int
) -> None:
    count = int(4.8 / period_s)
    program = Program(container(LC), requests=[(0.1 + at * period_s, work_s) for at in range(count)])
    program.hints = [(at - ahead_s, ahead_s) for at, _ in program.requests]
    node = SimulatedNode({"lc": program, "be": always(BE)}, seed=seed)
    node.run(5.0)
    assert len(program.latencies_s) == count
    assert max(program.latencies_s) < work_s + 0.00085 + work_s, "a suspend at most, in which the GPU is shared"
    lead_s = min(ahead_s, Timing().lead_s)
    each_s = lead_s + work_s + 0.00085 + Timing().grace_s + 0.00046
    assert node.on_s("be") > 5.0 - count * each_s - 0.01


def test_a_section_without_an_end_is_over_after_a_second() -> None:
    scheduler = scheduler_with(lc=container(LC), be=container(BE))
    scheduler.apply(Work(0.0, "be"))
    scheduler.apply(BeginSection(1.0, "lc"))
    assert scheduler.decide(1.5).on == {"lc"}
    assert "be" in scheduler.decide(2.0).on
    scheduler.apply(BeginSection(3.0, "lc"))
    assert scheduler.decide(3.0).on == {"lc"}
    scheduler.apply(EndSection(3.1, "lc"))
    assert "be" in scheduler.decide(3.1).on
