"""A silent container is resumed soon, then at growing intervals, on each of its GPUs; and whether another process stops it or its kernels are long."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vgpu.gputime.watchdog import FORGET_S, MOST_S, PROOF, WAITS, ContainerWatchdog

FIRST_S = 0.1


def resumes(watchdog: ContainerWatchdog, gpu: str, until_s: float) -> list[float]:
    """One that is silent until then."""
    times = []
    while (at_s := watchdog.due_s(gpu, FIRST_S)) <= until_s:
        watchdog.resumed(gpu, at_s, FIRST_S)
        times.append(round(at_s, 3))
    return times


def test_a_silence_brings_fewer_heals_the_longer_it_lasts() -> None:
    assert resumes(ContainerWatchdog(0.0), "a", 2.0) == [0.1, 0.3, 0.7, 1.5]


def test_a_watchdog_of_one_gpu_leaves_the_others_due() -> None:
    watchdog = ContainerWatchdog(0.0)
    assert resumes(watchdog, "a", 1.0) == resumes(watchdog, "b", 1.0) == [0.1, 0.3, 0.7]


def test_a_report_begins_a_new_silence() -> None:
    watchdog = ContainerWatchdog(0.0)
    resumes(watchdog, "a", 5.0)
    watchdog.note_report(6.0)
    assert resumes(watchdog, "a", 6.5) == [6.1, 6.3]


@given(st.floats(FIRST_S, 60.0), st.floats(FIRST_S, 10.0))
def test_a_stopped_container_stands_still_no_longer_than_it_was_silent(stopped_at_s: float, first_s: float) -> None:
    watchdog, at_s = ContainerWatchdog(0.0), 0.0
    while (at_s := watchdog.due_s("a", first_s)) < stopped_at_s:
        watchdog.resumed("a", at_s, first_s)
    stood_s = at_s - stopped_at_s
    assert stood_s <= max(first_s, min(stopped_at_s + first_s, MOST_S)) + 1e-9


def lives(kernels_s: list[float], *, stopped: bool) -> ContainerWatchdog:
    """A container that reports the end of each kernel. `stopped`: another process stops it at its beginning, so that it ends that long after a resume."""
    watchdog, at_s = ContainerWatchdog(0.0), 0.0
    for kernel_s in kernels_s:
        end_s = at_s + kernel_s
        if stopped:
            at_s = watchdog.due_s("a", FIRST_S)
            watchdog.resumed("a", at_s, FIRST_S)
            end_s = at_s + kernel_s
        while (due_s := watchdog.due_s("a", FIRST_S)) <= end_s:
            watchdog.resumed("a", due_s, FIRST_S)
        watchdog.ended(end_s, FIRST_S)
        watchdog.note_report(end_s)
        at_s = end_s
    return watchdog


def test_work_that_ends_right_after_each_resume_was_stopped_by_another_process() -> None:
    assert not lives([0.004] * (PROOF - 1), stopped=True).stopped(0.0)
    proven = lives([0.004] * PROOF, stopped=True)
    assert proven.stopped(1.0)
    assert not proven.stopped(1.0 + FORGET_S), "nothing confirmed it since"


def test_a_silence_brings_a_resume_no_later_while_another_process_is_suspected() -> None:
    watchdog, waits, at_s = ContainerWatchdog(0.0), [], 0.0
    for _ in range(PROOF):
        due_s = watchdog.due_s("a", FIRST_S)
        waits.append(round(due_s - at_s, 3))
        watchdog.resumed("a", due_s, FIRST_S)
        watchdog.ended(due_s, FIRST_S)
        watchdog.note_report(due_s)
        at_s = due_s
    assert waits == [round(FIRST_S * part, 3) for part in WAITS]
    assert set(waits) == {0.05, 0.075, 0.1}


@given(st.floats(0.0, 5.0), st.integers(PROOF, 40))
@example(0.105, 40)
@example(0.08, 40)
def test_kernels_of_one_length_accuse_no_process(kernel_s: float, count: int) -> None:
    """Whatever the length: also just as long as the silence that brings a resume."""
    assert not lives([kernel_s] * count, stopped=False).stopped(0.0)


@given(
    st.sampled_from(
        [[(0.05, 0.11)], [(0.02, 0.12)], [(0.005, 0.005)] * 9 + [(0.05, 0.11)], [(0.075, 0.085)], [(0.1, 0.3)]]
    ),
    st.integers(0, 2**32),
)
def test_kernels_of_many_lengths_accuse_no_process(spans: list[tuple[float, float]], seed: int) -> None:
    random = Random(seed)
    kernels_s = [random.uniform(*random.choice(spans)) for _ in range(2000)]
    assert not lives(kernels_s, stopped=False).stopped(0.0)


@pytest.mark.parametrize(
    "cycle", [[0.105, 0.08, 0.055], [0.105, 0.055, 0.08], [0.105, 0.055], [0.08, 0.055, 0.105, 0.105]]
)
def test_alternating_kernels_accuse_no_process(cycle: list[float]) -> None:
    assert not lives(cycle * 200, stopped=False).stopped(0.0)


def slices(watchdog: ContainerWatchdog, count: int) -> list[float]:
    """One under a gpu-core of 20 %, silent from its first slice on: after how much time of its own it is resumed."""
    times = []
    for frame in range(count):
        begins_s, ends_s = frame * 0.05, frame * 0.05 + 0.01
        watchdog.record_switch(begins_s, on=True)
        while (at_s := max(begins_s, watchdog.due_s("a", FIRST_S))) < ends_s:
            watchdog.resumed("a", at_s, FIRST_S)
            times.append(round(frame * 0.01 + at_s - begins_s, 3))
        watchdog.record_switch(ends_s, on=False)
        assert watchdog.due_s("a", FIRST_S) == inf, "no resume while it is suspended"
    return times


def test_a_container_that_is_suspended_again_and_again_is_resumed_after_as_much_time_of_its_own() -> None:
    assert slices(ContainerWatchdog(0.0), 100) == resumes(ContainerWatchdog(0.0), "a", 1.0) == [0.1, 0.3, 0.7]


def test_a_report_begins_a_new_silence_also_between_two_slices() -> None:
    watchdog = ContainerWatchdog(0.0)
    watchdog.record_switch(0.09, on=False)
    watchdog.note_report(1.0)
    watchdog.record_switch(2.0, on=True)
    assert resumes(watchdog, "a", 2.5) == [2.1, 2.3]
