"""When suspends count as without effect, and how a container leaves its gate again."""

from __future__ import annotations

from vgpu.gputime.suspend_effect import FIRST_S, MOST_S, STOOD_S, TIMES, SuspendEffect


def doubted(at_s: float = 0.0) -> SuspendEffect:
    effect = SuspendEffect()
    assert [effect.ended(at_s) for _ in range(TIMES)] == [*[False] * (TIMES - 1), True]
    assert effect.gates
    return effect


def test_work_that_ends_under_suspends_again_and_again_is_held_back() -> None:
    assert doubted().doubted


def test_time_suspended_with_work_that_does_not_end_is_evidence_for_suspends() -> None:
    effect = SuspendEffect()
    for _ in range(TIMES - 1):
        effect.ended(0.0)
    assert not effect.stood(STOOD_S), "nothing was held back"
    assert not effect.ended(1.0)
    assert not effect.gates


def test_a_trial_that_succeeds_opens_the_gate_for_good() -> None:
    effect = doubted()
    assert not effect.tries(FIRST_S - 0.1)
    assert effect.tries(FIRST_S)
    assert (effect.doubted, effect.gates) == (True, False)
    assert not effect.stood(STOOD_S / 2)
    assert effect.stood(STOOD_S / 2)
    assert (effect.doubted, effect.gates) == (False, False)
    assert not effect.tries(1e9)


def test_a_trial_ends_with_the_first_work_that_ends_and_the_next_one_comes_after_twice_as_long() -> None:
    effect, at_s, waits = doubted(), 0.0, []
    for _ in range(10):
        began_s = at_s
        while not effect.tries(at_s):
            at_s += 1.0
        waits.append(at_s - began_s)
        effect.stood(STOOD_S / 2)
        assert effect.ended(at_s)
        assert effect.gates
    assert waits == [min(FIRST_S * 2**n, MOST_S) for n in range(10)]


def test_reports_at_a_closed_gate_are_no_evidence() -> None:
    effect = doubted()
    assert not effect.stood(100.0)
    assert not effect.ended(1.0)
    assert effect.gates
