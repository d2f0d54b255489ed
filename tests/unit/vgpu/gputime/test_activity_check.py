"""When the driver's count ends reported work, when it disproves what a container reports, and when it must not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.gputime.activity_check import ENDED_AFTER_S, KEPT_S, PROVEN_S, READINGS, EndedWork, UnreportedWork

SPANS = st.lists(st.tuples(st.floats(0.001, 3.0), st.floats(0.001, 3.0)), min_size=1, max_size=40)
"""(idle, working) seconds, one after the other."""


def ended_work(kernels_only: bool = True) -> EndedWork:
    made = EndedWork()
    made.report(0.0, kernels_only=kernels_only)
    return made


def test_work_that_the_driver_does_not_count_ends_after_a_second_and_two_readings() -> None:
    one = ended_work()
    assert not one.evaluate(1.0, 0.0)
    assert one.evaluate(2.0, 0.0)
    assert one.ended
    assert not one.evaluate(3.0, 0.0), "returned once"


def test_a_container_that_was_suspended_for_five_seconds_still_works() -> None:
    one = ended_work()
    assert not any(one.evaluate(0.3, 0.0) for _ in range(5))
    assert not one.ended


def test_copies_fills_and_waits_do_not_end_here() -> None:
    one = ended_work(kernels_only=False)
    assert not any(one.evaluate(float(second), 0.0) for second in range(60))


def test_a_gpu_that_does_not_count_by_process_is_unknown_and_not_idle() -> None:
    one = ended_work()
    assert not any(one.evaluate(float(second), None) for second in range(60))


def test_a_reading_without_a_result_begins_the_count_anew() -> None:
    one = ended_work()
    one.evaluate(1.0, 0.0)
    one.evaluate(2.0, None)
    assert not one.evaluate(3.0, 0.0)
    assert one.evaluate(4.0, 0.0)


def test_kernels_below_one_percent_stay_as_each_launch_is_a_report() -> None:
    one = ended_work()
    for second in range(60):
        one.report(float(second), kernels_only=True)
        assert not one.evaluate(second + 1.0, 0.0)


def test_a_report_ends_the_end() -> None:
    one = ended_work()
    one.evaluate(1.0, 0.0)
    one.evaluate(2.0, 0.0)
    one.report(2.0, kernels_only=True)
    assert not one.ended
    assert not one.evaluate(2.9, 0.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["report", "other", "blind", "seen", "nothing"]), st.floats(0.0, 2.0)), max_size=40
    )
)
def test_work_ends_exactly_when_the_last_readings_saw_nothing_for_long_enough(steps: list[tuple[str, float]]) -> None:
    one, reported_s = EndedWork(), 0.0
    history: list[tuple[str, float]] = []
    for what, passed_s in steps:
        reported_s += passed_s
        history.append((what, reported_s))
        match what:
            case "report" | "other":
                one.report(reported_s, kernels_only=what == "report")
            case _:
                one.evaluate(reported_s, {"blind": None, "seen": 0.5, "nothing": 0.0}[what])
        # slowly: the tail of readings that saw nothing, after the last that resets
        last = next((n for n in range(len(history) - 1, -1, -1) if history[n][0] in {"report", "other"}), None)
        ended = False
        if last is not None and history[last][0] == "report":
            from_s, readings = history[last][1], 0
            for kind, at_s in history[last + 1 :]:
                readings = readings + 1 if kind == "nothing" else 0
                if kind != "nothing" and not ended:
                    from_s = at_s
                ended = ended or (readings >= READINGS and at_s - from_s >= ENDED_AFTER_S)
        assert one.ended is ended


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
def test_a_container_that_reports_all_its_work_is_never_accused_however_late_the_driver_counts(
    spans: list[tuple[float, float]], late_s: float, part: float
) -> None:
    unreported = UnreportedWork()
    for second in range(1, 120):
        reported_s = working_s(spans, second, second + 1)
        seen_s = part * working_s(spans, second - late_s, second + 1 - late_s)
        assert not unreported.evaluate(1.0, reported_s, seen_s)
    assert unreported.seconds <= 1.0, "no more than what is on its way"


@given(st.floats(0.5, 1.0), st.floats(0.05, 2.0))
def test_a_container_that_reports_nothing_is_found_within_seconds(busy: float, period_s: float) -> None:
    unreported, passed_s = UnreportedWork(), 0.0
    while not unreported.proven:
        unreported.evaluate(period_s, 0.0, busy * period_s)
        passed_s += period_s
    assert passed_s <= PROVEN_S / (busy - 0.1) + period_s + 1e-6


def test_a_container_that_reports_a_tenth_of_its_work_is_found_too() -> None:
    unreported = UnreportedWork()
    assert any(unreported.evaluate(1.0, 0.1, 1.0) for _ in range(5))


def test_a_single_wrong_count_accuses_no_container() -> None:
    unreported = UnreportedWork()
    for second in range(100):
        assert not unreported.evaluate(1.0, 0.0, 1.0 if second % 20 == 0 else 0.0)


@pytest.mark.parametrize("seen", [0.0, 0.9])
def test_the_reports_of_a_container_that_reports_all_its_work_again_count_within_a_minute(seen: float) -> None:
    unreported = UnreportedWork()
    for _ in range(1000):
        unreported.evaluate(1.0, 0.0, 1.0)
    assert unreported.proven
    assert unreported.seconds == KEPT_S
    changes = [unreported.evaluate(1.0, seen, seen) for _ in range(60 + 1)]
    assert changes.count(True) == 1
    assert not unreported.proven
