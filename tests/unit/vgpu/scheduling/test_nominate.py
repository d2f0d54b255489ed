"""Which pods are nominated ahead of their scheduling cycle, in which order, and when none is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.request import PodRequest
from vgpu.scheduling.nominate import (
    AHEAD,
    BACKLOG,
    FRONT,
    PAUSE_S,
    TRIED,
    NominationSuccess,
    WaitingPod,
    WaitingQueue,
    due,
)

REQUEST = PodRequest(())


def waiting(uid: str, priority: int = 0) -> WaitingPod[None]:
    return WaitingPod(uid, f"default/{uid}", priority, REQUEST, None)


def line_of(count: int) -> WaitingQueue[None]:
    line = WaitingQueue[None]()
    for at in range(count):
        line.join(waiting(f"p{at}"))
    return line


STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(-2, 2)), max_size=60)


@given(STEPS)
def test_the_line_is_as_sorted_by_priority_and_then_by_coming(steps: list[tuple[bool, int, int]]) -> None:
    line, slow = WaitingQueue[None](), dict[str, int]()
    for joins, number, priority in steps:
        uid = f"p{number}"
        if joins:
            line.join(waiting(uid, priority))
            slow.setdefault(uid, priority)
        else:
            assert line.leave(uid) is (slow.pop(uid, None) is not None)
        assert (uid in line) is (uid in slow)
        assert [one.uid for one in line] == sorted(
            slow, key=lambda uid: -slow[uid]
        )  # sorting keeps the order of coming
        assert len(line) == len(slow)


def test_few_that_wait_are_left_alone() -> None:
    assert due(line_of(BACKLOG - 1), 0) is None
    assert due(line_of(1), BACKLOG - 2) is None
    assert due(line_of(1), BACKLOG - 1)


def test_the_first_in_line_are_left_to_the_scheduler_unless_they_are_behind_planned_ones() -> None:
    line = line_of(BACKLOG)
    for ahead in range(FRONT + 3):
        one = due(line, ahead)
        assert one
        assert one.uid == f"p{max(0, FRONT - ahead)}"


def test_no_more_are_planned_than_the_scheduler_comes_to_soon() -> None:
    assert due(line_of(BACKLOG), AHEAD - 1)
    assert due(line_of(BACKLOG), AHEAD) is None


@given(st.lists(st.booleans(), max_size=3 * TRIED))
def test_nominations_pause_while_most_are_of_no_use(outcomes: list[bool]) -> None:
    trust, tried, until_s = NominationSuccess(), list[bool](), -1.0
    for now_s, useful in enumerate(outcomes):
        trust.note(now_s, useful=useful)
        tried = [*tried, useful][-TRIED:]
        if len(tried) == TRIED and tried.count(False) > TRIED // 2:
            tried, until_s = [], now_s + PAUSE_S
        assert trust.paused(now_s) is (now_s < until_s)
    assert not trust.paused(len(outcomes) + PAUSE_S)
