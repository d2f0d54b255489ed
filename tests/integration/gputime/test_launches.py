"""Every function that launches kernels reports them, also those that few programs still use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.gputime.conftest import Node, Program, until


@pytest.fixture(scope="module")
def wide(library: Path) -> Iterator[tuple[Node, Program]]:
    """A container with both GPUs of a node."""
    node = Node(library, gpus=2)
    yield node, node.run_in(node.grant("wide", gpus=2))
    node.close()


@pytest.mark.parametrize(
    "name",
    [
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cuLaunchCooperativeKernel",
        "cuLaunchCooperativeKernelMultiDevice",
        "cuLaunch",
        "cuLaunchGrid",
        "cuLaunchGridAsync",
    ],
)
def test_a_launch_by_any_function_is_reported_and_its_end_is_seen(wide: tuple[Node, Program], name: str) -> None:
    node, program = wide
    arrivals = node.gpu_time("wide").arrivals
    program.do(f"launch_by('{name}')")
    until(lambda: node.gpu_time("wide").arrivals > arrivals)
    until(lambda: not node.gpu_time("wide").working)
    assert not node.misuses()
