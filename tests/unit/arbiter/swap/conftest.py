"""A simulated node for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.arbiter.swap.node_kit import SimulatedNode


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimulatedNode]:
    made = SimulatedNode(tmp_path)
    yield made
    made.close()
