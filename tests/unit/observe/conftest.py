"""What tests of the HTTP server have in common."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest

from observe.resting import RestingFlow


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long connections were not read, each time; without end for those that waited in the queue."""
    seen: list[float] = []
    rest, rest_until = RestingFlow.rest, RestingFlow.rest_until

    def kept(flow: RestingFlow, seconds: float) -> None:
        seen.append(seconds)
        rest(flow, seconds)

    def kept_until(flow: RestingFlow, submit: Callable[[Callable[[], object]], Callable[[], None]]) -> None:
        seen.append(inf)
        rest_until(flow, submit)

    monkeypatch.setattr(RestingFlow, "rest", kept)
    monkeypatch.setattr(RestingFlow, "rest_until", kept_until)
    return seen
