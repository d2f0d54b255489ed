"""Which processes bypass the library, and which are killed for it: none while there is another explanation."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.names import OVER_LIMIT_ACTIONS, OverLimitAction
from vgpu.memory.bypass import (
    APART_S,
    KNOWN_S,
    QUIET_S,
    READINGS,
    RETURNS,
    Bypass,
    BypassDetector,
    ProcessMemory,
    RepeatedKills,
    Traces,
    action_now,
    bypassing,
)

GPU = "GPU-00000000-0000-0000-0000-000000000001"
ANY = (True, False, None)
TABLE: dict[Traces, bool | None] = {
    Traces(connected, mapped, mounted): connected is False and (mapped is False or mounted is False)
    for connected, mapped, mounted in product(ANY, ANY, ANY)
}
TABLE |= {Traces(False, None, mounted): None for mounted in (True, None)}
SEEN = {
    Traces(False, False, True): True,
    Traces(False, True, False): True,
    Traces(False, False, None): True,
    Traces(False, None, False): True,
    Traces(False, True, True): False,
    Traces(False, None, True): None,
    Traces(False, None, None): None,
    Traces(True, False, False): False,
    Traces(None, False, False): False,
}
"""In words: the module's table, and unknown facts."""


@pytest.mark.parametrize(("traces", "goes_around"), SEEN.items(), ids=str)
def test_a_process_goes_around_the_library_where_nothing_of_it_is_there_and_it_never_connected(
    traces: Traces, *, goes_around: bool | None
) -> None:
    assert bypassing(traces) is goes_around
    assert TABLE[traces] is goes_around


@pytest.mark.parametrize("traces", TABLE, ids=str)
def test_unknown_facts_count_in_favour_of_the_process(traces: Traces) -> None:
    assert bypassing(traces) is TABLE[traces]
    for known in ANY:
        assert not bypassing(Traces(True, known, known))
        assert not bypassing(Traces(None, known, known))


@pytest.mark.parametrize(
    ("traces", "goes_around"),
    [
        (Traces(True, False, True, replaced_s=9, examined_s=11), True),
        (Traces(True, False, True, replaced_s=9, examined_s=9.5), False),
        (Traces(True, False, True, replaced_s=11, examined_s=11), False),
        (Traces(True, False, True), False),
        (Traces(True, True, True, replaced_s=9, examined_s=11), False),
        (Traces(True, None, True, replaced_s=9, examined_s=11), False),
        (Traces(True, True, False, replaced_s=9, examined_s=11), False),
        (Traces(None, False, False, replaced_s=9, examined_s=11), False),
    ],
    ids=[
        "without the library before and after the reading", "perhaps with it since", "perhaps loading when it was looked at", "not seen without it",
        "has it", "maps unread", "only the mount is gone", "it is unknown whether it connected",
    ],
)  # fmt: skip
def test_a_process_that_was_connected_bypasses_where_it_lacks_the_library_before_and_after_a_reading(
    traces: Traces, *, goes_around: bool
) -> None:
    assert bypassing(traces, 10) is goes_around


def test_a_process_that_was_not_examined_is_unknown() -> None:
    assert bypassing(None, 10) is None


@given(st.sampled_from(OVER_LIMIT_ACTIONS), st.floats(0, 1e6), st.booleans())
def test_no_process_is_killed_in_the_first_minute_or_if_processes_are_not_visible(
    configured: OverLimitAction, runs_s: float, visible: bool
) -> None:
    assert action_now(configured, runs_s=runs_s, visible=visible) == (
        configured if visible and runs_s >= QUIET_S else "report"
    )


def over(
    detector: BypassDetector, *held: ProcessMemory, times: int = READINGS, first_s: float = 0.0
) -> tuple[Bypass, ...]:
    """What the last of so many readings answers."""
    found: tuple[Bypass, ...] = ()
    for at in range(times):
        found = detector.evaluate(first_s + at, {GPU: 100}, {GPU: held})
    return found


def test_it_takes_three_readings_in_a_row_beyond_limit_room_and_slack() -> None:
    detector, process = BypassDetector(beyond_bytes=20), ProcessMemory(7, 121, bypassing=True)
    assert over(detector, process, times=2) == ()
    assert detector.evaluate(2, {GPU: 100}, {GPU: [ProcessMemory(7, 120, bypassing=True)]}) == ()
    assert over(detector, process, times=2, first_s=3) == ()
    assert detector.evaluate(5, {GPU: 100}, {GPU: [process]}) == (Bypass(GPU, 121, 100, (7,)),)
    assert detector.evaluate(6, {GPU: 100}, {}) == (), "a GPU that was not read is not judged"
    assert detector.evaluate(7, {GPU: 100}, {GPU: [process]}) == (Bypass(GPU, 121, 100, (7,)),)


def test_readings_that_are_hurried_count_once() -> None:
    detector, process = BypassDetector(), ProcessMemory(7, 200, bypassing=True)
    assert all(not detector.evaluate(at * APART_S / 10, {GPU: 100}, {GPU: [process]}) for at in range(10))
    assert detector.evaluate(APART_S, {GPU: 100}, {GPU: [process]}) == ()
    assert detector.evaluate(2 * APART_S, {GPU: 100}, {GPU: [process]})


@pytest.mark.parametrize(
    ("held", "pids"),
    [
        ([ProcessMemory(1, 500)], ()),
        ([ProcessMemory(1, 500), ProcessMemory(2, 10, bypassing=True)], (2,)),
        (
            [ProcessMemory(1, 60), ProcessMemory(2, 50, bypassing=True), ProcessMemory(3, 70, bypassing=True)],
            (3, 2),
        ),
        (
            [ProcessMemory(1, 90), ProcessMemory(2, 50, bypassing=True), ProcessMemory(3, 70, bypassing=True)],
            (3, 2),
        ),
        (
            [ProcessMemory(1, 30), ProcessMemory(2, 50, bypassing=True), ProcessMemory(3, 70, bypassing=True)],
            (3,),
        ),
    ],
    ids=["none bypasses", "a small one", "two", "all, and still over", "the largest is enough"],
)
def test_the_largest_that_bypass_are_named_until_the_rest_is_within_the_limit(
    held: list[ProcessMemory], pids: tuple[int, ...]
) -> None:
    found = over(BypassDetector(), *held)
    assert tuple(pid for one in found for pid in one.pids) == pids


ONE, UNSEEN, INNOCENT, NOBODY = (
    ProcessMemory(1, 200, bypassing=True),
    ProcessMemory(2, 200, bypassing=None),
    ProcessMemory(3, 200),
    ProcessMemory(4, 9),
)


@pytest.mark.parametrize(
    ("readings", "ends"),
    [
        ([ONE, ProcessMemory(5, 200, bypassing=True), ProcessMemory(6, 300, bypassing=True)], (6,)),
        ([ONE, INNOCENT, ONE, ONE], ()),
        ([INNOCENT, INNOCENT, INNOCENT, ONE], ()),
        ([ONE, NOBODY, ONE, ONE], ()),
        ([ONE, UNSEEN, ONE, UNSEEN, UNSEEN, UNSEEN, ONE], (1,)),
        ([ONE, ONE, UNSEEN, UNSEEN, UNSEEN, UNSEEN, ONE], ()),
        ([ONE, ONE, ONE, INNOCENT], ()),
        ([UNSEEN] * 9, ()),
    ],
    ids=[
        "another one each time", "none of them bypasses in between", "the first that bypasses", "within the limit in between",
        "some are gone before they are examined", "too many are", "an innocent one at last", "none was ever examined",
    ],
)  # fmt: skip
def test_the_container_is_judged_over_readings_whichever_process_bypasses(
    readings: list[ProcessMemory], ends: tuple[int, ...]
) -> None:
    detector, found = BypassDetector(), ()
    for at, one in enumerate(readings):
        found = detector.evaluate(at, {GPU: 100}, {GPU: [one]})
    assert tuple(pid for one in found for pid in one.pids) == ends


@pytest.mark.parametrize(("later_s", "ends"), [(1, (7,)), (KNOWN_S - 1, (7,)), (KNOWN_S + 1, ())])
def test_a_container_that_is_known_to_bypass_is_so_for_a_minute(later_s: float, ends: tuple[int, ...]) -> None:
    detector = BypassDetector()
    assert over(detector, ONE)
    assert detector.evaluate(READINGS, {GPU: 100}, {GPU: []}) == ()
    assert (
        detector.evaluate(READINGS - 1 + later_s, {GPU: 100}, {GPU: [ProcessMemory(8, 90), ProcessMemory(9, 90)]}) == ()
    )
    found = detector.evaluate(
        READINGS - 1 + later_s + 0.1, {GPU: 100}, {GPU: [ProcessMemory(7, 200, bypassing=True), INNOCENT]}
    )
    assert tuple(pid for one in found for pid in one.pids) == ends


def test_a_reading_is_judged_again_as_more_becomes_known_of_it() -> None:
    detector = BypassDetector()
    for at in range(READINGS):
        assert detector.evaluate(at, {GPU: 100}, {GPU: [UNSEEN]}) == ()
        found = detector.evaluate(at, {GPU: 100}, {GPU: [replace(UNSEEN, bypassing=True)]})
        assert bool(found) is (at == READINGS - 1)
        assert detector.evaluate(at, {GPU: 100}, {GPU: [replace(UNSEEN, bypassing=True)]}) == found, "it counts once"


SHARES = st.lists(
    st.builds(ProcessMemory, st.integers(1, 9), st.integers(0, 200), st.sampled_from([True, False, None])),
    max_size=6,
)


def counted(readings: list[list[ProcessMemory]], most: int) -> int:
    """Readings in a row that count, the last one first, by the module's words."""
    count = blanks = 0
    for held in reversed(readings):
        if sum(one.held_bytes for one in held) <= most:
            break
        if any(one.bypassing for one in held):
            count, blanks = count + 1, 0
        elif all(one.bypassing is False for one in held) or blanks == READINGS:
            break
        else:
            blanks += 1
    return count


@given(st.lists(SHARES, max_size=8), st.integers(0, 50))
def test_only_processes_that_bypass_are_named_and_only_after_three_readings_over(
    readings: list[list[ProcessMemory]], beyond: int
) -> None:
    detector, known = BypassDetector(beyond), False
    readings = [list({one.pid: one for one in held}.values()) for held in readings]
    for at, held in enumerate(readings):
        found = detector.evaluate(float(at), {GPU: 100}, {GPU: held})
        total = sum(one.held_bytes for one in held)
        bypasses = any(one.bypassing for one in held)
        known |= bypasses and counted(readings[: at + 1], 100 + beyond) >= READINGS
        named = {pid for one in found for pid in one.pids}
        assert named <= {one.pid for one in held if one.bypassing}
        if not known or total <= 100 + beyond:
            assert not found
        elif bypasses:
            rest = sum(one.held_bytes for one in held if one.pid not in named)
            assert rest <= 100 + beyond or not any(one.bypassing and one.pid not in named for one in held)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 19.0, 20.0, 29.0, 30.0, 59.0, 60.0, 61.0]), max_size=12))
def test_a_container_is_ended_where_three_readings_of_a_minute_ended_processes(pauses_s: list[float]) -> None:
    """A pause of 0 is the same reading, judged again."""
    returns, ends_s, at_s = RepeatedKills(), set[float](), 100.0
    for pause_s in pauses_s:
        at_s += pause_s
        ends_s.add(at_s)
        of_a_minute = [then_s for then_s in ends_s if at_s - KNOWN_S <= then_s]
        assert returns.ended(at_s) is (len(of_a_minute) >= RETURNS)
