"""When the driver's count disproves a container's word, and when it must not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.gputime.unreported import ENOUGH_S, MOST_S, Doubt

SPANS = st.lists(st.tuples(st.floats(0.001, 3.0), st.floats(0.001, 3.0)), min_size=1, max_size=40)
"""(idle, working) seconds, one after the other."""


def working_s(spans: list[tuple[float, float]], since_s: float, until_s: float) -> float:
    """Of the time between, over and over."""
    total, at_s, whole = 0.0, 0.0, sum(idle + work for idle, work in spans)
    at_s = whole * int(max(0.0, since_s) / whole)
    while at_s < until_s:
        for idle, work in spans:
            total += max(0.0, min(until_s, at_s + idle + work) - max(since_s, at_s + idle))
            at_s += idle + work
    return total


@settings(max_examples=examples(60), deadline=None)
@given(SPANS, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_who_reports_all_its_work_is_never_accused_however_late_the_driver_counts(
    spans: list[tuple[float, float]], late_s: float, part: float
) -> None:
    doubt = Doubt()
    for second in range(1, 120):
        reported_s = working_s(spans, second, second + 1)
        seen_s = part * working_s(spans, second - late_s, second + 1 - late_s)
        assert not doubt.look(1.0, reported_s, seen_s)
    assert doubt.seconds <= 1.0, "no more than what is on its way"


@given(st.floats(0.5, 1.0), st.floats(0.05, 2.0))
def test_who_keeps_silent_is_found_within_seconds(busy: float, period_s: float) -> None:
    doubt, passed_s = Doubt(), 0.0
    while not doubt.proven:
        doubt.look(period_s, 0.0, busy * period_s)
        passed_s += period_s
    assert passed_s <= ENOUGH_S / (busy - 0.1) + period_s + 1e-6


def test_who_reports_a_tenth_of_its_work_is_found_too() -> None:
    doubt = Doubt()
    assert any(doubt.look(1.0, 0.1, 1.0) for _ in range(5))


def test_a_single_wrong_count_accuses_nobody() -> None:
    doubt = Doubt()
    for second in range(100):
        assert not doubt.look(1.0, 0.0, 1.0 if second % 20 == 0 else 0.0)


@pytest.mark.parametrize("seen", [0.0, 0.9])
def test_who_becomes_honest_is_believed_again_within_a_minute(seen: float) -> None:
    doubt = Doubt()
    for _ in range(1000):
        doubt.look(1.0, 0.0, 1.0)
    assert doubt.proven
    assert doubt.seconds == MOST_S
    changes = [doubt.look(1.0, seen, seen) for _ in range(60 + 1)]
    assert changes.count(True) == 1
    assert not doubt.proven
