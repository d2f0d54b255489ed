"""Who is over the limit, and which process is to blame."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vgpu.memory.over_limit import READINGS, Excess, Held, Lookout, offender

LIMITS = {"GPU-a": 100, "GPU-b": 50}


def test_once_may_be_chance_and_twice_is_over() -> None:
    lookout = Lookout()
    over = {"GPU-a": [Held(7, 101, 0)]}
    assert lookout.look(LIMITS, over) == ()
    assert lookout.look(LIMITS, over) == (Excess("GPU-a", 101, 100, 7),)
    assert lookout.look(LIMITS, over) == (), "it is not new any more"
    assert lookout.excesses == (Excess("GPU-a", 101, 100, 7),)


def test_a_reading_within_the_limit_starts_the_count_anew() -> None:
    lookout = Lookout()
    for held in (101, 100, 101):
        lookout.look(LIMITS, {"GPU-a": [Held(7, held, 0)]})
    assert lookout.excesses == ()


def test_who_comes_back_below_is_over_no_more_and_new_when_over_again() -> None:
    lookout = Lookout()
    reported = [lookout.look(LIMITS, {"GPU-a": [Held(7, held, 0)]}) for held in (101, 101, 100, 101, 101)]
    assert [len(new) for new in reported] == [0, 1, 0, 0, 1]


def test_the_slack_is_passed_over() -> None:
    lookout = Lookout(slack_bytes=10)
    for held in (110, 110):
        lookout.look(LIMITS, {"GPU-a": [Held(7, held, 0)]})
    assert lookout.excesses == ()


def test_a_gpu_that_was_not_read_stays_as_it_was() -> None:
    lookout = Lookout()
    for _ in range(2):
        lookout.look(LIMITS, {"GPU-a": [Held(7, 101, 0)]})
    assert lookout.look(LIMITS, {"GPU-b": [Held(7, 51, 0)]}) == ()
    assert [excess.uuid for excess in lookout.excesses] == ["GPU-a"]


def test_a_gpu_that_left_the_grant_is_forgotten() -> None:
    lookout = Lookout()
    for _ in range(2):
        lookout.look(LIMITS, {"GPU-a": [Held(7, 101, 0)]})
    lookout.look({"GPU-b": 50}, {})
    assert lookout.excesses == ()


def test_the_offender_is_who_entries_limit_that_nothing_explains() -> None:
    honest, greedy, small = Held(1, 500, 500), Held(2, 300, 0), Held(3, 200, 10)
    assert offender([honest, greedy, small]) == 2
    assert offender([Held(1, 500, 500), Held(2, 600, 600)]) == 2, "all explained: the largest"


@given(
    st.lists(
        st.lists(st.builds(Held, st.integers(1, 9), st.integers(0, 90), st.integers(0, 90)), max_size=4), max_size=12
    )
)
def test_over_is_exactly_the_last_readings_all_beyond(readings: list[list[Held]]) -> None:
    lookout = Lookout(slack_bytes=5)
    for reading in readings:
        lookout.look(LIMITS, {"GPU-a": reading})
    sums = [sum(held.measured_bytes for held in reading) for reading in readings]
    expected = len(sums) >= READINGS and all(total > 105 for total in sums[-READINGS:])
    assert bool(lookout.excesses) == expected
