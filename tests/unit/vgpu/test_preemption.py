"""Victims against the obvious slow version: every set of pods on every node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.fleet import Fleet
from vgpu.grant import Slice
from vgpu.inventory import Card, Inventory, MigInstance
from vgpu.placement import Placement, place
from vgpu.preemption import EXACT, Eviction, Holder, Rules, victims
from vgpu.request import Ask, PodAsk

HEADROOM = {"tight": 0, "one": 1}
RANK = {"latency-critical": 0, "standard": 1, "best-effort": 2}


def piece(node: str, row: int, mib: int, percent: int = 0) -> Slice:
    return Slice(f"{node}-{row}", row, mib, percent)


def holder(uid: str, *held: Slice, priority: int = 0, klass: str = "standard", **more: object) -> Holder:
    return Holder(uid, held, priority, klass, **more)  # type: ignore[arg-type]


def share(mib: int, percent: int = 0, cards: int = 1) -> PodAsk:
    return PodAsk((Ask("main", "share", cards, units=mib, mib=mib, core_percent=percent),))


def whole(cards: int) -> PodAsk:
    return PodAsk((Ask("main", "whole", cards, core_percent=100),))


def inventory(node: str, cards: int, mib: int = 100) -> Inventory:
    return Inventory(tuple(Card(f"{node}-{row}", row, "t4", mib) for row in range(cards)))


def fleet_of(
    nodes: Mapping[str, int], holders: Mapping[str, Sequence[Holder]], gone: frozenset[str] = frozenset()
) -> Fleet:
    fleet = Fleet()
    for name, cards in nodes.items():
        stay = [held for one in holders.get(name, ()) if one.uid not in gone for held in one.held]
        fleet.set_node(name, inventory(name, cards), stay)
    return fleet


def least(
    nodes: Mapping[str, int], holders: Mapping[str, Sequence[Holder]], ask: PodAsk, rules: Rules
) -> Eviction | None:
    return victims(fleet_of(nodes, holders), ask, list(nodes), holders, rules)


def names_of(found: Eviction | None) -> tuple[str, ...] | None:
    return None if found is None else found.victims


# --- the slow version ---


def slow_cost(node: str, some: Sequence[Holder]) -> tuple[object, ...]:
    over = 0
    for budget in {name for one in some for name in one.budgets}:
        over += max(0, sum(budget in one.budgets for one in some) - HEADROOM.get(budget, 0))
    critical = sum(one.klass == "latency-critical" for one in some)
    standard = sum(one.klass == "standard" for one in some)
    highest = max([one.priority for one in some], default=-999)
    ages = tuple(-int(one.started or "99") for one in sorted(some, key=lambda one: int(one.started or "99")))
    return over, critical, standard, highest, len(some), ages, node, tuple(sorted(one.uid for one in some))


def slow(
    nodes: Mapping[str, int], holders: Mapping[str, Sequence[Holder]], ask: PodAsk, rules: Rules
) -> tuple[object, ...] | None:
    best = None
    for name in nodes:
        may_go = [one for one in holders[name] if one.priority < rules.priority and not one.spared]
        for size in range(len(may_go) + 1):
            for some in combinations(may_go, size):
                gone = frozenset(one.uid for one in some)
                if isinstance(place(fleet_of(nodes, holders, gone), ask, [name]), Placement):
                    cost = slow_cost(name, some)
                    if (rules.violate or not cost[0]) and (best is None or cost < best):
                        best = cost
    return best


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, list[Holder]]]:
    nodes = {f"n{at}": draw(st.integers(1, 3)) for at in range(draw(st.integers(1, 2)))}
    holders: dict[str, list[Holder]] = {name: [] for name in nodes}
    for at in range(draw(st.integers(0, 6))):
        name = draw(st.sampled_from(sorted(nodes)))
        asked = share(draw(st.integers(1, 6)) * 10, draw(st.sampled_from([0, 30, 60])), draw(st.integers(1, 2)))
        found = place(fleet_of(nodes, holders), asked, [name])
        if isinstance(found, Placement):
            holders[name].append(
                Holder(
                    f"p{at}", found.assignment.held(), draw(st.integers(0, 3)), draw(st.sampled_from(sorted(RANK))),
                    draw(st.sampled_from(["", "10", "20", "30"])),
                    draw(st.sampled_from([frozenset(), frozenset({"tight"}), frozenset({"one"}), frozenset({"tight", "one"})])),
                    draw(st.integers(0, 5)) == 0,
                )
            )  # fmt: skip
    return nodes, holders


asks = st.one_of(
    st.builds(share, st.integers(1, 10).map(lambda tens: 10 * tens), st.sampled_from([0, 50, 100]), st.integers(1, 2)),
    st.builds(whole, st.integers(1, 2)),
    st.builds(
        lambda one, two: PodAsk((Ask("a", "share", 1, mib=one, units=one), Ask("b", "share", 1, mib=two, units=two))),
        st.integers(10, 90), st.integers(10, 90),
    ),
)  # fmt: skip


@settings(max_examples=examples(250), deadline=None)
@given(clusters(), asks, st.integers(0, 4), st.booleans())
def test_the_least_set_is_the_least_of_all_sets(
    cluster: tuple[dict[str, int], dict[str, list[Holder]]], ask: PodAsk, priority: int, violate: bool
) -> None:
    nodes, holders = cluster
    rules = Rules(priority, HEADROOM, violate)
    found, best = least(nodes, holders, ask, rules), slow(nodes, holders, ask, rules)
    if best is None:
        assert found is None
    else:
        assert found is not None
        assert (found.violations, found.node, found.victims) == (best[0], best[6], best[7])
        left = fleet_of(nodes, holders, frozenset(found.victims))
        for taken in found.assignment.held():
            left.debit(found.node, taken)
        assert left.overcommitted() == [], "nobody is evicted for a pod that then does not fit"


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3), st.booleans()), min_size=EXACT + 1, max_size=20),
    st.integers(1, 100),
)
def test_where_there_are_too_many_to_try_them_all_nobody_could_be_spared(
    pods: list[tuple[int, int, bool]], mib: int
) -> None:
    holders: dict[str, list[Holder]] = {"n": []}
    for at, (size, priority, spared) in enumerate(pods):
        if sum(one.held[0].mib for one in holders["n"]) + size <= 100:
            holders["n"].append(holder(f"p{at:02}", piece("n", 0, size), priority=priority, spared=spared))
    ask, rules = share(mib), Rules(3)
    found = least({"n": 1}, holders, ask, rules)
    gone = (
        frozenset(found.victims) if found else frozenset(o.uid for o in holders["n"] if o.priority < 3 and not o.spared)
    )
    fits = isinstance(place(fleet_of({"n": 1}, holders, gone), ask, ["n"]), Placement)
    assert fits == (found is not None)
    for uid in found.victims if found else ():
        kept = fleet_of({"n": 1}, holders, gone - {uid})
        assert not isinstance(place(kept, ask, ["n"]), Placement)


# --- the order, one by one ---


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"budgets": frozenset({"tight"})}),
        ({"klass": "best-effort", "priority": 9}, {"klass": "standard"}),
        ({"klass": "standard", "priority": 9}, {"klass": "latency-critical"}),
        ({"priority": 1}, {"priority": 2}),
        ({"started": "2026-01-02T00:00:00Z"}, {"started": "2026-01-01T00:00:00Z"}),
        ({"started": ""}, {"started": "2026-01-01T00:00:00Z"}),
    ],
)
def test_of_two_pods_the_lesser_goes(first: dict[str, object], second: dict[str, object]) -> None:
    holders = {
        "n": [holder("b", piece("n", 0, 60), **first), holder("a", piece("n", 1, 60), **second)]  # type: ignore[arg-type]
    }
    assert names_of(least({"n": 2}, holders, share(50), Rules(10, HEADROOM))) == ("b",)


def test_fewer_go_rather_than_more() -> None:
    holders = {"n": [holder("a", piece("n", 0, 50)), holder("b", piece("n", 0, 50)), holder("c", piece("n", 1, 100))]}
    assert names_of(least({"n": 2}, holders, share(100), Rules(10))) == ("c",)


@pytest.mark.parametrize("kept", [{"priority": 10}, {"spared": True}])
def test_who_is_not_lower_or_is_spared_stays(kept: dict[str, object]) -> None:
    holders = {"n": [holder("a", piece("n", 0, 60), **kept)]}  # type: ignore[arg-type]
    assert least({"n": 1}, holders, share(50), Rules(10)) is None


def test_a_card_that_is_too_small_when_empty_costs_nobody_his_place() -> None:
    holders = {"n": [holder("a", piece("n", 0, 60))]}
    assert least({"n": 1}, holders, share(101), Rules(10)) is None


def test_a_pod_that_fits_as_it_is_evicts_nobody() -> None:
    holders = {"n": [holder("a", piece("n", 0, 60))]}
    assert names_of(least({"n": 1}, holders, share(40), Rules(10))) == ()


def test_compute_time_is_a_reason_as_memory_is() -> None:
    holders = {"n": [holder("a", piece("n", 0, 10, 60)), holder("b", piece("n", 0, 80))]}
    assert names_of(least({"n": 1}, holders, share(10, 50), Rules(10))) == ("a",)


def test_a_set_must_meet_the_callers_own_condition() -> None:
    holders = {"n": [holder("a", piece("n", 0, 60)), holder("b", piece("n", 1, 60))]}
    rules = Rules(10, suffices=lambda uids: "b" in uids)
    assert names_of(least({"n": 2}, holders, share(50), rules)) == ("b",)


def test_a_mig_instance_is_taken_from_who_has_it() -> None:
    instances = tuple(MigInstance(f"m{at}", "1g.10gb", 10, at, 0) for at in range(2))
    fleet = Fleet()
    held = [Slice(f"m{at}", 0, 10, 100, "mig", "1g.10gb") for at in range(2)]
    fleet.set_node("n", Inventory((Card("c", 0, "a100", 80, mig=True, instances=instances),)), held)
    holders = {"n": [holder("a", held[0], priority=2), holder("b", held[1], priority=1)]}
    ask = PodAsk((Ask("main", "mig", 1, profile="1g.10gb"),))
    found = victims(fleet, ask, ["n", "no-such-node"], holders, Rules(10))
    assert names_of(found) == ("b",)
