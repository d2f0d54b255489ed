"""Containers that may use more GPU time than their guarantee, where no other container needs it."""

from __future__ import annotations

from math import inf

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
    bursting,
    container,
    looping,
    scheduler_with,
)
from tests.unit.vgpu.gputime.test_scheduler_properties import Happening, happenings, play
from vgpu.api.errors import BadDocument
from vgpu.gputime.container_state import ABOVE
from vgpu.gputime.events import (
    BeginSection,
    Block,
    Hint,
    Idle,
    Join,
    Late,
    SchedulingParameters,
    Stalled,
    Switched,
    Unblock,
    Work,
)

RUN_S, SETTLED_S = 20.0, 1.0


def busy(*parameters: SchedulingParameters, seed: int = 0) -> SimulatedNode:
    """Containers t0, t1 ... with endless work, after `RUN_S`."""
    node = SimulatedNode({f"t{at}": Program(one, always=True) for at, one in enumerate(parameters)}, seed=seed)
    node.run(RUN_S)
    return node


def percents(node: SimulatedNode) -> list[float]:
    """What each got of the GPU's time, after the first second."""
    return [node.on_s(name, SETTLED_S) / (RUN_S - SETTLED_S) * 100 for name in node.programs]


def fair(parameters: list[SchedulingParameters], used: float) -> list[float]:
    """The obvious slow version: of `used` percent each has its guarantee, and a point at a time goes to the one with the least above it for its weight."""
    got = [one.guaranteed_percent for one in parameters]
    for _ in range(int((used - sum(got)) * 100)):
        below = [at for at, one in enumerate(parameters) if got[at] + 0.01 <= one.cap_percent]
        if not below:
            break
        got[min(below, key=lambda at: (got[at] - parameters[at].guaranteed_percent) / parameters[at].weight)] += 0.01
    return got


@st.composite
def mixtures(draw: st.DrawFn, most: int = 90) -> list[SchedulingParameters]:
    """Containers of one GPU, some of which burst; guarantees of at most `most` percent in all leave time for switches."""
    guarantees = draw(st.lists(st.integers(5, 60), min_size=2, max_size=4).filter(lambda them: sum(them) <= most))
    made = []
    for guaranteed in guarantees:
        limit = draw(st.sampled_from([guaranteed, min(100, guaranteed + 20), 100]))
        one = bursting(guaranteed, limit, draw(st.sampled_from([LC, STANDARD, BE])), level=draw(st.integers(0, 4)))
        made.append(one if limit > guaranteed else replace(one, guaranteed_percent=0.0))
    return made


@pytest.mark.parametrize(("guaranteed", "limit"), [(30, 100), (30, 60), (10, 50), (1, 40), (1, 100), (95, 100)])
def test_an_idle_gpu_gives_one_container_its_limit(guaranteed: int, limit: int) -> None:
    node = busy(bursting(guaranteed, limit))
    assert percents(node) == [pytest.approx(limit, abs=0.5)]
    assert limit < 100 or node.scheduler.usage("t0").suspends == 0


@settings(max_examples=examples(25), deadline=None)
@given(mixtures(), st.integers(0, 9))
def test_each_has_its_guarantee_and_none_more_than_its_limit_whatever_bursts_others_have(
    parameters: list[SchedulingParameters], seed: int
) -> None:
    got = percents(busy(*parameters, seed=seed))
    for percent, one in zip(got, parameters, strict=True):
        assert percent > (one.guaranteed_percent or one.cap_percent) - 0.5, (got, parameters)
        assert percent < one.cap_percent + 0.5, (got, parameters)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.tuples(st.integers(5, 30), st.sampled_from([40, 60, 100])), min_size=2, max_size=3), st.integers(0, 9)
)
def test_what_no_guarantee_needs_is_shared_by_weight_up_to_the_limits(bursts: list[tuple[int, int]], seed: int) -> None:
    parameters = [bursting(guaranteed, limit) for guaranteed, limit in bursts]
    got = percents(busy(*parameters, seed=seed))
    assert sum(got) > min(85, sum(one.cap_percent for one in parameters) - 1), "the rest are switches"
    assert got == pytest.approx(fair(parameters, sum(got)), abs=3), parameters


@pytest.mark.parametrize("service_class", [LC, STANDARD, BE])
def test_a_busy_neighbour_has_the_rest_to_itself(service_class: str) -> None:
    capped, burst = percents(busy(always(cap=60, weight=60).container, bursting(30, 100, service_class)))
    assert capped == pytest.approx(60, abs=0.5)
    assert 30 < burst < 40


@pytest.mark.parametrize("seed", range(3))
def test_guarantees_of_the_whole_gpu_lose_only_what_switches_cost(seed: int) -> None:
    few, many = percents(busy(bursting(30), container(cap=70, weight=70), seed=seed))
    before = percents(busy(container(cap=30, weight=30), container(cap=70, weight=70), seed=seed))
    assert [few, many] == pytest.approx(before, abs=1)
    assert few / (few + many) == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("level", [2, 4])
def test_above_its_guarantee_a_latency_critical_container_comes_after_a_best_effort_one_without_a_cap(
    level: int,
) -> None:
    urgent, free = percents(busy(bursting(30, 100, LC), container(BE, level=level, weight=100)))
    assert urgent == pytest.approx(30, abs=0.5)
    assert free > 64


def test_a_neighbour_that_comes_after_a_long_burst_finds_its_guarantee_untouched() -> None:
    """A burst leaves no debt, and gives others no claim against the guarantee."""
    late = Program(container(weight=30), requests=[(10.0, 100.0)])
    node = SimulatedNode({"burst": Program(bursting(30), always=True), "late": late})
    node.run(20.0)
    assert node.on_s("burst", 0.0, 10.0) == pytest.approx(10.0)
    for since_s in range(11, 20):
        assert node.on_s("burst", since_s, since_s + 1) == pytest.approx(0.3, abs=0.06), (
            "its guarantee, by equal weights"
        )


def test_a_burst_gives_a_newcomer_no_claim_to_the_guarantee() -> None:
    """It begins as far as the least served of those there, and that is not the one that bursts."""
    late = Program(container(weight=30), requests=[(10.0, 100.0)])
    node = SimulatedNode({"burst": Program(bursting(30), always=True), "few": always(cap=10, weight=10), "late": late})
    node.run(13.0)
    for since_s in (10, 11, 12):
        assert node.on_s("burst", since_s, since_s + 1) > 0.24


@pytest.mark.parametrize("pause_s", [0.0001, 0.0003])
def test_a_neighbour_that_waits_for_each_kernel_is_not_suspended_for_its_pauses(pause_s: float) -> None:
    node = SimulatedNode({"loop": looping(60, pause_s), "burst": Program(bursting(30), always=True)})
    node.run(RUN_S)
    before = SimulatedNode({"loop": looping(60, pause_s), "capped": always(cap=30, weight=30)})
    before.run(RUN_S)
    least_s = before.on_s("loop") * 0.98
    assert least_s < node.on_s("loop") < 0.605 * RUN_S, "no less than beside one that may not burst, and its cap"
    assert node.scheduler.usage("loop").suspends < 25 * RUN_S


def test_a_pause_is_kept_without_paying_until_more_work_is_announced() -> None:
    scheduler = scheduler_with(a=container(cap=60), b=bursting(10))
    scheduler.apply(Work(0.0, "b"))
    scheduler.decide(0.0)
    scheduler.decide(0.02)
    scheduler.apply(Work(0.02, "a"))
    assert scheduler.decide(0.02).on == {"a"}
    scheduler.apply(Switched(0.02, "b", on=False, took_s=0.0))
    scheduler.apply(Idle(0.03, "a"))
    assert scheduler.decide(0.03).on == {"a"}
    ran_s = scheduler.usage("a").on_s
    scheduler.decide(0.0302)
    assert scheduler.usage("a").on_s == ran_s
    scheduler.apply(BeginSection(0.0302, "a"))
    scheduler.decide(0.0402)
    assert scheduler.usage("a").on_s == pytest.approx(ran_s + 0.01)


def test_work_with_a_claim_preempts_a_burst_at_once_and_with_one_suspend() -> None:
    scheduler = scheduler_with(a=bursting(30, service_class=LC, level=0), b=container(BE, level=4, cap=10))
    scheduler.apply(Work(0.0, "a"))
    assert scheduler.decide(0.0).why["a"] == "slice"
    assert scheduler.decide(1.0).why["a"] == "burst"
    scheduler.apply(Work(1.0, "b"))
    decision = scheduler.decide(1.0)
    assert (decision.on, decision.why) == ({"b"}, {"a": "waits", "b": "slice"})


def test_a_container_above_its_guarantee_waits_as_long_as_others_need() -> None:
    """The slice against starvation is for those with a claim. This one repays work that it did past the arbiter."""
    scheduler = scheduler_with(a=bursting(1), free=container(BE))
    for name in ("a", "free"):
        scheduler.apply(Work(60.0, name))
    scheduler.apply(Switched(60.0, "a", on=False, took_s=0.0))
    scheduler.apply(Late(60.0, "a", 50.0))
    for at_s in range(60, 74):
        assert scheduler.decide(at_s).why == {"a": "waits", "free": "shares"}
    scheduler.apply(Idle(74.0, "free"))
    assert scheduler.decide(74.01).why["a"] == "burst", "after a pause of the other"


@pytest.mark.parametrize("announce", [lambda at_s: BeginSection(at_s, "a"), lambda at_s: Hint(at_s, "a", 0.001)])
def test_an_announcement_above_the_guarantee_has_no_priority(announce) -> None:
    scheduler = scheduler_with(a=bursting(10, service_class=LC), b=container(BE))
    scheduler.apply(Work(0.0, "a"))
    scheduler.decide(0.0)
    scheduler.decide(0.1)
    scheduler.apply(Work(0.1, "b"))
    scheduler.apply(Switched(0.1, "a", on=False, took_s=0.0))
    scheduler.apply(Idle(0.1, "a"))
    scheduler.apply(Late(0.1, "a", 0.1))
    scheduler.apply(announce(0.1))
    assert scheduler.decide(0.1001).on == {"b"}


def test_it_has_no_grace_above_its_guarantee() -> None:
    scheduler = scheduler_with(a=bursting(10, service_class=LC), b=bursting(10))
    scheduler.apply(Work(0.0, "a"))
    scheduler.decide(0.0)
    assert scheduler.decide(0.02).why["a"] == "burst"
    scheduler.apply(Idle(0.021, "a"))
    assert scheduler.decide(0.021).why["a"] == "idle"


def test_a_stall_costs_three_frames_of_the_guarantee_at_most_and_nothing_above_it() -> None:
    scheduler = scheduler_with(a=bursting(10))
    scheduler.apply(Work(0.0, "a"))
    scheduler.decide(0.0)
    scheduler.apply(Stalled(9.0, "0", 0.001))
    assert scheduler._states["a"].guarantee.credit_s == pytest.approx(-0.1 * 0.05 * 3)
    scheduler = scheduler_with(a=bursting(10))
    scheduler.apply(Work(0.0, "a"))
    scheduler.decide(0.0)
    assert scheduler.decide(0.02).why["a"] == "burst"
    credit_s = scheduler._states["a"].guarantee.credit_s
    scheduler.apply(Stalled(9.0, "0", 0.02))
    assert scheduler._states["a"].guarantee.credit_s >= credit_s
    assert scheduler._states["a"].guarantee.served == pytest.approx(0.0)


def test_work_past_the_arbiter_is_paid_from_the_guarantee_too_three_frames_at_most() -> None:
    scheduler = scheduler_with(a=bursting(20, 50))
    scheduler.apply(Late(60.0, "a", 50.0))
    assert scheduler._states["a"].guarantee.credit_s == pytest.approx(0.03 - 0.15)
    assert scheduler.credit_s("a") == pytest.approx(0.075 - 0.15)
    for at in range(1, 50):
        scheduler.apply(Late(60.0 + at / 10, "a", 0.1))
    assert scheduler._states["a"].guarantee.credit_s == pytest.approx(-0.15)


def test_after_a_block_it_has_no_claim_to_the_bursts_of_others() -> None:
    node = SimulatedNode({name: Program(bursting(10), always=True) for name in "ab"})
    node.run(1.0)
    node._report(Block(node.now_s, "a"))
    node.run(11.0)
    assert node.on_s("a", 1.01, 11.0) == 0
    assert node.on_s("b", 1.01, 11.0) == pytest.approx(9.99, abs=0.02)
    node._report(Unblock(node.now_s, "a"))
    node.run(13.0)
    assert node.on_s("a", 11.0, 13.0) == pytest.approx(1.0, abs=0.2)


def test_a_container_that_comes_after_idleness_has_no_claim_to_the_bursts_of_others() -> None:
    late = Program(bursting(10), requests=[(10.0, 100.0)])
    node = SimulatedNode({"early": Program(bursting(10), always=True), "late": late})
    node.run(12.0)
    assert node.on_s("early", 10.0, 12.0) == pytest.approx(1.0, abs=0.2)


def test_a_burst_that_is_edited_while_it_runs_takes_effect_and_forgives_nothing() -> None:
    node = SimulatedNode({"a": always(cap=20, weight=20), "b": Program(bursting(20), always=True)})
    node.run(5.0)
    assert node.on_s("a", 1.0, 5.0) / 4 == pytest.approx(0.2, abs=0.01)
    node._report(Join(node.now_s, "a", bursting(20)))
    node.run(9.0)
    assert node.on_s("a", 5.2, 9.0) / 3.8 == pytest.approx(0.47, abs=0.05), "no more than the other, from now on"
    node._report(Join(node.now_s, "a", container(cap=20, weight=20)))
    node.run(13.0)
    assert node.on_s("a", 9.0, 13.0) / 4 == pytest.approx(0.2, abs=0.012)


def test_a_debt_outlives_a_change_of_the_burst() -> None:
    scheduler = scheduler_with(a=container(cap=20))
    scheduler.apply(Late(60.0, "a", 50.0))
    for parameters in (bursting(20), bursting(20, 50), bursting(20)):
        scheduler.apply(Join(60.0, "a", parameters))
    scheduler.decide(60.2)
    assert scheduler.credit_s("a") == pytest.approx(0.03 - 0.15 + 0.2), "of the limit"
    scheduler.apply(Join(60.2, "a", container(cap=20)))
    assert scheduler.credit_s("a") == pytest.approx(0.03 - 0.15 + 0.04), "of the guarantee"


def test_an_idle_container_earns_the_whole_credit_of_its_guarantee() -> None:
    scheduler = scheduler_with(a=bursting(30))
    scheduler.apply(Work(0.0, "a"))
    scheduler.decide(0.0)
    assert scheduler.decide(0.0205).why["a"] == "burst"
    scheduler.apply(Idle(0.0205, "a"))
    for at_s in (0.13, 0.14, 1.0):  # the credit of its limit is full first
        scheduler.decide(at_s)
    assert scheduler._states["a"].guarantee.credit_s == pytest.approx(0.3 * 0.05 * 3)


def test_a_guarantee_that_earns_less_than_a_switch_in_a_frame_is_kept_too() -> None:
    least, free = percents(busy(bursting(1), container(BE, weight=100)))
    assert least == pytest.approx(1, abs=0.5)
    assert free > 95


def test_no_container_is_named_to_give_way_that_may_have_its_guarantee_again_by_then() -> None:
    scheduler = scheduler_with(
        a=bursting(30, service_class=LC, level=0), lc=container(LC), be=bursting(30, service_class=BE)
    )
    scheduler.apply(Work(0.0, "be"))
    scheduler.decide(0.0)
    assert scheduler.decide(1.0).why["be"] == "burst"
    assert scheduler.gives_way("lc") == ["be"]
    scheduler.apply(Work(1.0, "a"))
    scheduler.decide(1.0)
    scheduler.apply(Switched(1.0, "be", on=False, took_s=0.0006))
    assert scheduler.decide(2.0).why["a"] == "burst"
    assert scheduler.gives_way("lc") == []


@given(st.integers(-1, 101), st.integers(0, 100))
def test_a_guarantee_is_no_more_than_the_cap(guaranteed: int, cap: int) -> None:
    if 0 <= guaranteed <= cap:
        assert replace(container(cap=cap), guaranteed_percent=guaranteed).bursts is (0 < guaranteed < cap)
    else:
        with pytest.raises(BadDocument, match="guarantee"):
            replace(container(cap=cap), guaranteed_percent=guaranteed)


@given(happenings)
def test_a_guarantee_as_large_as_the_cap_decides_as_none(list_: list[Happening]) -> None:
    def without(guaranteed: bool) -> list[Happening]:
        return [
            (pause_s, name, what, replace(one, guaranteed_percent=one.cap_percent if guaranteed else 0.0))
            for pause_s, name, what, one in list_
        ]

    assert play(without(True))[2] == play(without(False))[2]


@given(happenings)
def test_containers_above_their_guarantees_delay_no_other(list_: list[Happening]) -> None:
    """None runs on a GPU that a container with a claim waits for, unless that waits for another GPU too."""
    scheduler, events, _, now_s = play(list_)
    here: dict[str, SchedulingParameters] = {}
    for event in events:
        if isinstance(event, Join):
            here[event.name] = event.container
    decision = scheduler.decide(now_s)
    burst_gpus = {gpu for name, why in decision.why.items() if why == "burst" for gpu in here[name].gpus}
    for name, why in decision.why.items():
        if why == "waits" and scheduler._states[name].urgency < ABOVE:
            assert len(here[name].gpus) > 1 or burst_gpus.isdisjoint(here[name].gpus)
    assert decision.decide_again_s > now_s or decision.decide_again_s == inf
