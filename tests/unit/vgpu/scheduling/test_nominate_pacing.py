"""Pods are nominated where a busy scheduler is faster with it, by the time between its calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.scheduling.nominate import BACKLOG
from vgpu.scheduling.nominate_pacing import GAIN, KNOWN_S, LONGEST_S, REST_S, SAMPLES, SLOW_S, Pacing

MANY = BACKLOG
IN_TURN_S = 0.010


@dataclass
class PacedCalls:
    """Calls, each so long after the one before."""

    pacing: Pacing = field(default_factory=Pacing)
    now_s: float = 100.0

    def calls(self, count: int, took_s: float, *, nominated: bool = False, waiting: int = MANY) -> None:
        for _ in range(count):
            self.now_s += took_s
            self.pacing.called(self.now_s, nominated=nominated, waiting=waiting)

    @property
    def nominates(self) -> bool:
        return self.pacing.worth(self.now_s)


def knows_in_turn(took_s: float = IN_TURN_S) -> PacedCalls:
    scheduler = PacedCalls()
    scheduler.calls(1 + SAMPLES, took_s)
    return scheduler


def test_no_pod_is_nominated_before_the_time_of_one_without_a_nomination_is_known() -> None:
    scheduler = PacedCalls()
    assert not scheduler.nominates
    scheduler.calls(SAMPLES, IN_TURN_S)
    assert not scheduler.nominates, "the first call came after nothing"
    scheduler.calls(1, IN_TURN_S)
    assert scheduler.nominates


@pytest.mark.parametrize(("took_s", "expected"), [(SLOW_S * 0.99, False), (SLOW_S * 1.01, True)])
def test_where_the_scheduler_is_fast_no_pod_is_nominated(took_s: float, expected: bool) -> None:
    assert knows_in_turn(took_s).nominates is expected


@pytest.mark.parametrize("waiting", [0, MANY - 1])
def test_the_time_of_a_scheduler_with_little_to_do_does_not_count(waiting: int) -> None:
    scheduler = PacedCalls()
    scheduler.calls(4 * SAMPLES, IN_TURN_S, waiting=waiting)
    assert not scheduler.nominates


def test_nor_does_a_time_in_which_it_did_something_else() -> None:
    scheduler = PacedCalls()
    scheduler.calls(4 * SAMPLES, LONGEST_S * 1.01)
    assert not scheduler.nominates


def test_a_pod_counts_from_the_call_before_it_if_many_waited_then() -> None:
    scheduler = PacedCalls()
    for _ in range(SAMPLES):
        scheduler.calls(1, IN_TURN_S, waiting=0)
        scheduler.calls(1, IN_TURN_S, waiting=MANY)
    assert not scheduler.nominates, "from few to many the scheduler may have waited for pods"
    scheduler.calls(1, IN_TURN_S, waiting=0)
    assert scheduler.nominates


@pytest.mark.parametrize(("part", "expected"), [(GAIN * 0.99, True), (GAIN * 1.01, False)])
def test_it_goes_on_where_nominated_pods_take_less(part: float, expected: bool) -> None:
    scheduler = knows_in_turn()
    scheduler.calls(SAMPLES - 1, IN_TURN_S * 2, nominated=True)
    assert scheduler.nominates, "it is not known yet"
    scheduler.calls(SAMPLES, IN_TURN_S * part, nominated=True)
    assert scheduler.nominates is expected


def test_where_it_was_not_worth_it_it_rests_and_is_tried_again() -> None:
    scheduler = knows_in_turn()
    scheduler.calls(SAMPLES, IN_TURN_S, nominated=True)
    assert not scheduler.nominates
    scheduler.calls(SAMPLES, IN_TURN_S)
    assert not scheduler.nominates, "it pauses"
    scheduler.now_s += REST_S
    assert scheduler.nominates
    scheduler.calls(SAMPLES, IN_TURN_S / 2, nominated=True)
    assert scheduler.nominates


def test_the_time_of_a_pod_without_a_nomination_is_measured_anew_after_some_time() -> None:
    scheduler = knows_in_turn()
    scheduler.calls(SAMPLES, IN_TURN_S / 10, nominated=True)
    scheduler.now_s += KNOWN_S + 1
    assert not scheduler.nominates
    scheduler.calls(1 + SAMPLES, IN_TURN_S / 20)
    assert not scheduler.nominates, "the cluster has become small"
    scheduler.now_s += REST_S
    scheduler.calls(1 + SAMPLES, IN_TURN_S)
    assert scheduler.nominates


CALLS = st.lists(
    st.tuples(st.sampled_from([0.001, 0.003, 0.01, 2.0, 40.0]), st.booleans(), st.sampled_from([0, MANY])), max_size=120
)


@given(CALLS)
def test_it_is_as_reckoned_from_all_calls_since_the_last_rest(calls: list[tuple[float, bool, int]]) -> None:
    pacing, now_s, rests_until_s = Pacing(), 0.0, float("-inf")
    seen: list[tuple[float, float, bool]] = []
    busy, before_s = False, float("-inf")
    for took_s, nominated, waiting in calls:
        now_s += took_s
        pacing.called(now_s, nominated=nominated, waiting=waiting)
        if busy and now_s - before_s <= LONGEST_S:
            seen.append((now_s, now_s - before_s, nominated))
        busy, before_s = waiting >= BACKLOG, now_s
        expected = False
        if now_s >= rests_until_s:
            in_turn = [took for at_s, took, ahead in seen if not ahead][-SAMPLES:]
            recent = [at_s for at_s, _, ahead in seen if not ahead][-SAMPLES:]
            ahead = sorted([took for _, took, ahead in seen if ahead][-SAMPLES:])
            if len([at_s for at_s in recent if now_s - at_s <= KNOWN_S]) == SAMPLES:
                median_s = sorted(in_turn)[SAMPLES // 2]
                expected = median_s >= SLOW_S if len(ahead) < SAMPLES else ahead[SAMPLES // 2] < GAIN * median_s
                if not expected and len(ahead) == SAMPLES:
                    seen, rests_until_s = [], now_s + REST_S
        assert pacing.worth(now_s) is expected
