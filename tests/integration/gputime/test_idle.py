"""A container whose work has ended is idle, whichever way it ended; else it would keep others from the GPU for as long as it lives."""

from __future__ import annotations

import time

import pytest

from tests.integration.gputime.conftest import Node, Program, until

LAUNCH_FAILED = 719
LC = "latency-critical"


@pytest.fixture
def program(node: Node) -> Program:
    return node.run("one")


def is_working(node: Node) -> bool:
    gpu_time = node.gpu_time("one")
    assert gpu_time is not None
    return gpu_time.working


def stays(node: Node, seconds: float) -> bool:
    """Does it count as working all that time?"""
    end = time.monotonic() + seconds
    while time.monotonic() < end and is_working(node):
        time.sleep(0.05)
    return time.monotonic() >= end


def arrivals_of(node: Node) -> int:
    gpu_time = node.gpu_time("one")
    assert gpu_time is not None
    return gpu_time.arrivals


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


def test_a_stream_that_is_destroyed_with_work_in_it_has_work_until_that_has_ended(node: Node, program: Program) -> None:
    program.do("launch_in_destroyed(1_500_000)")
    until(lambda: is_working(node))
    assert stays(node, 1)
    until(lambda: not is_working(node), 2)
    assert not node.misuses()


def test_work_in_a_green_context_ends_without_a_wait(node: Node, program: Program) -> None:
    """It is the only context. A fill, as the driver's count ends kernels."""
    program.do("go_green()")
    program.do("launch_and_fill(200_000, stream())")
    until(lambda: is_working(node))
    until(lambda: not is_working(node), 2)
    assert not node.misuses()


def test_work_that_ends_with_an_error_has_ended(node: Node, program: Program) -> None:
    """It stays with the process: no stream is ever answered with success again."""
    program.do("launch(100_000)")
    until(lambda: is_working(node))
    assert program.do("fail()") == LAUNCH_FAILED
    until(lambda: not is_working(node))
    assert not node.misuses()


@pytest.mark.parametrize("name", ["cuMemsetD8_v2", "cuMemsetD2D8_v2"])
def test_a_fill_without_a_stream_is_reported_and_its_end_is_seen(node: Node, program: Program, name: str) -> None:
    arrivals = arrivals_of(node)
    program.do(f"fill('{name}')")
    until(lambda: arrivals_of(node) > arrivals)
    until(lambda: not is_working(node))
    assert not node.misuses()


# --- work whose end cannot be queried: it ends when the driver counts none of it, and only then ---


def test_work_that_cannot_be_queried_ends_when_the_driver_counts_none_of_it(node: Node, program: Program) -> None:
    program.do("launch_in_thread(200_000)")
    until(lambda: is_working(node))
    until(lambda: not is_working(node), 6)
    program.do("launch(1000)")
    until(lambda: is_working(node))
    assert not node.misuses()


def test_a_container_that_was_suspended_all_the_time_still_has_work(node: Node, program: Program) -> None:
    urgent = node.run("urgent", LC)
    urgent.do("launch(7_000_000)")
    program.start("launch_in_thread(100_000)")
    until(lambda: node.held(program) and is_working(node))
    assert stays(node, 5)
    assert node.held(program)
    urgent.do("wait()")
    program.finish()
    until(lambda: not is_working(node), 6)
    assert not node.misuses()


def test_a_fill_that_cannot_be_queried_does_not_end_here(node: Node, program: Program) -> None:
    """The driver's count of computing processes does not show it."""
    program.do("fill_in_thread()")
    until(lambda: is_working(node))
    assert stays(node, 5)
    program.do("wait_for_context()")
    until(lambda: not is_working(node))


def test_kernels_too_short_for_the_drivers_count_keep_the_work(node: Node, program: Program) -> None:
    program.do("launch_in_thread(1000)")
    program.do("globals().update(end=launch_now_and_then(1000, 0.25))")
    until(lambda: is_working(node))
    assert stays(node, 5)
    program.do("end()")
    until(lambda: not is_working(node), 6)
