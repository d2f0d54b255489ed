"""A blocked container never runs, and to the others it is as if it were not there. Nor does a suspended one of which a GPU does not answer."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.vgpu.gputime.gpu_model import BE, LC, STANDARD, SimulatedNode, always, container, scheduler_with
from tests.unit.vgpu.gputime.test_scheduler_properties import NAMES, Happening, containers, happenings, play
from vgpu.gputime.events import (
    BeginSection,
    Block,
    Event,
    Hint,
    Hung,
    Idle,
    Join,
    Late,
    Leave,
    SchedulingParameters,
    Switched,
    Unblock,
    Work,
)
from vgpu.gputime.timing import Timing

later = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),
        st.sampled_from(NAMES),
        st.sampled_from(["join", "work", "idle", "hint", "begin", "late", "obey"]),
        containers,
    ),
    max_size=30,
)


def event_of(what: str, name: str, at_s: float, joining: SchedulingParameters) -> Event:
    events: dict[str, Event] = {
        "join": Join(at_s, name, joining), "work": Work(at_s, name), "idle": Idle(at_s, name),
        "begin": BeginSection(at_s, name), "hint": Hint(at_s, name, 0.004), "late": Late(at_s, name, 0.01),
    }  # fmt: skip
    return events[what]


@pytest.mark.parametrize("why", ["blocked", "hung"])
@given(happenings, st.sampled_from(NAMES), containers, later)
def test_whatever_comes_a_blocked_container_never_runs_and_the_others_run_as_if_it_had_left(
    why: str, before: list[Happening], blocked: str, parameters: SchedulingParameters, after: list[Happening]
) -> None:
    """The slow version: a scheduler from which the container left at the moment of its block."""
    before += [(0.0, blocked, what, parameters) for what in ("unblock", "answer", "join")]
    (one, _, _, now_s), (other, _, _, _) = play(before), play(before)
    for name in (decision := one.decide(now_s)).why:
        for scheduler in (one, other):
            scheduler.apply(Switched(now_s, name, name in decision.on, 0.0006))
    others = {name for name in decision.why if name != blocked}
    one.apply(Block(now_s, blocked) if why == "blocked" else Hung(now_s, blocked, hung=True))
    one.apply(Switched(now_s, blocked, on=False, took_s=0.0, gate=True))
    other.apply(Leave(now_s, blocked))
    for pause_s, name, what, joining in after:
        now_s += pause_s
        wanted = one.decide(now_s).on
        made: list[Event] = [Switched(now_s, name, name in wanted, 0.0006) for name in others]
        if what != "obey":
            made = [event_of(what, name, now_s, joining)]
            others |= {name} - {blocked} if what == "join" else set()
        for event in made:
            one.apply(event)
            if event.name != blocked:
                other.apply(event)
        decision, without = one.decide(now_s), other.decide(now_s)
        assert decision.why.pop(blocked) == why
        assert blocked not in decision.on
        assert (decision.on, decision.why) == (without.on, without.why)
        assert decision.decide_again_s == without.decide_again_s


@pytest.mark.parametrize("service_class", [LC, STANDARD, BE])
@pytest.mark.parametrize("cap", [0, 20])
def test_it_stays_suspended_with_work_credit_and_nobody_beside_it_and_pays_nothing(
    service_class: str, cap: float
) -> None:
    scheduler = scheduler_with(a=container(service_class, cap))
    scheduler.apply(Work(0.0, "a"))
    scheduler.apply(Block(1.0, "a"))
    scheduler.apply(Switched(1.001, "a", on=False, took_s=0.001))
    paid_s = scheduler.usage("a").on_s
    for at_s in (1.001, 1.5, 5.0, 100.0):
        decision = scheduler.decide(at_s)
        assert (decision.on, decision.why, decision.decide_again_s) == (frozenset(), {"a": "blocked"}, inf)
    usage = scheduler.usage("a")
    assert (usage.on_s, usage.off_s, usage.capped_s) == (paid_s, 0.0, 0.0), "it waits for memory, not for GPU time"
    scheduler.apply(Unblock(100.0, "a"))
    assert scheduler.decide(100.0).on == {"a"}


def test_an_idle_container_is_suspended_by_a_block_and_stays_so_until_its_end() -> None:
    scheduler = scheduler_with(a=container(), b=container())
    assert scheduler.decide(10.0).on == {"a", "b"}, "both rest"
    scheduler.apply(Block(10.0, "a"))
    assert scheduler.decide(10.0).on == scheduler.decide(99.0).on == {"b"}
    scheduler.apply(Unblock(99.0, "a"))
    assert scheduler.decide(99.0).on == {"a", "b"}


def test_after_a_long_block_it_has_no_claim_to_the_time_that_others_used() -> None:
    """Without that it would run alone for as long as it was blocked."""
    node = SimulatedNode({"a": always(weight=1), "b": always(weight=2)})
    node.run(1.0)
    node._report(Block(node.now_s, "a"))
    node.run(11.0)
    assert node.on_s("a", 1.01, 11.0) == 0
    assert node.on_s("b", 1.01, 11.0) == pytest.approx(9.99)
    node._report(Unblock(node.now_s, "a"))
    node.run(13.0)
    assert node.on_s("a", 11.0, 13.0) == pytest.approx(2 / 3, abs=0.1)


def test_a_newcomer_beside_a_blocked_one_has_no_claim_to_that_time_either() -> None:
    scheduler = scheduler_with(a=container(), b=container(weight=2), c=container(weight=3))
    for name in "ab":
        scheduler.apply(Work(0.0, name))
    scheduler.apply(Block(0.0, "a"))
    scheduler.apply(Switched(0.0, "a", on=False, took_s=0.0))
    scheduler.apply(Work(10.0, "c"))
    assert scheduler.decide(10.0).on == {"b"}, "served as much as it, and first by name"


def test_a_block_is_no_wait_for_a_slice_against_starvation() -> None:
    scheduler = scheduler_with(lc=container(LC), be=container(BE))
    for name in ("lc", "be"):
        scheduler.apply(Work(0.0, name))
    scheduler.decide(0.0)
    scheduler.apply(Switched(0.001, "be", on=False, took_s=0.0006))
    starve_s = Timing().starve_after_s
    scheduler.apply(Block(starve_s / 2, "be"))
    scheduler.apply(Unblock(10 * starve_s, "be"))
    assert scheduler.decide(10 * starve_s).why["be"] == "waits"
    assert scheduler.decide(11 * starve_s).why["be"] == "starved"


def test_it_gives_way_to_nobody_and_nobody_gives_way_to_it() -> None:
    scheduler = scheduler_with(lc=container(LC), be=container(BE), blocked=container(BE))
    for name in ("be", "blocked"):
        scheduler.apply(Work(0.0, name))
    scheduler.apply(Block(0.0, "blocked"))
    assert scheduler.gives_way("lc") == ["be"], "the other is being suspended anyway"
    scheduler.apply(Block(0.0, "lc"))
    assert scheduler.gives_way("lc") == []


def test_the_end_of_a_block_that_never_began_changes_nothing() -> None:
    scheduler = scheduler_with(a=container(cap=50, weight=50), b=container(cap=50, weight=50))
    for name in "ab":
        scheduler.apply(Work(0.0, name))
    scheduler.apply(Switched(0.001, "b", on=False, took_s=0.0006))
    before = scheduler.decide(0.5)
    scheduler.apply(Unblock(0.5, "a"))
    scheduler.apply(Unblock(0.5, "unknown"))
    assert scheduler.decide(0.5) == before
