"""Waits double from the first to the longest, and begin again after a success."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.back_off import BackOff


@given(
    st.floats(0.001, 60),
    st.floats(0, 600),
    st.lists(st.tuples(st.booleans(), st.floats(0, 1), st.floats(0, 100)), max_size=80),
)
def test_waits_are_as_doubled_one_by_one(
    first_s: float, more_s: float, attempts: list[tuple[bool, float, float]]
) -> None:
    longest_s = first_s + more_s
    cut = 0.0
    back_off = BackOff(first_s, longest_s, lambda: cut)
    slow_s = first_s
    for failed, cut, at_least_s in attempts:
        if failed:
            assert back_off.failed(at_least_s) == max(at_least_s, slow_s * (1 - cut / 2))
            slow_s = min(longest_s, 2 * slow_s)
        else:
            back_off.succeeded()
            slow_s = first_s


def test_without_jitter_waits_are_exact_and_a_row_without_end_overflows_nothing() -> None:
    back_off = BackOff(0.5, 30.0)
    assert [back_off.failed() for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    back_off.failures = 10**6
    assert back_off.failed() == 30
