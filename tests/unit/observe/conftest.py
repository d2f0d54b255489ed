"""What tests of the HTTP server have in common."""

from __future__ import annotations

import pytest

from observe.protocol import RestingFlow


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long connections were not read, each time."""
    seen: list[float] = []
    rest = RestingFlow.rest

    def kept(flow: RestingFlow, seconds: float) -> None:
        seen.append(seconds)
        rest(flow, seconds)

    monkeypatch.setattr(RestingFlow, "rest", kept)
    return seen
