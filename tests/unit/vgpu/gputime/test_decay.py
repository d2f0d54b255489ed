"""Reported work ends when it may run and the driver sees nothing of it; unknown is not idle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vgpu.gputime.decay import ENOUGH_S, LOOKS, Decay


def decay(kernels_only: bool = True) -> Decay:
    made = Decay()
    made.word(0.0, kernels_only=kernels_only)
    return made


def test_work_that_nobody_sees_ends_after_a_second_and_two_looks() -> None:
    one = decay()
    assert not one.look(1.0, 0.0)
    assert one.look(2.0, 0.0)
    assert one.ended
    assert not one.look(3.0, 0.0), "said once"


def test_a_container_that_was_suspended_for_five_seconds_still_works() -> None:
    one = decay()
    assert not any(one.look(0.3, 0.0) for _ in range(5))
    assert not one.ended


def test_copies_fills_and_waits_do_not_end_here() -> None:
    one = decay(kernels_only=False)
    assert not any(one.look(float(second), 0.0) for second in range(60))


def test_a_gpu_that_does_not_count_by_process_is_unknown_and_not_idle() -> None:
    one = decay()
    assert not any(one.look(float(second), None) for second in range(60))


def test_a_look_that_could_not_see_begins_anew() -> None:
    one = decay()
    one.look(1.0, 0.0)
    one.look(2.0, None)
    assert not one.look(3.0, 0.0)
    assert one.look(4.0, 0.0)


def test_kernels_below_one_percent_stay_as_each_launch_is_a_word() -> None:
    one = decay()
    for second in range(60):
        one.word(float(second), kernels_only=True)
        assert not one.look(second + 1.0, 0.0)


def test_a_word_ends_the_end() -> None:
    one = decay()
    one.look(1.0, 0.0)
    one.look(2.0, 0.0)
    one.word(2.0, kernels_only=True)
    assert not one.ended
    assert not one.look(2.9, 0.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["word", "other", "blind", "seen", "nothing"]), st.floats(0.0, 2.0)), max_size=40
    )
)
def test_work_ends_exactly_when_the_last_looks_saw_nothing_for_long_enough(steps: list[tuple[str, float]]) -> None:
    one, reported_s = Decay(), 0.0
    history: list[tuple[str, float]] = []
    for what, passed_s in steps:
        reported_s += passed_s
        history.append((what, reported_s))
        match what:
            case "word" | "other":
                one.word(reported_s, kernels_only=what == "word")
            case _:
                one.look(reported_s, {"blind": None, "seen": 0.5, "nothing": 0.0}[what])
        # slowly: the tail of looks that saw nothing, after the last that resets
        last = next((n for n in range(len(history) - 1, -1, -1) if history[n][0] in {"word", "other"}), None)
        ended = False
        if last is not None and history[last][0] == "word":
            from_s, looks = history[last][1], 0
            for kind, at_s in history[last + 1 :]:
                looks = looks + 1 if kind == "nothing" else 0
                if kind != "nothing" and not ended:
                    from_s = at_s
                ended = ended or (looks >= LOOKS and at_s - from_s >= ENOUGH_S)
        assert one.ended is ended
