"""Fixture of the copier's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.copier.harness import UUID, Node


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node(f"gpu h200 memory_mib=2048 context_mib=300 uuid={UUID}\n")
    yield made
    made.end()
