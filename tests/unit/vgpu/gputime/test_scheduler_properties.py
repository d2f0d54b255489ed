"""After any events, decisions are valid, and the same again from a recorded trace."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.vgpu.gputime.gpu_model import (
    BE,
    LC,
    STANDARD,
    container,
    scheduler_with,
)
from vgpu.api.errors import BadDocument
from vgpu.gputime.events import (
    BeginSection,
    Block,
    EndSection,
    Event,
    Hint,
    Hung,
    Idle,
    Join,
    Late,
    Leave,
    SchedulingParameters,
    Stalled,
    Switched,
    Unblock,
    Work,
    from_lines,
    to_lines,
)
from vgpu.gputime.scheduler import GpuTimeScheduler
from vgpu.gputime.timing import Timing

NAMES = ("a", "b", "c", "d")
containers = st.builds(
    SchedulingParameters,
    st.sampled_from([frozenset("0"), frozenset("1"), frozenset("01")]),
    st.sampled_from([LC, STANDARD, BE]),
    st.integers(0, 4),
    st.sampled_from([0, 10, 30, 100]),
    st.sampled_from([1.0, 3.0]),
) | st.builds(
    SchedulingParameters,
    st.sampled_from([frozenset("0"), frozenset("1"), frozenset("01")]),
    st.sampled_from([LC, STANDARD, BE]),
    st.integers(0, 4),
    st.sampled_from([30, 60, 100]),
    st.sampled_from([1.0, 3.0]),
    guaranteed_percent=st.sampled_from([1, 10, 20, 30]),
)
happenings = st.lists(
    st.tuples(
        st.floats(0.0, 0.1),
        st.sampled_from(NAMES),
        st.sampled_from(
            ["join", "leave", "work", "idle", "hint", "begin", "end", "block", "unblock", "hang", "answer", "obey"]
        ),
        containers,
    ),
    max_size=60,
)


Happening = tuple[float, str, str, SchedulingParameters]


class Restless(GpuTimeScheduler):
    """The obvious slow version: every container is looked at every time."""

    def _let_rest(self) -> None:
        pass


def play(
    list_: list[Happening], scheduler: GpuTimeScheduler | None = None
) -> tuple[GpuTimeScheduler, list[Event], list[str], float]:
    """Applies the events; `obey` switches every container as decided. Returns the decisions as text too."""
    scheduler, events, decisions, now_s = GpuTimeScheduler() if scheduler is None else scheduler, [], [], 0.0
    on: dict[str, bool] = {}
    for pause_s, name, what, one in list_:
        now_s += pause_s
        made: list[Event] = []
        if what == "join":
            made = [Join(now_s, name, one)]
            on.setdefault(name, True)
        elif what == "leave":
            made = [Leave(now_s, name)]
            on.pop(name, None)
        elif what == "obey":
            wanted = scheduler.decide(now_s).on
            made = [Switched(now_s, other, other in wanted, 0.0006) for other in on if (other in wanted) != on[other]]
            on = {other: other in wanted for other in on}
        elif what in ("hang", "answer"):
            made = [Hung(now_s, name, what == "hang")]
        else:
            kinds = {
                "work": Work,
                "idle": Idle,
                "begin": BeginSection,
                "end": EndSection,
                "block": Block,
                "unblock": Unblock,
            }
            kind = kinds.get(what)
            made = [kind(now_s, name) if kind else Hint(now_s, name, 0.004)]
        for event in made:
            scheduler.apply(event)
        events += made
        decision = scheduler.decide(now_s)
        decisions.append(f"{sorted(decision.on)} {sorted(decision.why.items())} {decision.decide_again_s}")
    return scheduler, events, decisions, now_s


@given(happenings)
def test_no_decision_leaves_a_gpu_empty_or_gives_it_twice(list_: list[Happening]) -> None:
    scheduler, events, _, now_s = play(list_)
    here: dict[str, SchedulingParameters] = {}
    for event in events:
        if isinstance(event, Join):
            here[event.name] = event.container
        elif isinstance(event, Leave):
            here.pop(event.name, None)
    decision = scheduler.decide(now_s)
    assert decision.on <= here.keys()
    assert decision.decide_again_s > now_s
    assert decision.why.keys() == here.keys()
    may_run = {name for name, why in decision.why.items() if why not in ("idle", "no credit", "blocked", "hung")}
    assert not {name for name, why in decision.why.items() if why in ("blocked", "hung")} & decision.on
    running = may_run & decision.on
    for gpu in "01":
        takers = {name for name in running if gpu in here[name].gpus}
        if len(takers) > 1:
            assert {decision.why[name] for name in takers} == {"shares"}
            assert len({(here[name].service_class, here[name].level, here[name].weight) for name in takers}) == 1
        waiting = [name for name in may_run if here[name].gpus == {gpu}]
        gangs = [name for name in may_run if len(here[name].gpus) > 1]
        if waiting and not gangs:
            assert takers, f"GPU {gpu} is kept from {waiting}"


@given(happenings)
def test_a_resting_container_is_scheduled_as_if_it_were_examined_every_time(list_: list[Happening]) -> None:
    one, _, decisions, now_s = play(list_)
    other, _, slowly, _ = play(list_, Restless())
    assert decisions == slowly
    for name in one.decide(now_s).why:
        assert one.usage(name) == other.usage(name)
        assert one.credit_s(name) == pytest.approx(other.credit_s(name))


@given(happenings, st.sampled_from(NAMES), st.sampled_from([Work, BeginSection]), st.floats(0.0, 3.0), st.booleans())
def test_the_containers_named_to_give_way_are_suspended_when_the_work_comes(
    list_: list[Happening], name: str, kind: type[Work | BeginSection], later_s: float, requested: bool
) -> None:
    """Whenever that is, and whether anybody asked in between or not."""
    scheduler, _, _, now_s = play(list_)
    before = scheduler.decide(now_s)
    stops = scheduler.gives_way(name)
    now_s += later_s
    before = scheduler.decide(now_s) if requested else before
    scheduler.apply(kind(now_s, name))
    after = scheduler.decide(now_s)
    assert not after.on.intersection(stops)
    assert not stops or before.why[name] == "idle"


def test_a_container_with_a_slice_against_starvation_is_not_named_to_give_way() -> None:
    scheduler = scheduler_with(lc=container(LC), std=container(STANDARD), be=container(BE))
    for name in ("std", "be"):
        scheduler.apply(Work(0.0, name))
    assert scheduler.decide(0.0).on == {"lc", "std"}
    scheduler.apply(Switched(0.001, "be", on=False, took_s=0.0006))
    assert scheduler.decide(1.01).why["be"] == "starved"
    scheduler.apply(Switched(1.011, "std", on=False, took_s=0.0006))
    scheduler.apply(Switched(1.012, "be", on=True, took_s=0.0004))
    scheduler.decide(1.012)
    assert scheduler.gives_way("lc") == []


def test_no_container_is_named_to_give_way_for_what_ends_without_an_event() -> None:
    """The grace after its last work: no event reports its end."""
    scheduler = scheduler_with(lc=container(LC, level=1), less=container(LC, level=3))
    scheduler.apply(Work(0.0, "less"))
    scheduler.apply(Idle(0.001, "less"))
    assert scheduler.decide(0.0011).why["less"] != "idle"
    assert scheduler.gives_way("lc") == []


def test_a_container_that_ends_its_work_while_off_stays_off_until_the_gpu_is_free() -> None:
    scheduler = scheduler_with(lc=container(LC), be=container(BE))
    for name in ("lc", "be"):
        scheduler.apply(Work(0.0, name))
    scheduler.decide(0.0)
    scheduler.apply(Switched(0.001, "be", on=False, took_s=0.0006))
    scheduler.apply(Idle(0.002, "be"))
    assert scheduler.decide(0.002).on == {"lc"}
    assert scheduler.decide(0.502).on == {"lc"}
    assert scheduler.usage("be").suspended_s == pytest.approx(0.501)
    scheduler.apply(Idle(0.502, "lc"))
    assert scheduler.decide(0.503).on == {"lc", "be"}


def test_a_container_without_work_and_credit_stays_off_until_it_has_some() -> None:
    scheduler = scheduler_with(a=container(cap=20))
    scheduler.apply(Late(0.0, "a", 0.1))
    scheduler.apply(Switched(0.0, "a", on=False, took_s=0.0, gate=True))
    scheduler.apply(Late(0.05, "a", 0.05))
    at_s = 0.05
    decision = scheduler.decide(at_s)
    assert "a" not in decision.on
    while "a" not in decision.on:
        at_s = decision.decide_again_s
        decision = scheduler.decide(at_s)
    assert scheduler.credit_s("a") == pytest.approx(0.01)


def test_every_less_urgent_container_with_work_on_the_gpu_is_preempted() -> None:
    scheduler = scheduler_with(
        lc=container(LC), be=container(BE), std=container(STANDARD), idle=container(BE), there=container(BE, gpus="1")
    )
    for name in ("be", "std", "there"):
        scheduler.apply(Work(0.0, name))
    assert scheduler.decide(0.0).on == {"lc", "std", "idle", "there"}
    assert sorted(scheduler.gives_way("lc")) == ["be", "std"], "both are on yet"
    scheduler.apply(Switched(0.001, "be", on=False, took_s=0.0006))
    scheduler.decide(0.001)
    assert scheduler.gives_way("lc") == ["std"]
    assert scheduler.gives_way("std") == scheduler.gives_way("unknown") == [], "it works already; it is unknown"


@given(happenings)
def test_a_trace_written_down_and_replayed_makes_the_same_decisions(
    list_: list[Happening],
) -> None:
    one, events, _, now_s = play(list_)
    other = GpuTimeScheduler()
    for event in from_lines(to_lines(events)):
        other.apply(event)
    assert other.decide(now_s).on == one.decide(now_s).on


def test_the_types_in_a_recorded_file_stay_as_they_are() -> None:
    one_of_each: list[Event] = [
        Join(1.0, "a", container()), Leave(1.0, "a"), Work(1.0, "a"), Idle(1.0, "a"), Hint(1.0, "a", 0.1), BeginSection(1.0, "a"),
        EndSection(1.0, "a"), Switched(1.0, "a", True, 0.0), Stalled(1.0, "a", 0.5), Late(1.0, "a", 0.1),
        Block(1.0, "a"), Unblock(1.0, "a"),
    ]  # fmt: skip
    assert [msgspec.json.decode(line)["type"] for line in to_lines(one_of_each).splitlines()] == [
        "join", "leave", "work", "idle", "hint", "begin", "end", "switched", "stalled", "late", "block", "unblock",
    ]  # fmt: skip


def test_a_damaged_trace_names_its_line() -> None:
    lines = to_lines([Work(1.0, "a")]) + b'{"type":"join","at_s":1,"name":"b","container":{"gpus":[]}}\n'
    with pytest.raises(BadDocument, match=r"trace line 2: .*without a GPU"):
        list(from_lines(lines))


def test_events_of_a_container_that_left_change_nothing() -> None:
    scheduler = scheduler_with(a=container())
    scheduler.apply(Leave(1.0, "a"))
    scheduler.apply(Work(1.1, "a"))
    scheduler.apply(Switched(1.2, "a", False, 0.001))
    assert scheduler.decide(2.0).on == frozenset()


def test_a_change_of_class_takes_effect_at_the_next_decision() -> None:
    scheduler = scheduler_with(a=container(BE), b=container(STANDARD))
    scheduler.apply(Work(0.0, "a"))
    scheduler.apply(Work(0.0, "b"))
    assert scheduler.decide(0.0).on == {"b"}
    scheduler.apply(Join(0.1, "a", container(LC)))
    assert scheduler.decide(0.1).on == {"a"}


def test_settings_name_no_switch_cheaper_than_nothing() -> None:
    assert Timing().quantum_least_s > 5 * Timing().suspend_s
