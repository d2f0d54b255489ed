"""Victims against the obvious slow version: every set of pods on every node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.fleet import Fleet
from vgpu.grant import Slice
from vgpu.holder import UNSTARTED, Holder
from vgpu.inventory import Card, Inventory, MigInstance
from vgpu.node_search import Eviction
from vgpu.node_view import NodeView
from vgpu.placement import Placement, place
from vgpu.preemption import least_eviction
from vgpu.request import Ask, PodAsk
from vgpu.victim_bounds import Rules, Terms, is_sum_of_one_card, lower_bounds
from vgpu.victim_sets import EXACT

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
    return least_eviction(ask, list(nodes), views(nodes, holders).get, rules)


def views(nodes: Mapping[str, int], holders: Mapping[str, Sequence[Holder]]) -> dict[str, NodeView]:
    return {name: NodeView(name, inventory(name, cards), holders.get(name, ())) for name, cards in nodes.items()}


def names_of(found: Eviction | None) -> tuple[str, ...] | None:
    return None if found is None else found.victims


# --- the slow version ---


def slow_cost(node: str, some: Sequence[Holder]) -> tuple[object, ...]:
    over = 0
    for budget in {name for one in some for name in one.budgets}:
        over += max(0, sum(budget in one.budgets for one in some) - HEADROOM.get(budget, 0))
    critical = sum(one.klass == "latency-critical" for one in some)
    standard = sum(one.klass == "standard" for one in some)
    highest = max([one.priority for one in some], default=-(2**31))
    ages = tuple(-one.started for one in sorted(some, key=lambda one: one.started))
    return over, critical, standard, highest, len(some), ages, node, tuple(sorted(one.uid for one in some))


def slow_frees(name: str, some: Sequence[Holder], rules: Rules) -> bool:
    terms = rules.on(name)
    freed = {resource: sum(one.requests.get(resource, 0) for one in some) for resource in terms.frees}
    return terms.must_go <= {one.uid for one in some} and all(freed[one] >= terms.frees[one] for one in terms.frees)


def slow(
    nodes: Mapping[str, int], holders: Mapping[str, Sequence[Holder]], ask: PodAsk, rules: Rules
) -> tuple[object, ...] | None:
    found = [best for name in nodes if (best := slow_on(name, nodes, holders, ask, rules)) is not None]
    return min((one for one in found if one[7] or rules.may_be_nobody), default=None)


def slow_on(
    name: str, nodes: Mapping[str, int], holders: Mapping[str, Sequence[Holder]], ask: PodAsk, rules: Rules
) -> tuple[object, ...] | None:
    best, terms = None, rules.on(name)
    may_go = [
        one for one in holders[name] if one.priority < rules.priority and not one.spared and one.uid not in terms.aside
    ]
    for size in range(len(may_go) + 1):
        for some in combinations(may_go, size):
            gone = frozenset(one.uid for one in some) | terms.aside
            if slow_frees(name, some, rules) and isinstance(
                place(fleet_of(nodes, holders, gone), ask, [name]), Placement
            ):
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
                    draw(st.sampled_from([UNSTARTED, 10, 20, 30])),
                    draw(st.sampled_from([frozenset(), frozenset({"tight"}), frozenset({"one"}), frozenset({"tight", "one"})])),
                    draw(st.integers(0, 5)) == 0,
                    {"cpu": draw(st.integers(0, 3))},
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


@st.composite
def terms(draw: st.DrawFn) -> Terms:
    uids = st.frozensets(st.sampled_from([f"p{at}" for at in range(6)]), max_size=2)
    must_go = draw(st.one_of(st.just(frozenset[str]()), uids))
    return Terms(must_go, draw(st.sampled_from([{}, {}, {"cpu": 2}, {"cpu": 4}])), draw(uids) - must_go)


@settings(max_examples=examples(400), deadline=None)
@given(clusters(), asks, st.integers(0, 4), st.booleans(), terms(), st.booleans())
def test_the_least_set_is_the_least_of_all_sets(
    cluster: tuple[dict[str, int], dict[str, list[Holder]]],
    ask: PodAsk,
    priority: int,
    violate: bool,
    on_n0: Terms,
    may_be_nobody: bool,
) -> None:
    nodes, holders = cluster
    rules = Rules(priority, HEADROOM, violate, {"n0": on_n0}, may_be_nobody)
    if on_n0.frees and is_sum_of_one_card(ask):
        for one in holders["n0"]:  # which pods of other cards join is not the least choice: here all lie on one
            assume(all(piece.index == 0 for piece in one.held))
        assume(nodes["n0"] == 1)
    found, best = least(nodes, holders, ask, rules), slow(nodes, holders, ask, rules)
    for bound, view in lower_bounds(list(views(nodes, holders).values()), ask, rules, {}):
        alone = slow({view.name: nodes[view.name]}, {view.name: holders[view.name]}, ask, rules)
        assert alone is None or bound <= alone[:7], "a bound is never above the cost"
    bounded = {view.name for _, view in lower_bounds(list(views(nodes, holders).values()), ask, rules, {})}
    if best is None:
        assert found is None
    else:
        assert found is not None
        assert (found.violations, found.node, found.victims) == (best[0], best[6], best[7])
        assert found.cost == best
        assert found.node in bounded
        left = fleet_of(nodes, holders, frozenset(found.victims) | rules.on(found.node).aside)
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
        ({"started": 20260102}, {"started": 20260101}),
        ({"started": UNSTARTED}, {"started": 20260101}),
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
    rules = Rules(10, terms={"n": Terms(must_go=frozenset("b"))})
    assert names_of(least({"n": 2}, holders, share(50), rules)) == ("b",)
    rules = Rules(10, terms={"n": Terms(must_go=frozenset("c"))})
    assert least({"n": 2}, holders, share(50), rules) is None, "nobody of that name is there"


def test_a_mig_instance_is_taken_from_who_has_it() -> None:
    instances = tuple(MigInstance(f"m{at}", "1g.10gb", 10, at, 0) for at in range(2))
    held = [Slice(f"m{at}", 0, 10, 100, "mig", "1g.10gb") for at in range(2)]
    there = Inventory((Card("c", 0, "a100", 80, mig=True, instances=instances),))
    view = NodeView("n", there, [holder("a", held[0], priority=2), holder("b", held[1], priority=1)])
    ask = PodAsk((Ask("main", "mig", 1, profile="1g.10gb"),))
    found = least_eviction(ask, ["n", "no-such-node"], {"n": view}.get, Rules(10))
    assert names_of(found) == ("b",)
