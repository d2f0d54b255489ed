"""The heat class of a GPU, through any sequence of readings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.health.conditions import Reading
from vgpu.health.heat import (
    CHANGE_S,
    LEAST_S,
    SAMPLE_S,
    STALE_S,
    WINDOW_S,
    HeatSample,
    NodeHeat,
    heat_class,
    with_reading,
)

LIMIT_MW = 700_000


def reading(percent: int | None, headroom_c: int | None = 50) -> Reading:
    power_mw = None if percent is None else LIMIT_MW * percent // 100
    return Reading(power_mw=power_mw, power_limit_mw=LIMIT_MW, headroom_c=headroom_c)


class Node:
    """A GPU that is read every 5 s."""

    def __init__(self) -> None:
        self.heat, self.now_s, self.changes = NodeHeat(), 1000.0, list[float]()

    def passes(self, seconds: float, *shown: Reading) -> str:
        """What the GPU shows meanwhile, in turns; nothing = it is not read. Returns its class then."""
        for number in range(int(seconds / 5)):
            self.now_s += 5
            if shown:
                self.heat.read("one", shown[number % len(shown)], self.now_s)
            if self.heat.changed(self.now_s):
                self.changes.append(self.now_s)
        return self.heat.classes.get("one", "normal")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (reading(10), "cool"),
        (reading(60), "normal"),
        (reading(99), "hot"),
        (reading(60, 5), "hot"),
        (reading(10, 22), "normal"),
        (reading(99, None), "hot"),
        (reading(10, None), "cool"),
        (reading(None), "normal"),
        (Reading(power_mw=700_000, headroom_c=2), "normal"),
        (Reading(power_mw=700_000, power_limit_mw=0, headroom_c=2), "normal"),
    ],
)
def test_the_average_of_power_and_headroom_decides(shown: Reading, expected: str) -> None:
    assert Node().passes(WINDOW_S, shown) == expected


def test_a_class_ends_at_another_value_than_it_begins_at() -> None:
    hot = Node()
    assert hot.passes(WINDOW_S, reading(80)) == "normal"
    assert hot.passes(2 * WINDOW_S, reading(90)) == "hot"
    assert hot.passes(2 * WINDOW_S, reading(80)) == "hot"
    assert hot.passes(2 * WINDOW_S, reading(70)) == "normal"
    cool = Node()
    assert cool.passes(WINDOW_S, reading(45)) == "normal"
    assert cool.passes(2 * WINDOW_S, reading(30)) == "cool"
    assert cool.passes(2 * WINDOW_S, reading(45, 21)) == "cool"
    assert cool.passes(2 * WINDOW_S, reading(45, 10)) == "normal"


def test_a_burst_of_work_changes_nothing() -> None:
    node = Node()
    assert node.passes(WINDOW_S, reading(10)) == "cool"
    assert node.passes(60, reading(100, 5)) == "cool"
    assert len(node.changes) == 1


def test_a_gpu_that_was_observed_for_a_moment_is_normal() -> None:
    assert Node().passes(LEAST_S - 5, reading(99)) == "normal"
    assert Node().passes(LEAST_S + 10, reading(99)) == "hot"


def test_a_gpu_that_is_not_read_becomes_normal_and_has_its_class_again_afterwards() -> None:
    node = Node()
    assert node.passes(WINDOW_S, reading(99)) == "hot"
    assert node.passes(STALE_S, *()) == "hot"
    assert node.passes(10, *()) == "normal"
    assert node.passes(CHANGE_S + 5, reading(99)) == "hot"
    node.passes(3 * WINDOW_S, *())
    assert node.passes(LEAST_S - 10, reading(99)) == "normal", "what it showed long ago is forgotten"


def test_a_gpu_that_is_gone_has_no_class() -> None:
    node = Node()
    node.passes(WINDOW_S, reading(99))
    node.heat.keep_only(())
    assert node.passes(5) == "normal"


def slow_class(before: str, shown: list[tuple[float, Reading]], at_s: float) -> str:
    """By the docs' table."""
    kept = list[tuple[float, Reading]]()
    for one_s, one in shown:
        if one.power_mw is not None and (not kept or one_s - kept[-1][0] >= SAMPLE_S):
            kept.append((one_s, one))
    kept = [(one_s, one) for one_s, one in kept if at_s - one_s <= 600]
    if not kept or at_s - kept[-1][0] > 60 or at_s - kept[0][0] < 120:
        return "normal"
    percent = sum(100 * (one.power_mw or 0) / LIMIT_MW for _, one in kept) / len(kept)
    degrees = [one.headroom_c for _, one in kept if one.headroom_c is not None]
    below_c = sum(degrees) / len(degrees) if degrees else 1000.0
    if percent >= 85 or below_c <= 8 or (before == "hot" and (percent >= 75 or below_c < 12)):
        return "hot"
    if (percent <= 40 and below_c >= 25) or (before == "cool" and percent <= 50 and below_c >= 20):
        return "cool"
    return "normal"


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1.0, 5.0, 30.0, 100.0, 700.0]),
            st.integers(1, 12),
            st.sampled_from([0, 30, 45, 60, 80, 90, 100, None]),
            st.sampled_from([None, 2, 10, 15, 22, 40]),
        ),
        max_size=12,
    )
)
def test_classes_follow_the_table_and_change_at_most_once_a_minute(
    steps: list[tuple[float, int, int | None, int | None]],
) -> None:
    heat, now_s, changes = NodeHeat(), 0.0, list[float]()
    shown = list[tuple[float, Reading]]()
    for step_s, times, percent, headroom_c in steps:
        for _ in range(times):
            now_s += step_s
            one = reading(percent, headroom_c)
            heat.read("one", one, now_s)
            shown.append((now_s, one))
            before = heat.classes.get("one", "normal")
            may = not changes or now_s - changes[-1] >= CHANGE_S
            expected = slow_class(before, shown, now_s) if may else before
            assert heat.changed(now_s) == (expected != before)
            assert heat.classes.get("one", "normal") == expected
            if expected != before:
                changes.append(now_s)


@given(st.lists(st.floats(0.1, 20), max_size=400))
def test_a_history_has_a_bound(steps: list[float]) -> None:
    history, now_s = tuple[HeatSample, ...](), 0.0
    for step_s in steps:
        now_s += step_s
        history = with_reading(history, reading(50), now_s)
    assert len(history) <= WINDOW_S / SAMPLE_S + 1
    assert heat_class("normal", history, now_s) == "normal"
