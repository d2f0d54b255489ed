"""Placement against the obvious slow version: every node, every way to deal the cards out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.fleet import Fleet
from vgpu.grant import Assignment, Slice
from vgpu.inventory import Card, Inventory, MigInstance
from vgpu.placement import (
    NO_INVENTORY,
    NO_MIG,
    NO_MIG_EVER,
    NO_ROOM,
    NO_WHOLE,
    SWAP_RISK,
    TOO_FEW,
    TOO_LARGE,
    NoRoom,
    Placement,
    explain,
    place,
)
from vgpu.request import Ask, PodAsk


def card(uuid: str, index: int = 0, mib: int = 100, **facts: object) -> Card:
    return Card(uuid, index, str(facts.pop("model", "t4")), mib, **facts)  # type: ignore[arg-type]


def fleet_of(**nodes: list[int]) -> Fleet:
    """Nodes by name, each with the memory of its cards."""
    fleet = Fleet()
    for name, sizes in nodes.items():
        fleet.set_node(name, Inventory(tuple(card(f"{name}-{row}", row, mib) for row, mib in enumerate(sizes))))
    return fleet


def share(name: str, mib: int, percent: int = 0, cards: int = 1, *, init: bool = False) -> Ask:
    return Ask(name, "share", cards, units=mib, mib=mib, core_percent=percent, init=init)


def whole(name: str, cards: int = 1, *, init: bool = False) -> Ask:
    return Ask(name, "whole", cards, core_percent=100, init=init)


def mig(name: str, cards: int = 1, profile: str = "1g.10gb", *, init: bool = False) -> Ask:
    return Ask(name, "mig", cards, profile=profile, init=init)


def mig_node(counts: list[int], first_index: int = 0) -> Inventory:
    cards = []
    for row, count in enumerate(counts):
        instances = tuple(MigInstance(f"m{row}-{i}", "1g.10gb", 10, i, 0) for i in range(count))
        cards.append(card(f"c{row}", first_index + row, mig=True, instances=instances))
    return Inventory(tuple(cards))


def placed(result: Placement | NoRoom) -> Placement:
    assert isinstance(result, Placement), result
    return result


def ways(fleet: Fleet, node: str, ask: PodAsk) -> Iterator[Assignment]:
    """Every assignment of shares and whole GPUs on a node, fitting or not."""
    cards = fleet.inventory[node].cards
    for choice in product(*(combinations(cards, part.cards) for part in ask.containers)):
        yield Assignment(
            {
                part.container: tuple(
                    Slice(c.uuid, c.index, c.mib if part.kind == "whole" else part.mib, part.core_percent, part.kind)
                    for c in chosen
                )
                for part, chosen in zip(ask.containers, choice, strict=True)
            },
            frozenset(part.container for part in ask.containers if part.init),
        )


def holds(fleet: Fleet, node: str, assignment: Assignment) -> bool:
    """Do the node's books stay sound with this assignment?"""
    at = fleet.column[node]
    row_of = {c.uuid: row for row, c in enumerate(fleet.inventory[node].cards)}
    whole_cards = [p.uuid for pieces in assignment.containers.values() for p in pieces if p.kind == "whole"]
    all_cards = [p.uuid for pieces in assignment.containers.values() for p in pieces]
    for piece in assignment.held():
        row = row_of[piece.uuid]
        if not fleet.shareable[row, at]:
            return False
        if piece.uuid in whole_cards:
            if fleet.tenants[row, at] or all_cards.count(piece.uuid) > 1:
                return False
        elif piece.mib > fleet.free_mib[row, at] or piece.core_percent > fleet.free_percent[row, at]:
            return False
    return True


def fits_somehow(fleet: Fleet, node: str, ask: PodAsk) -> bool:
    return any(holds(fleet, node, way) for way in ways(fleet, node, ask))


@st.composite
def used_fleets(draw: st.DrawFn) -> Fleet:
    """Up to three nodes with up to four cards, some in use, some sick, their indices other than their rows."""
    fleet = Fleet()
    for node in draw(st.lists(st.sampled_from(["a", "b", "c"]), unique=True, min_size=1)):
        count = draw(st.integers(0, 4))
        first = draw(st.integers(0, 3))
        cards = [
            card(f"{node}{row}", first + row, draw(st.integers(4, 10)), healthy=draw(st.integers(0, 9)) > 0)
            for row in range(count)
        ]
        held = [
            Slice(c.uuid, c.index, draw(st.integers(1, c.mib)), draw(st.sampled_from([0, 30, 60, 100])))
            for c in cards
            if draw(st.booleans())
        ]
        fleet.set_node(node, Inventory(tuple(cards)), held)
    return fleet


@st.composite
def pods(draw: st.DrawFn) -> PodAsk:
    cards = draw(st.sampled_from([1, 1, 1, 2, 3]))
    parts = []
    for number in range(draw(st.integers(1, 4))):
        if draw(st.integers(0, 4)):
            parts.append(share(f"c{number}", draw(st.integers(1, 7)), draw(st.sampled_from([0, 10, 40, 70])), cards))
        else:
            parts.append(whole(f"c{number}", draw(st.integers(1, 2))))
    return PodAsk(tuple(parts))


@settings(max_examples=examples(300), deadline=None)
@given(used_fleets(), pods())
def test_a_pod_of_up_to_four_containers_fits_exactly_where_some_assignment_fits(fleet: Fleet, ask: PodAsk) -> None:
    nodes = sorted(fleet.column)
    fitting = [node for node in nodes if fits_somehow(fleet, node, ask)]
    assert sorted(set(nodes) - set(explain(fleet, ask, nodes))) == fitting
    result = place(fleet, ask, nodes)
    if not fitting:
        assert isinstance(result, NoRoom)
        assert sorted(result.reasons) == nodes
    else:
        assert placed(result).node in fitting
        assert holds(fleet, placed(result).node, placed(result).assignment)


@settings(max_examples=examples(200), deadline=None)
@given(used_fleets(), st.integers(1, 8), st.sampled_from([0, 20, 50]), st.integers(1, 3))
def test_one_share_goes_to_the_tightest_cards_then_the_fullest_node_then_the_smallest_name(
    fleet: Fleet, mib: int, percent: int, cards: int
) -> None:
    ask = PodAsk((share("main", mib, percent, cards),))
    best: tuple[int, int, str] | None = None
    for node in fleet.column:
        at, found = fleet.column[node], fleet.inventory[node].cards
        usable = [row for row in range(len(found)) if fleet.shareable[row, at]]
        left = sorted(
            int(fleet.free_mib[row, at]) - mib
            for row in usable
            if fleet.free_mib[row, at] >= mib and fleet.free_percent[row, at] >= percent
        )
        if len(left) >= cards:
            score = left[cards - 1], sum(int(fleet.free_mib[row, at]) for row in usable) - mib * cards, node
            best = score if best is None else min(best, score)
    result = place(fleet, ask, sorted(fleet.column, reverse=True))
    assert (result.node if isinstance(result, Placement) else None) == (best[2] if best else None)


@settings(max_examples=examples(100), deadline=None)
@given(used_fleets(), st.lists(pods(), max_size=6))
def test_placing_and_debiting_never_takes_more_than_a_card_has(fleet: Fleet, asks: list[PodAsk]) -> None:
    before = fleet.snapshot()
    given_out = []
    for ask in asks:
        result = place(fleet, ask, list(fleet.column))
        if isinstance(result, Placement):
            for piece in result.assignment.held():
                fleet.debit(result.node, piece)
                given_out.append((result.node, piece))
            assert fleet.overcommitted() == []
    for node, piece in given_out:
        fleet.credit(node, piece)
    for name, array in fleet.snapshot().items():
        assert (array == before[name]).all(), name


@settings(max_examples=examples(150), deadline=None)
@given(
    st.permutations([("s", "sidecar"), ("i", "init"), ("j", "init")]),
    st.lists(st.integers(1, 8), min_size=4, max_size=4),
)
def test_init_containers_and_sidecars_share_a_card_that_holds_their_peak(
    order: list[tuple[str, str]], sizes: list[int]
) -> None:
    kinds = [*order, ("app", "app")]
    ask = PodAsk(tuple(share(name, mib, init=kind == "init") for (name, kind), mib in zip(kinds, sizes, strict=True)))
    running = most = 0
    for (_, kind), mib in zip(kinds, sizes, strict=True):
        most = max(most, running + mib)
        running += 0 if kind == "init" else mib
    assert isinstance(place(fleet_of(n=[most - 1]), ask, ["n"]), NoRoom)
    (piece,) = placed(place(fleet_of(n=[most]), ask, ["n"])).assignment.held()
    assert piece.mib == most


def test_a_pod_that_the_tightest_cards_lead_into_a_corner_is_still_placed() -> None:
    fleet = fleet_of(n=[60, 40])
    ask = PodAsk((share("a", 30), share("b", 40), share("c", 30)))
    assert placed(place(fleet, ask, ["n"])).assignment.held() == (Slice("n-0", 0, 60), Slice("n-1", 1, 40))


def test_compute_rules_a_tight_card_out_and_another_way_is_found() -> None:
    fleet = fleet_of(n=[50, 100])
    fleet.debit("n", Slice("n-0", 0, 1, 60))
    ask = PodAsk((share("big", 49, 10), share("busy", 45, 40), share("also", 45, 60)))
    assert holds(fleet, "n", placed(place(fleet, ask, ["n"])).assignment)


def test_ties_go_to_the_smallest_name_in_whatever_order_the_nodes_come() -> None:
    fleet = fleet_of(b=[10], a=[10], c=[10])
    for order in (["a", "b", "c"], ["c", "b", "a"]):
        assert placed(place(fleet, PodAsk((share("m", 1),)), order)).node == "a"


def test_candidates_may_come_as_a_generator_and_with_unknown_names() -> None:
    result = place(fleet_of(a=[10]), PodAsk((share("m", 20),)), (name for name in ["a", "ghost"]))
    assert isinstance(result, NoRoom)
    assert result.reasons == {"a": TOO_LARGE, "ghost": NO_INVENTORY}


def test_a_node_without_a_card_says_that_it_has_none() -> None:
    assert explain(fleet_of(a=[]), PodAsk((share("m", 1),)), ["a"]) == {"a": NO_INVENTORY}


def test_a_share_larger_than_any_number_of_the_books_is_refused_and_not_wrapped() -> None:
    ask = PodAsk(tuple(share(f"c{i}", 2**24 - 1, init=i == 0) for i in range(200)))
    assert explain(fleet_of(a=[2**24 - 1]), ask, ["a"]) == {"a": TOO_LARGE}


def test_a_reason_that_eviction_cannot_help_is_told_from_one_that_it_can() -> None:
    fleet = fleet_of(full=[10], small=[5])
    fleet.debit("full", Slice("full-0", 0, 8))
    assert explain(fleet, PodAsk((share("m", 8),)), ["full", "small"]) == {"full": NO_ROOM, "small": TOO_LARGE}
    assert explain(fleet, PodAsk((whole("m"),)), ["full"]) == {"full": NO_WHOLE}
    assert explain(fleet, PodAsk((whole("m", 2),)), ["full"]) == {"full": TOO_FEW}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((share("m", 10, cards=2),), ""),
        ((share("m", 10, cards=3),), TOO_FEW),
        ((share("m", 11, cards=3),), TOO_LARGE),
        ((whole("m", 3),), TOO_FEW),
        ((whole("a"), whole("b"), whole("c")), TOO_FEW),
        ((share("a", 10), share("b", 10), share("c", 10)), TOO_FEW),
        ((share("a", 10), share("b", 11)), TOO_LARGE),
        ((share("a", 6, cards=1, init=True), share("b", 10, cards=3)), TOO_FEW),
        ((whole("a", 2), share("b", 10)), TOO_FEW),
        ((whole("a", 2), share("b", 11)), TOO_LARGE),
    ],
)
def test_too_few_cards_are_told_from_too_small_ones(parts: tuple[Ask, ...], reason: str) -> None:
    assert explain(fleet_of(n=[10, 10]), PodAsk(parts), ["n"]) == ({"n": reason} if reason else {})


def test_containers_that_must_lie_on_one_card_are_too_large_for_it_together() -> None:
    ask = PodAsk((share("sidecar", 6), share("setup", 6, init=True)))
    assert explain(fleet_of(n=[10, 10]), ask, ["n"]) == {"n": TOO_LARGE}


def test_cards_of_a_model_that_is_not_allowed_are_none_and_not_too_few() -> None:
    ask = PodAsk((share("m", 1, cards=2),), models=frozenset({"no such"}))
    assert explain(fleet_of(n=[10, 10]), ask, ["n"]) == {"n": TOO_LARGE}


def test_a_pod_of_the_same_size_that_is_starting_holds_the_others_to_its_card() -> None:
    fleet, ask = fleet_of(n=[10, 10]), PodAsk((share("m", 6),))
    assert placed(place(fleet, ask, ["n"], {"n": {"n-1"}})).assignment.uuids("m") == ("n-1",)
    fleet.debit("n", Slice("n-1", 1, 6))
    assert explain(fleet, ask, ["n"], {"n": {"n-1"}}) == {"n": SWAP_RISK}
    fleet.debit("n", Slice("n-0", 0, 6))
    assert explain(fleet, ask, ["n"], {"n": {"n-1"}}) == {"n": NO_ROOM}


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({"models": frozenset({"h100"})}, "n-1"),
        ({"not_models": frozenset({"t4"})}, "n-1"),
        ({"uuids": frozenset({"n-1"})}, "n-1"),
        ({"not_uuids": frozenset({"n-1"})}, "n-0"),
    ],
)
def test_a_condition_on_model_or_uuid_is_kept(conditions: dict[str, frozenset[str]], expected: str) -> None:
    fleet = Fleet()
    fleet.set_node("n", Inventory((card("n-0", 7), card("n-1", 9, model="h100"))))
    ask = PodAsk((share("m", 1),), **conditions)  # type: ignore[arg-type]
    (piece,) = placed(place(fleet, ask, ["n"])).assignment.containers["m"]
    assert piece == Slice(expected, 7 if expected == "n-0" else 9, 1)


def test_whole_gpus_of_an_init_container_are_handed_on_but_not_those_of_a_running_sidecar() -> None:
    ask = PodAsk((whole("sidecar"), whole("init", 2, init=True), whole("app")))
    result = placed(place(fleet_of(n=[10, 10, 10]), ask, ["n"])).assignment
    assert not set(result.uuids("sidecar")) & set(result.uuids("init"))
    assert set(result.uuids("app")) < set(result.uuids("init"))
    assert isinstance(place(fleet_of(n=[10, 10]), ask, ["n"]), NoRoom)


def test_a_whole_gpu_is_one_that_nobody_uses_and_the_smallest_of_those() -> None:
    fleet = fleet_of(n=[10, 40, 20])
    fleet.debit("n", Slice("n-0", 0, 1))
    assert placed(place(fleet, PodAsk((whole("m"),)), ["n"])).assignment.uuids("m") == ("n-2",)


def test_a_share_leaves_the_whole_gpu_that_the_same_pod_needs() -> None:
    fleet = fleet_of(n=[10, 40])
    fleet.debit("n", Slice("n-1", 1, 10))
    ask = PodAsk((share("s", 8), whole("w")))
    assert placed(place(fleet, ask, ["n"])).assignment.containers["w"][0].uuid == "n-0"


def test_mig_instances_come_from_the_card_with_fewest_free_though_its_index_is_not_its_row() -> None:
    fleet = Fleet()
    fleet.set_node("n", mig_node([3, 2], first_index=4))
    ask = PodAsk((mig("init", 2, init=True), mig("app")))
    result = placed(place(fleet, ask, ["n"])).assignment
    assert result.uuids("init") == ("m1-0", "m1-1")
    assert result.uuids("app") == ("m1-0",)
    assert result.containers["app"][0].index == 5


def test_mig_instances_run_out_and_are_never_given_twice() -> None:
    fleet = Fleet()
    fleet.set_node("n", mig_node([2]))
    ask = PodAsk((mig("m"),))
    seen = set()
    for _ in range(2):
        for piece in placed(place(fleet, ask, ["n"])).assignment.held():
            seen.add(piece.uuid)
            fleet.debit("n", piece)
    assert seen == {"m0-0", "m0-1"}
    assert explain(fleet, ask, ["n"]) == {"n": NO_MIG}
    assert explain(fleet, PodAsk((mig("m", 3),)), ["n"]) == {"n": NO_MIG_EVER}


def test_a_card_in_mig_mode_takes_no_share_and_a_sick_one_gives_no_instance() -> None:
    fleet = Fleet()
    instance = MigInstance("m", "1g.10gb", 10, 1, 0)
    fleet.set_node("n", Inventory((card("c", mig=True, healthy=False, instances=(instance,)),)))
    assert explain(fleet, PodAsk((share("s", 1),)), ["n"]) == {"n": TOO_LARGE}
    assert explain(fleet, PodAsk((mig("m"),)), ["n"]) == {"n": NO_MIG_EVER}
