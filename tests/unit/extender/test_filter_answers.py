"""Answers cut from the kept text of a reason are those that a plain writer writes, whatever was answered before."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.filter_answers import KEPT, FilterAnswers
from extender.protocol import FilterResult
from vgpu.scheduling.nodes.nodes_by_column import NodesByColumn

NAMES = st.text('",:\\a\n\u00e9\U0001f600', max_size=6)
FLEETS = st.lists(st.lists(NAMES, min_size=1, max_size=12, unique=True).map(tuple), min_size=1, max_size=3)
SOME = st.lists(st.integers(0, 11), max_size=12, unique=True)
"""Columns, in any order; those beyond a fleet are left out."""
CALLS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abcdefghijkl"), SOME, SOME), min_size=1, max_size=30)


def some(every: tuple[str, ...], columns: list[int]) -> NodesByColumn:
    return NodesByColumn(every, np.array([at for at in columns if at < len(every)], np.intp))


@given(FLEETS, CALLS)
def test_every_answer_is_as_a_plain_writer_writes_it(
    fleets: list[tuple[str, ...]], calls: list[tuple[int, str, list[int], list[int]]]
) -> None:
    answers = FilterAnswers()
    for which, reason, first, others in calls:
        every = fleets[which % len(fleets)]
        second = [at for at in others if at not in first]
        failed = {reason: some(every, first), f'{reason}"\n': some(every, second), "listed": ["x", "y"], "": []}
        result = FilterResult(["n"], failed, {"never": some(every, first)}, "no")
        assert json.loads(answers.encode(result)) == json.loads(result.to_json())


def test_a_placed_pod_is_answered_as_a_plain_writer_writes_it() -> None:
    assert FilterAnswers().encode(FilterResult(["n1"])) == FilterResult(["n1"]).to_json()


def test_one_name_for_another_in_the_fleet_is_one_in_the_answer() -> None:
    """The node that left its column to another one has its name nowhere any more."""
    answers, columns = FilterAnswers(), [0, 1]
    for every in (("a", "b"), ("a", "c")):
        assert json.loads(answers.encode(FilterResult(failed={"full": some(every, columns)})))[
            "FailedNodes"
        ] == dict.fromkeys(every, "full")


def test_the_text_of_few_reasons_is_kept() -> None:
    answers, every = FilterAnswers(), ("a", "b")
    for at in range(2 * KEPT):
        answers.encode(FilterResult(failed={f"reason {at}": some(every, [0, 1])}))
    assert len(answers) == KEPT


@pytest.mark.parametrize("columns", [[], [2], [0, 1, 2], [2, 0], [1, 2]])
def test_nodes_by_column_read_as_a_list_of_their_names(columns: list[int]) -> None:
    nodes, names = some(("a", "b", "c"), columns), ["abc"[at] for at in columns]
    assert (list(nodes), len(nodes), nodes[1:], nodes == names) == (names, len(names), names[1:], True)
    assert nodes != [*names, "d"]
    assert [nodes[at] for at in range(len(nodes))] == names
