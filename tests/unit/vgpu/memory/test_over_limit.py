"""Which container is over its limit, and which process causes it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vgpu.memory.over_limit import READINGS, Excess, MeasuredProcess, OverLimitDetector, offender

LIMITS = {"GPU-a": 100, "GPU-b": 50}


def test_once_may_be_chance_and_twice_is_over() -> None:
    detector = OverLimitDetector()
    over = {"GPU-a": [MeasuredProcess(7, 101, 0)]}
    assert detector.evaluate(LIMITS, over) == ()
    assert detector.evaluate(LIMITS, over) == (Excess("GPU-a", 101, 100, 7),)
    assert detector.evaluate(LIMITS, over) == (), "it is not new any more"
    assert detector.excesses == (Excess("GPU-a", 101, 100, 7),)


def test_a_reading_within_the_limit_starts_the_count_anew() -> None:
    detector = OverLimitDetector()
    for held in (101, 100, 101):
        detector.evaluate(LIMITS, {"GPU-a": [MeasuredProcess(7, held, 0)]})
    assert detector.excesses == ()


def test_a_container_below_its_limit_is_not_over_and_a_later_excess_is_new() -> None:
    detector = OverLimitDetector()
    reported = [
        detector.evaluate(LIMITS, {"GPU-a": [MeasuredProcess(7, held, 0)]}) for held in (101, 101, 100, 101, 101)
    ]
    assert [len(new) for new in reported] == [0, 1, 0, 0, 1]


def test_the_slack_is_passed_over() -> None:
    detector = OverLimitDetector(slack_bytes=10)
    for held in (110, 110):
        detector.evaluate(LIMITS, {"GPU-a": [MeasuredProcess(7, held, 0)]})
    assert detector.excesses == ()


def test_a_gpu_that_was_not_read_stays_as_it_was() -> None:
    detector = OverLimitDetector()
    for _ in range(2):
        detector.evaluate(LIMITS, {"GPU-a": [MeasuredProcess(7, 101, 0)]})
    assert detector.evaluate(LIMITS, {"GPU-b": [MeasuredProcess(7, 51, 0)]}) == ()
    assert [excess.uuid for excess in detector.excesses] == ["GPU-a"]


def test_a_gpu_that_left_the_grant_is_forgotten() -> None:
    detector = OverLimitDetector()
    for _ in range(2):
        detector.evaluate(LIMITS, {"GPU-a": [MeasuredProcess(7, 101, 0)]})
    detector.evaluate({"GPU-b": 50}, {})
    assert detector.excesses == ()


def test_the_offender_has_the_most_unexplained_memory() -> None:
    honest, greedy, small = MeasuredProcess(1, 500, 500), MeasuredProcess(2, 300, 0), MeasuredProcess(3, 200, 10)
    assert offender([honest, greedy, small]) == 2
    assert offender([MeasuredProcess(1, 500, 500), MeasuredProcess(2, 600, 600)]) == 2, "all explained: the largest"


@given(
    st.lists(
        st.lists(st.builds(MeasuredProcess, st.integers(1, 9), st.integers(0, 90), st.integers(0, 90)), max_size=4),
        max_size=12,
    )
)
def test_over_is_exactly_the_last_readings_all_beyond(readings: list[list[MeasuredProcess]]) -> None:
    detector = OverLimitDetector(slack_bytes=5)
    for reading in readings:
        detector.evaluate(LIMITS, {"GPU-a": reading})
    sums = [sum(held.measured_bytes for held in reading) for reading in readings]
    expected = len(sums) >= READINGS and all(total > 105 for total in sums[-READINGS:])
    assert bool(detector.excesses) == expected
