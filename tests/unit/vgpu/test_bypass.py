"""Who goes around the library, and who is ended for it: nobody of whom something speaks against it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.bypass import APART_S, POLICIES, QUIET_S, READINGS, Bypass, Patience, Policy, Share, Traces, action, bypassing

GPU = "GPU-00000000-0000-0000-0000-000000000001"
ANY = (True, False, None)
TABLE = {
    Traces(connected, mapped, mounted): connected is False and (mapped is False or mounted is False)
    for connected, mapped, mounted in product(ANY, ANY, ANY)
}
SEEN = {
    Traces(False, False, True): True,
    Traces(False, True, False): True,
    Traces(False, False, None): True,
    Traces(False, None, False): True,
    Traces(False, True, True): False,
    Traces(False, None, True): False,
    Traces(False, None, None): False,
    Traces(True, False, False): False,
    Traces(None, False, False): False,
}
"""In words: the module's table, and what nobody knows."""


@pytest.mark.parametrize(("traces", "goes_around"), SEEN.items(), ids=str)
def test_a_process_goes_around_the_library_where_nothing_of_it_is_there_and_it_never_connected(
    traces: Traces, *, goes_around: bool
) -> None:
    assert bypassing(traces) is goes_around
    assert TABLE[traces] is goes_around


@pytest.mark.parametrize("traces", TABLE, ids=str)
def test_what_nobody_knows_speaks_for_the_process(traces: Traces) -> None:
    assert bypassing(traces) is TABLE[traces]
    for known in ANY:
        assert not bypassing(Traces(True, known, known))
        assert not bypassing(Traces(None, known, known))


@given(st.sampled_from(POLICIES), st.floats(0, 1e6), st.booleans())
def test_nobody_is_ended_in_the_first_minute_or_where_processes_are_not_seen(
    policy: Policy, runs_s: float, visible: bool
) -> None:
    assert action(policy, runs_s=runs_s, visible=visible) == (policy if visible and runs_s >= QUIET_S else "report")


def over(patience: Patience, *held: Share, times: int = READINGS, first_s: float = 0.0) -> tuple[Bypass, ...]:
    """What the last of so many readings answers."""
    found: tuple[Bypass, ...] = ()
    for at in range(times):
        found = patience.look(first_s + at, {GPU: 100}, {GPU: held})
    return found


def test_it_takes_three_readings_in_a_row_beyond_limit_room_and_slack() -> None:
    patience, share = Patience(beyond_bytes=20), Share(7, 121, bypassing=True)
    assert over(patience, share, times=2) == ()
    assert patience.look(2, {GPU: 100}, {GPU: [Share(7, 120, bypassing=True)]}) == ()
    assert over(patience, share, times=2, first_s=3) == ()
    assert patience.look(5, {GPU: 100}, {GPU: [share]}) == (Bypass(GPU, 121, 100, (7,)),)
    assert patience.look(6, {GPU: 100}, {}) == (), "a GPU that was not read is not judged"
    assert patience.look(7, {GPU: 100}, {GPU: [share]}) == (Bypass(GPU, 121, 100, (7,)),)


def test_readings_that_are_hurried_count_once() -> None:
    patience, share = Patience(), Share(7, 200, bypassing=True)
    assert all(not patience.look(at * APART_S / 10, {GPU: 100}, {GPU: [share]}) for at in range(10))
    assert patience.look(APART_S, {GPU: 100}, {GPU: [share]}) == ()
    assert patience.look(2 * APART_S, {GPU: 100}, {GPU: [share]})


@pytest.mark.parametrize(
    ("held", "pids"),
    [
        ([Share(1, 500)], ()),
        ([Share(1, 500), Share(2, 10, bypassing=True)], (2,)),
        ([Share(1, 60), Share(2, 50, bypassing=True), Share(3, 70, bypassing=True)], (3, 2)),
        ([Share(1, 90), Share(2, 50, bypassing=True), Share(3, 70, bypassing=True)], (3, 2)),
        ([Share(1, 30), Share(2, 50, bypassing=True), Share(3, 70, bypassing=True)], (3,)),
    ],
    ids=["none bypasses", "a small one", "two", "all, and still over", "the largest is enough"],
)
def test_the_largest_that_bypass_are_named_until_the_rest_is_within_the_limit(
    held: list[Share], pids: tuple[int, ...]
) -> None:
    found = over(Patience(), *held)
    assert tuple(pid for one in found for pid in one.pids) == pids


SHARES = st.lists(st.builds(Share, st.integers(1, 9), st.integers(0, 200), st.booleans()), max_size=6)


@given(st.lists(SHARES, max_size=8), st.integers(0, 50))
def test_only_processes_that_bypass_are_named_and_only_after_three_readings_over(
    readings: list[list[Share]], beyond: int
) -> None:
    patience, in_a_row = Patience(beyond), 0
    for at, held in enumerate(readings):
        held = list({one.pid: one for one in held}.values())
        found = patience.look(float(at), {GPU: 100}, {GPU: held})
        total = sum(one.held_bytes for one in held)
        in_a_row = in_a_row + 1 if total > 100 + beyond else 0
        named = {pid for one in found for pid in one.pids}
        assert named <= {one.pid for one in held if one.bypassing}
        if in_a_row < READINGS:
            assert not found
        elif any(one.bypassing for one in held):
            rest = sum(one.held_bytes for one in held if one.pid not in named)
            assert rest <= 100 + beyond or not any(one.bypassing and one.pid not in named for one in held)
