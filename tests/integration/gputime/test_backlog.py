"""An arbiter that is slower than its messages: the library sends later what does not fit the socket, so that the arbiter has the final state in the end."""

from __future__ import annotations

import signal
import time

import pytest

from tests.integration.gputime.conftest import Node, Program, until

LC = "latency-critical"
FILL = "[None for _ in iter(lambda: library.tangram_hint(ctypes.c_uint64(1)), -1)][:0]"
"""Until the socket is full."""


@pytest.fixture
def program(node: Node) -> Program:
    return node.run("one", LC, core=20)


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


def with_a_full_socket(node: Node, program: Program, *expressions: str) -> None:
    node.arbiter.send_signal(signal.SIGSTOP)
    try:
        program.do(FILL)
        for expression in expressions:
            program.do(expression)
    finally:
        node.arbiter.send_signal(signal.SIGCONT)


def test_work_that_did_not_fit_into_the_socket_is_capped_all_the_same(node: Node, program: Program) -> None:
    with_a_full_socket(node, program, "launch(20_000_000)")
    until(lambda: is_working(node))
    until(lambda: node.held(program))
    assert stays(node, 3), "also when all hints are read"
    assert not node.misuses()


def test_idleness_that_did_not_fit_into_the_socket_frees_the_gpu(node: Node, program: Program) -> None:
    """A fill is nothing that the driver's count shows, so nothing but its word ends it."""
    program.do("launch_and_fill(300_000)")
    until(lambda: is_working(node))
    with_a_full_socket(node, program, "wait()")
    until(lambda: not is_working(node))
    assert not node.misuses()


def test_a_burst_of_short_requests_leaves_what_comes_after_it_known(node: Node, program: Program) -> None:
    """Each is a WORK and an IDLE, and some of them are lost."""
    with_a_full_socket(node, program, "len([(launch(1), wait()) for _ in range(600)])", "launch(20_000_000)")
    until(lambda: is_working(node) and node.held(program))
    assert not node.misuses()
