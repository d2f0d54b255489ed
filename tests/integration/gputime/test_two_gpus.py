"""A program with work on two GPUs: its work on one is no evidence on the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.gputime.conftest import Node, Program, until

LONG_US = 2_000_000


@pytest.fixture
def wide(library: Path) -> Iterator[tuple[Node, Program]]:
    """A container with both GPUs of a node, and a program that has begun a long kernel on the first and is on the second."""
    node = Node(library, gpus=2)
    program = node.run_in(node.grant("wide", gpus=2))
    program.do("[on_gpu(1), launch(10), wait(), on_gpu(0)]")
    until(lambda: node.gpu_time("wide").arrivals > 0 and not node.gpu_time("wide").working)
    program.do(f"[launch({LONG_US}), on_gpu(1)]")
    until(lambda: node.gpu_time("wide").working)
    yield node, program
    assert not node.misuses()
    node.close()


def ran_when_idle_us(node: Node, program: Program) -> int:
    """Running time of its kernels up to its report of idleness."""
    until(lambda: not node.gpu_time("wide").working)
    return node.ran_us(program)


@pytest.mark.parametrize("waits", ["check(cuda.cuStreamSynchronize(None))", "check(cuda.cuCtxSynchronize())"])
def test_a_process_that_waited_on_one_gpu_still_works_on_the_other(wide: tuple[Node, Program], waits: str) -> None:
    node, program = wide
    program.do(f"[launch(1000), {waits}]")
    assert ran_when_idle_us(node, program) > LONG_US


def test_a_context_that_ends_leaves_the_other_gpus_work_as_it_was(wide: tuple[Node, Program]) -> None:
    node, program = wide
    program.do("[launch(1000), leave_gpu(1)]")
    assert ran_when_idle_us(node, program) > LONG_US


def test_a_process_that_has_waited_on_both_gpus_is_idle(wide: tuple[Node, Program]) -> None:
    node, program = wide
    program.do("[launch(1000), wait(), on_gpu(0), wait()]")
    assert ran_when_idle_us(node, program) > LONG_US
