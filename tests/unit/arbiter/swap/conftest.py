"""A simulated node for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.arbiter.swap.node_kit import SimulatedNode
from tests.unit.arbiter.swap.pair import Pair


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimulatedNode]:
    made = SimulatedNode(tmp_path)
    yield made
    made.close()


@pytest.fixture
def pair(node: SimulatedNode) -> Pair:
    return Pair(node)
