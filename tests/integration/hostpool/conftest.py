"""Fixture of the host pool's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.hostpool.stand import Stand


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()
    yield made
    made.end()
