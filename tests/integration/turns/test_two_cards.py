"""A program with work on two cards: what it does on one says nothing of the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.turns.conftest import Node, Program, until

LONG_US = 2_000_000


@pytest.fixture
def wide(library: Path) -> Iterator[tuple[Node, Program]]:
    """A container with both cards of a node, and a program that has begun a long kernel on the first and is on the second."""
    node = Node(library, cards=2)
    program = node.run_in(node.grant("wide", cards=2))
    program.do("[on_card(1), launch(10), wait(), on_card(0)]")
    program.do(f"[launch({LONG_US}), on_card(1)]")
    yield node, program
    assert not node.misuses()
    node.close()


def idle_after_s(node: Node) -> float:
    """The long kernel runs by the clock: whoever is told idle much earlier was told so wrongly."""
    return until(lambda: not node.turn("wide").working)


@pytest.mark.parametrize("waits", ["check(cuda.cuStreamSynchronize(None))", "check(cuda.cuCtxSynchronize())"])
def test_who_waited_on_one_card_still_works_on_the_other(wide: tuple[Node, Program], waits: str) -> None:
    node, program = wide
    program.do(f"[launch(1000), {waits}]")
    assert idle_after_s(node) > LONG_US / 2e6


def test_a_context_that_ends_leaves_the_other_cards_work_as_it_was(wide: tuple[Node, Program]) -> None:
    node, program = wide
    program.do("[launch(1000), leave_card(1)]")
    assert idle_after_s(node) > LONG_US / 2e6


def test_who_has_waited_on_both_cards_is_idle(wide: tuple[Node, Program]) -> None:
    node, program = wide
    program.do("[launch(1000), wait(), on_card(0), wait()]")
    assert idle_after_s(node) < LONG_US / 2e6
