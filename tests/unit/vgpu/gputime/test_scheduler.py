"""The policy of GPU time, under a simulated clock and a GPU whose switches take as long as real ones."""

from __future__ import annotations

from collections.abc import Iterable
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
    Node,
    Program,
    always,
    container,
    requests,
    scheduler_with,
)
from vgpu.api.errors import BadDocument
from vgpu.gputime.events import (
    Begin,
    Container,
    End,
    Event,
    Hint,
    Idle,
    Join,
    Late,
    Leave,
    Switched,
    Work,
    from_lines,
    to_lines,
)
from vgpu.gputime.scheduler import GpuTimeScheduler
from vgpu.gputime.timing import Settings

# -- caps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [10, 30, 50, 70, 90])
def test_a_cap_is_met_to_half_a_point_by_a_container_that_is_alone(cap: int) -> None:
    node = Node({"a": always(cap=cap, weight=cap)})
    node.run(20.0)
    assert node.on_s("a") / 20 * 100 == pytest.approx(cap, abs=0.5)


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.integers(5, 60), min_size=2, max_size=4).filter(lambda caps: sum(caps) <= 90), st.integers(0, 9))
def test_caps_that_leave_room_for_switches_are_all_met_to_half_a_point(caps: list[int], seed: int) -> None:
    node = Node({f"t{at}": always(cap=cap, weight=cap) for at, cap in enumerate(caps)}, seed=seed)
    node.run(20.0)
    for at, cap in enumerate(caps):
        assert node.on_s(f"t{at}", 1.0) / 19 * 100 == pytest.approx(cap, abs=0.5), (caps, at)


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(5, 95), st.floats(0.005, 0.2), st.floats(0.001, 0.3), st.integers(0, 9))
def test_no_second_gives_more_than_the_cap_and_what_may_be_saved_up(
    cap: int, period: float, work: float, seed: int
) -> None:
    node = Node({"a": requests(STANDARD, period, work, 10.0, cap), "b": always(BE)}, seed=seed)
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


def test_a_gang_gives_cause_to_decide_anew_on_each_of_its_gpus() -> None:
    scheduler = scheduler_with(a=container(cap=20, gpus="01"), b=container(gpus="2"))
    for name in "ab":
        scheduler.apply(Work(0.0, name))
    decided = scheduler.decide(0.01)
    assert decided.again_s["0"] == decided.again_s["1"] == decided.decide_again_s
    assert decided.again_s["2"] > decided.decide_again_s, "nobody wakes up for another GPU's container"


def test_credit_saved_up_in_idleness_is_three_frames_and_no_more() -> None:
    node = Node({"a": Program(container(cap=20), requests=[(8.0, 100.0)])})
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
    node = Node({"a": always(cap=100, weight=100)})
    node.run(5.0)
    assert node.scheduler.usage("a").suspends == 0


def test_who_requested_no_cap_uses_what_the_capped_leaves() -> None:
    node = Node({"capped": always(cap=30, weight=30), "free": always(weight=70)})
    node.run(10.0)
    assert node.on_s("capped") / 10 == pytest.approx(0.30, abs=0.005)
    assert node.on_s("free") / 10 > 0.64, "what is left but for the switches"


# -- pace ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cap", "pace"), [(10, 0.05), (10, 0.2), (30, 0.5), (50, 0.9), (30, 1.0), (10, 0.0)])
def test_time_is_paid_for_at_its_pace(cap: int, pace: float) -> None:
    """So a cap limits what it was seen to compute, and leaves on who computes less."""
    node = Node({"a": Program(replace(container(cap=cap, weight=cap), pace=pace), always=True)})
    node.run(20.0)
    assert node.on_s("a") / 20 * pace * 100 == pytest.approx(min(cap, pace * 100), abs=0.5)
    if pace * 100 <= cap:
        assert node.scheduler.usage("a").suspends == 0


def test_a_pace_is_no_way_to_more_than_a_part_of_a_gpu_that_is_shared() -> None:
    scheduler = scheduler_with(a=Container(frozenset("0"), STANDARD, 2, 0, 1.0, 0.7), b=container(), c=container())
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
    node = Node({name: always() for name in "abc"})
    node.run(3.0)
    assert [node.scheduler.usage(name).suspends for name in "abc"] == [0, 0, 0]
    assert node.on_s("a") == pytest.approx(1.0)


@settings(max_examples=examples(12), deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 5, 8]), min_size=2, max_size=5).filter(lambda ws: len(set(ws)) > 1))
def test_equals_with_weights_get_time_in_proportion(weights: list[int]) -> None:
    node = Node({f"t{at}": always(weight=weight) for at, weight in enumerate(weights)})
    node.run(20.0)
    got = [node.on_s(f"t{at}") for at in range(len(weights))]
    assert sum(got) > 20 * 0.80
    for weight, seconds in zip(weights, got, strict=True):
        assert seconds / sum(got) == pytest.approx(weight / sum(weights), abs=0.02)


def test_idleness_earns_no_right_to_be_first() -> None:
    late = Program(container(weight=2), requests=[(10.0, 100.0)])
    node = Node({"early": always(weight=1), "late": late})
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
    node = Node({"lc": requests(LC, 0.010, 0.000250, 5.0), "be": always(BE)})
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
def test_nobody_with_work_starves_under_more_urgent_work(service_class: str, starving: int) -> None:
    programs = {"urgent": always(service_class)} | {f"be{at}": always(BE) for at in range(starving)}
    node = Node(programs)
    node.run(12.0)
    for at in range(starving):
        spans = [(a, b) for a, b, _ in node.spans[f"be{at}"]]
        gaps = [b - a for (_, a), (b, _) in pairwise([(0.0, 0.0), *spans, (12.0, 12.0)])]
        assert max(gaps) < 1.0 + starving * 0.025
    assert node.on_s("urgent") > 12 * (1 - 0.03 * starving)


# -- several GPUs ------------------------------------------------------------------------------------------------------------


def test_a_gang_is_on_with_all_its_gpus_and_nobody_else_is_on_any_of_them() -> None:
    node = Node({"gang": always(gpus="01"), "a": always(gpus="0"), "b": always(gpus="1")})
    node.run(5.0)
    for _, decision in node.decisions:
        assert decision.on in ({"gang"}, {"a", "b"}, {"a"}, {"b"})
    assert node.on_s("gang") == pytest.approx(2.5, abs=0.15)
    for name in "ab":
        assert node.on_s(name) > 2.2, "a GPU that the gang does not have is not left empty"


def test_a_gang_is_not_starved_by_containers_whose_turns_end_at_different_times() -> None:
    node = Node(
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

NAMES = ("a", "b", "c", "d")
containers = st.builds(
    Container,
    st.sampled_from([frozenset("0"), frozenset("1"), frozenset("01")]),
    st.sampled_from([LC, STANDARD, BE]),
    st.integers(0, 4),
    st.sampled_from([0, 10, 30, 100]),
    st.sampled_from([1.0, 3.0]),
)
happenings = st.lists(
    st.tuples(
        st.floats(0.0, 0.1),
        st.sampled_from(NAMES),
        st.sampled_from(["join", "leave", "work", "idle", "hint", "begin", "end", "obey"]),
        containers,
    ),
    max_size=60,
)


Happening = tuple[float, str, str, Container]


class Restless(GpuTimeScheduler):
    """The obvious slow version: every container is looked at every time."""

    def _let_rest(self) -> None:
        pass


def play(
    list_: list[Happening], scheduler: GpuTimeScheduler | None = None
) -> tuple[GpuTimeScheduler, list[Event], list[str], float]:
    """Applies what happens; `obey` switches everybody as decided. Returns the decisions as text too."""
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
        else:
            kind = {"work": Work, "idle": Idle, "begin": Begin, "end": End}.get(what)
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
    here: dict[str, Container] = {}
    for event in events:
        if isinstance(event, Join):
            here[event.name] = event.container
        elif isinstance(event, Leave):
            here.pop(event.name, None)
    decision = scheduler.decide(now_s)
    assert decision.on <= here.keys()
    assert decision.decide_again_s > now_s
    assert decision.why.keys() == here.keys()
    may_run = {name for name, why in decision.why.items() if why not in ("idle", "no credit")}
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
def test_who_rests_is_decided_on_and_counted_as_if_he_were_looked_at_every_time(list_: list[Happening]) -> None:
    one, _, decisions, now_s = play(list_)
    other, _, slowly, _ = play(list_, Restless())
    assert decisions == slowly
    for name in one.decide(now_s).why:
        assert one.usage(name) == other.usage(name)
        assert one.credit_s(name) == pytest.approx(other.credit_s(name))


@given(happenings, st.sampled_from(NAMES), st.sampled_from([Work, Begin]), st.floats(0.0, 3.0), st.booleans())
def test_who_is_said_to_give_way_goes_when_the_work_comes(
    list_: list[Happening], name: str, kind: type[Work | Begin], later_s: float, requested: bool
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


def test_nobody_is_said_to_give_way_who_has_a_slice_against_starvation() -> None:
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


def test_nobody_is_said_to_give_way_for_what_is_over_without_an_event() -> None:
    """The grace after his last work: nothing tells when it ends."""
    scheduler = scheduler_with(lc=container(LC, level=1), less=container(LC, level=3))
    scheduler.apply(Work(0.0, "less"))
    scheduler.apply(Idle(0.001, "less"))
    assert scheduler.decide(0.0011).why["less"] != "idle"
    assert scheduler.gives_way("lc") == []


def test_who_ends_his_work_while_he_is_off_stays_off_until_the_gpu_is_free() -> None:
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


def test_who_has_no_work_and_no_credit_stays_off_until_it_has_some() -> None:
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


def test_everybody_less_urgent_with_work_on_the_gpu_gives_way() -> None:
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
    assert scheduler.gives_way("std") == scheduler.gives_way("nobody") == [], "it works already; it is not here"


@given(happenings)
def test_a_trace_written_down_and_replayed_makes_the_same_decisions(
    list_: list[Happening],
) -> None:
    one, events, _, now_s = play(list_)
    other = GpuTimeScheduler()
    for event in from_lines(to_lines(events)):
        other.apply(event)
    assert other.decide(now_s).on == one.decide(now_s).on


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
    assert Settings().quantum_least_s > 5 * Settings().suspend_s
