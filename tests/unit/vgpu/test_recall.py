"""What is kept between pods is what all the work would give, to the last digit; and it is kept for few kinds of pods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import card, mig_card
from vgpu.cards import Cards
from vgpu.fleet import Candidates, Fleet
from vgpu.grant import Slice
from vgpu.inventory import Inventory
from vgpu.mix import Mix
from vgpu.policies.fragmentation import fragmentation
from vgpu.recall import KINDS, Recall
from vgpu.request import Ask, PodAsk
from vgpu.table import Table

MIB = 16_384
ASKS = [
    PodAsk((Ask("a", "share", 1, 4, 4096, 30),), cpu_milli=1000, policy="fragmentation"),
    PodAsk((Ask("a", "share", 2, 12, 6144),), cpu_milli=3000, policy="fragmentation"),
    PodAsk((Ask("a", "whole", 1, core_percent=100),), cpu_milli=8000, policy="fragmentation"),
    PodAsk((Ask("a", "share", 1, 16, 16_384),), models=frozenset({"small"}), policy="fragmentation"),
]
NODES = st.integers(0, 5)
STEPS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, len(ASKS) - 1), NODES),
    st.tuples(st.just("debit"), NODES, st.integers(1, 3)),
    st.tuples(st.just("cpu"), NODES, st.integers(0, 20)),
    st.tuples(st.just("node"), NODES, st.integers(0, 3)),
    st.tuples(st.just("gone"), NODES, st.just(0)),
    st.tuples(st.just("saw"), st.integers(0, len(ASKS) - 1), st.just(0)),
)


def inventory(name: str, kind: int) -> Inventory:
    if kind == 3:
        return Inventory((mig_card(0, "1g.10gb", node=name, mib=MIB), card(1, MIB, name)))
    return Inventory(tuple(card(row, MIB << (row % 2), name, ["large", "small"][kind % 2]) for row in range(kind + 1)))


def scores(fleet: Fleet, ask: PodAsk, columns: list[int]) -> tuple[Any, Any]:
    table = Table(fleet, ask, Candidates(np.array(columns, np.intp), ()))
    return table.fits, fragmentation(table.outcome())


@given(steps=st.lists(STEPS, min_size=5, max_size=60))
def test_whatever_changes_the_scores_are_those_of_a_fresh_look(steps: list[tuple[str, int, int]]) -> None:
    fleet = Fleet()
    for number in range(4):
        fleet.set_node(f"n{number}", inventory(f"n{number}", number % 3))
    for ask in ASKS:
        fleet.saw(ask)
    for what, one, other in steps:
        name = f"n{other if what == 'ask' else one}"
        if what == "node":
            fleet.set_node(name, inventory(name, other))
        elif what == "gone":
            fleet.remove_node(name)
        elif what == "saw":
            fleet.saw(ASKS[one])
        elif name in fleet:
            first = fleet.inventory[name].cards[0]
            if what == "debit":
                fleet.debit(name, Slice(first.uuid, 0, other * 2048, 10 * other))
            elif what == "cpu":
                fleet.set_cpu(name, other * 1000)
        if what != "ask" or not len(fleet):
            continue
        columns = sorted(fleet.column.values())
        for some in (columns, columns[:1]):  # all, and few: other columns of other arrays
            fits, told = scores(fleet, ASKS[one], some)
            fleet.mix._recall.forget()
            _, fresh = scores(fleet, ASKS[one], some)
            for key, expected in zip(told, fresh, strict=True):
                assert key[fits].tolist() == expected[fits].tolist()
            scores(fleet, ASKS[one], some)  # to be remembered by the next


def cards(*free_mib: int) -> Cards:
    free = np.array([free_mib], np.int32)
    full = np.full_like(free, MIB)
    return Cards(free, np.full_like(free, 100), full, np.zeros_like(free), np.full(free.shape[1], 1000, np.int32))


class Counting:
    """Work that says how many nodes it was done for."""

    def __init__(self) -> None:
        self.nodes: list[int] = []

    def __call__(self, those: Cards) -> Any:
        self.nodes.append(those.free_mib.shape[1])
        return those.free_mib.sum(axis=0).astype(np.float32)


def test_the_work_is_done_again_for_the_nodes_that_changed_alone() -> None:
    recall, work = Recall(), Counting()
    for seen in (cards(1, 2, 3, 4), cards(1, 2, 3, 4), cards(1, 2, 9, 4), cards(5, 6, 7, 4), cards(5, 6)):
        assert recall.of("a", seen, work).tolist() == seen.free_mib[0].tolist()
    assert work.nodes == [4, 1, 4, 2], "none, one, most and others of them"


def _free_percent(one: Cards) -> None:
    one.free_percent[0, 1] = 7


def _total(one: Cards) -> None:
    one.total_mib[0, 1] = 7


def _model(one: Cards) -> None:
    one.model[0, 1] = 7


def _cpu(one: Cards) -> None:
    one.cpu_milli[1] = 7


@pytest.mark.parametrize("change", [_free_percent, _total, _model, _cpu])
def test_every_array_counts(change: Callable[[Cards], None]) -> None:
    recall, work = Recall(), Counting()
    recall.of("a", cards(1, 2, 3), work)
    other = cards(1, 2, 3)
    change(other)
    recall.of("a", other, work)
    assert work.nodes == [3, 1]


@pytest.mark.parametrize("change", [_free_percent, _model, _cpu])
def test_an_array_of_the_fleet_that_is_written_to_later_is_no_memory(change: Callable[[Cards], None]) -> None:
    """Models, compute time and processors are read where the fleet keeps them."""
    recall, work, seen = Recall(), Counting(), cards(1, 2, 3)
    recall.of("a", seen, work)
    change(seen)
    recall.of("a", seen, work)
    assert work.nodes == [3, 1]


def test_a_pod_that_takes_the_place_of_one_with_as_much_memory_and_less_compute_time_is_noticed() -> None:
    fleet = Fleet()
    for number in range(3):
        fleet.set_node(f"n{number}", inventory(f"n{number}", 1))
    for ask in ASKS:
        fleet.saw(ask)
    columns = sorted(fleet.column.values())
    first = fleet.inventory["n1"].cards[0]
    fleet.debit("n1", Slice(first.uuid, 0, 4096, 10))
    scores(fleet, ASKS[0], columns)
    fleet.credit("n1", Slice(first.uuid, 0, 4096, 10))
    fleet.debit("n1", Slice(first.uuid, 0, 4096, 90))
    _, told = scores(fleet, ASKS[1], columns)
    fleet.mix._recall.forget()
    _, fresh = scores(fleet, ASKS[1], columns)
    assert told[0].tolist() == fresh[0].tolist()


def test_few_kinds_are_kept_and_equal_arrays_once() -> None:
    recall, work = Recall(), Counting()
    for kind in range(KINDS + 3):
        recall.of(kind, cards(1, kind), work)
    assert len(recall) == KINDS
    assert len({id(kept.cards.total_mib) for kept in recall._kept.values()}) == 1
    recall.of(KINDS + 2, cards(1, KINDS + 2), work)
    assert len(work.nodes) == KINDS + 3, "it was kept"
    recall.of(0, cards(1, 0), work)
    assert len(work.nodes) == KINDS + 4, "it was not"


def test_tables_that_are_made_anew_end_what_was_kept() -> None:
    mix = Mix()
    for ask in ASKS:
        mix.saw(ask, {"large": 0})
    first = mix.unusable(cards(4096, 8192, MIB)).tolist()
    for _ in range(200):
        mix.saw(ASKS[2], {"large": 0})
    assert mix.unusable(cards(4096, 8192, MIB)).tolist() != first
