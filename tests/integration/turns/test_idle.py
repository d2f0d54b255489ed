"""A container whose work has ended is idle, whichever way it ended; else it would keep others from the GPU for as long as it lives."""

from __future__ import annotations

import pytest

from tests.integration.turns.conftest import Node, Program, until

LAUNCH_FAILED = 719


@pytest.fixture
def program(node: Node) -> Program:
    return node.run("one")


def is_working(node: Node) -> bool:
    turn = node.turn("one")
    assert turn is not None
    return turn.working


def arrivals_of(node: Node) -> int:
    turn = node.turn("one")
    assert turn is not None
    return turn.arrivals


def test_work_of_a_thread_that_ended_ends_with_the_wait_for_its_context(node: Node, program: Program) -> None:
    program.do("launch_in_thread(300_000)")
    until(lambda: is_working(node))
    program.do("wait_for_context()")
    until(lambda: not is_working(node))
    assert not node.misuses()


def test_300_streams_that_were_waited_for_leave_nothing(node: Node, program: Program) -> None:
    program.do("globals().update(made=launch_in_streams(300, 1000))")
    until(lambda: is_working(node))
    program.do("wait_for_streams(made)")
    until(lambda: not is_working(node))
    assert not node.misuses()


def test_work_that_ends_with_an_error_has_ended(node: Node, program: Program) -> None:
    """It stays with the process: no stream is ever answered with success again."""
    program.do("launch(100_000)")
    until(lambda: is_working(node))
    assert program.do("fail()") == LAUNCH_FAILED
    until(lambda: not is_working(node))
    assert not node.misuses()


@pytest.mark.parametrize("name", ["cuMemsetD8_v2", "cuMemsetD2D8_v2"])
def test_a_fill_without_a_stream_is_told_of_and_its_end_is_seen(node: Node, program: Program, name: str) -> None:
    arrivals = arrivals_of(node)
    program.do(f"fill('{name}')")
    until(lambda: arrivals_of(node) > arrivals)
    until(lambda: not is_working(node))
    assert not node.misuses()
