"""The context measure: never less than NVML's count, and exact once the records do not change."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.memory.context import CALM_S, ContextMeasure


def test_a_reading_alone_charges_what_no_lease_explains() -> None:
    measure = ContextMeasure()
    measure.moved(100)
    measure.read(150, used_bytes=0, leased_bytes=100, at_s=1)
    assert measure.bytes == 50


def test_an_exact_reading_charges_what_no_allocation_explains() -> None:
    measure = ContextMeasure()
    measure.read(150, used_bytes=20, leased_bytes=100, at_s=1, exact=True)
    assert measure.bytes == 130


def test_a_reading_becomes_exact_when_the_records_have_stood_still_around_it() -> None:
    measure = ContextMeasure()
    measure.moved(100)
    measure.read(150, used_bytes=20, leased_bytes=100, at_s=1)
    measure.read(150, used_bytes=20, leased_bytes=100, at_s=1 + CALM_S - 0.01)
    assert measure.bytes == 50
    measure.read(150, used_bytes=20, leased_bytes=100, at_s=1 + CALM_S)
    assert measure.bytes == 130


def test_allocations_between_statements_are_not_taken_for_contexts() -> None:
    measure = ContextMeasure(bytes=30)
    for second in range(20):
        leased = 100 * second
        measure.moved(leased)
        measure.read(30 + leased, used_bytes=0, leased_bytes=leased, at_s=second)
        assert measure.bytes == 30


def test_a_lease_returned_before_the_reading_arrives_explains_it_still() -> None:
    measure = ContextMeasure(bytes=30)
    measure.moved(500)
    measure.read(530, used_bytes=500, leased_bytes=500, at_s=1)
    measure.moved(500)  # it returns 500 after NVML was read and before that is known
    measure.read(530, used_bytes=0, leased_bytes=0, at_s=2)
    assert measure.bytes == 30


def test_what_is_held_for_a_context_that_is_being_made_stays() -> None:
    measure = ContextMeasure(bytes=30, counts_from_s=5)
    measure.read(0, used_bytes=0, leased_bytes=0, at_s=4)
    assert measure.bytes == 30
    measure.read(40, used_bytes=0, leased_bytes=0, at_s=4.5)
    assert measure.bytes == 40
    measure.read(35, used_bytes=0, leased_bytes=0, at_s=5)
    assert measure.bytes == 35


@pytest.mark.parametrize("exact", [False, True])
def test_managed_memory_which_nvml_does_not_list_is_not_taken_for_a_smaller_context(exact: bool) -> None:
    measure = ContextMeasure(bytes=518)
    measure.moved(3000)
    for second in range(5):
        measure.read(518 + 100, used_bytes=3100, leased_bytes=3100, at_s=second, exact=exact, made_bytes=518)
        assert measure.bytes == 518


def test_it_is_still_from_an_exact_reading_until_the_records_move() -> None:
    measure = ContextMeasure()
    for at_s, still in ((1.0, False), (1 + CALM_S - 0.01, False), (1 + CALM_S, True), (9.0, True)):
        measure.read(150, used_bytes=20, leased_bytes=100, at_s=at_s)
        assert measure.still == still
    measure.moved(100)
    assert not measure.still


def test_contexts_are_never_charged_more_than_nvml_counts_of_the_process() -> None:
    measure = ContextMeasure(bytes=518)
    measure.read(400, used_bytes=3000, leased_bytes=3000, at_s=1, exact=True, made_bytes=518)
    assert measure.bytes == 400


def test_a_context_that_is_gone_costs_nothing() -> None:
    measure = ContextMeasure(bytes=30)
    measure.read(0, used_bytes=0, leased_bytes=100, at_s=1)
    assert measure.bytes == 0


@dataclass
class Process:
    """The true sizes, and the stated ones."""

    context: int
    used: int = 0
    leased: int = 0
    stated: int = 0


STEPS = st.lists(st.tuples(st.sampled_from(["alloc", "free", "state", "lie", "return", "grow", "read"]), st.integers(0, 200)))  # fmt: skip


@given(st.integers(0, 100), STEPS)
def test_lease_and_context_are_never_less_than_what_nvml_saw(context: int, steps: list[tuple[str, int]]) -> None:
    process, measure, now, most = Process(context), ContextMeasure(), 0.0, 0
    for what, amount in steps:
        now += 0.3
        if what == "alloc":
            process.used += amount
            if process.used > process.leased:
                process.leased = process.used + amount % 7
                measure.moved(process.leased)
        elif what == "free":
            process.used -= min(amount, process.used)
        elif what in ("state", "lie"):
            process.stated = process.used if what == "state" else min(amount, process.leased)
            measure.moved(process.leased)
        elif what == "return":
            measure.moved(process.leased)
            process.leased = process.used
            process.stated = min(process.stated, process.leased)
        elif what == "grow":
            process.context += amount
        else:
            seen = process.used + process.context
            measure.read(seen, process.stated, process.leased, now)
            assert seen - most <= measure.bytes <= seen
        most = max(most, process.leased)
    for _ in range(2):  # an honest process at rest
        now += CALM_S + 0.1
        if process.stated != process.used:
            measure.moved(process.leased)
            process.stated = process.used
        measure.read(process.used + process.context, process.stated, process.leased, now)
    now += CALM_S + 0.1
    measure.read(process.used + process.context, process.stated, process.leased, now)
    assert measure.bytes == process.context


@pytest.mark.parametrize("used", [0, 60, 100])
def test_a_process_that_misstates_its_use_gains_nothing(used: int) -> None:
    measure = ContextMeasure()
    measure.moved(100)
    for second in range(4):
        measure.read(180, used_bytes=used, leased_bytes=100, at_s=second * CALM_S)
        assert 100 + measure.bytes >= 180


def test_a_bound_stays_until_a_reading_after_the_calls_it_stands_for() -> None:
    measure = ContextMeasure(bytes=30)
    measure.bound(16)
    measure.read(30, used_bytes=0, leased_bytes=0, at_s=1)
    assert measure.bytes == 46
    measure.settles_from_s = 2
    measure.read(35, used_bytes=0, leased_bytes=0, at_s=1.9)
    assert measure.bytes == 46, "that was read before"
    measure.read(35, used_bytes=0, leased_bytes=0, at_s=2)
    assert (measure.bytes, measure.bound_bytes) == (35, 0)


def test_what_a_reading_sees_of_bounded_calls_is_not_charged_beside_the_bound() -> None:
    measure = ContextMeasure(bytes=30)
    measure.bound(16)
    measure.read(40, used_bytes=0, leased_bytes=0, at_s=1)
    assert (measure.bytes, measure.bound_bytes) == (46, 6)
    measure.read(50, used_bytes=0, leased_bytes=0, at_s=2)
    assert (measure.bytes, measure.bound_bytes) == (50, 0)


def test_a_bound_is_settled_though_the_records_never_stand_still() -> None:
    """A lease that is not used hides what the calls took: then what is stated decides, and the bound at most."""
    measure = ContextMeasure(bytes=30)
    for second in range(1, 20):
        measure.bound(16)
        measure.settles_from_s = second
        measure.moved(1000)
        measure.read(32 + 500, used_bytes=500, leased_bytes=1000, at_s=second)
        assert measure.bytes == 32
    measure.bound(16)
    measure.settles_from_s = 20
    measure.moved(1000)
    measure.read(999, used_bytes=500, leased_bytes=1000, at_s=20)
    assert measure.bytes == 32 + 16, "an allocation that is not stated yet is not taken for code beyond the bound"


@given(
    st.lists(
        st.tuples(st.sampled_from(["bound", "made", "read"]), st.integers(0, 50), st.integers(0, 100)),
        max_size=30,
    )
)
def test_with_bounds_lease_and_contexts_are_never_less_than_what_nvml_saw(steps: list[tuple[str, int, int]]) -> None:
    measure, leased = ContextMeasure(), 100
    measure.moved(leased)
    for second, (what, amount, used) in enumerate(steps, 1):
        before = measure.bytes
        match what:
            case "bound":
                measure.bound(amount)
                assert measure.bytes == before + amount
            case "made":
                measure.settles_from_s = second
            case _:
                measure.read(used + amount, used_bytes=used, leased_bytes=leased, at_s=second)
                assert measure.bytes + leased >= used + amount
                assert 0 <= measure.bound_bytes <= measure.bytes
                assert measure.bound_bytes == 0 or measure.settles_from_s > second
