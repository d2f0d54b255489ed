"""When a pod started, as a number that compares."""

from __future__ import annotations

import pytest

from vgpu.scheduling.victims.eligibility import UNSTARTED, started_at


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2026-01-28T17:05:09Z", 20260128170509),
        ("2026-01-28T17:05:09.123456Z", 20260128170509),
        ("2026-01-28T17:05:09", 20260128170509),
        ("2026-01-28", 20260128),
        ("2026-01-28 17:05:09", 20260128170509),
        ("2026-01-28T17:05:0", 2026012817050),
        ("20260128170509", 20260128170509),
        ("2026-01-28T17:05:0\u0669Z", 2026012817050),
        ("", UNSTARTED),
        ("soon", UNSTARTED),
    ],
)
def test_a_start_is_its_digits_to_the_second(text: str, number: int) -> None:
    assert started_at(text) == number
