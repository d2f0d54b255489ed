"""When garbage is looked for: on a clock, and at everything only once an hour."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from observe import collecting


class Ring:
    """Refers to itself: only a look for cycles can free it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def set_aside_ring() -> weakref.ref[Ring]:
    """One that died after it was set aside."""
    ring = Ring()
    gc.freeze()
    return weakref.ref(ring)


def test_what_was_set_aside_is_not_collected_again_until_the_hour() -> None:
    gone = set_aside_ring()
    collecting.tidy(1)
    collecting.tidy(collecting.WHOLE_EACH - 1)
    assert gone() is not None
    assert gc.get_freeze_count() > 0
    collecting.tidy(collecting.WHOLE_EACH)
    assert gone() is None
    assert gc.get_freeze_count() > 0


async def test_looks_come_by_the_clock_and_not_by_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "EACH_S", 0.001)
    monkeypatch.setattr(collecting, "WHOLE_EACH", 3)
    gone = set_aside_ring()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(collecting.keep_tidy(), 1.0)
    assert gone() is None
    assert gc.get_threshold() == (collecting.YOUNG, collecting.NEVER, collecting.NEVER)
