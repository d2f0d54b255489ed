"""Slots of the host pool against the obvious slow version: a list of grains, each free or not."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vgpu.api.errors import Refused
from vgpu.memory.swap_slots import GRAIN_BYTES, Slot, SwapSlots
from vgpu.protocol import copier

GRAINS = 24


def grains(slot: Slot) -> range:
    return range(slot.offset // GRAIN_BYTES, slot.end // GRAIN_BYTES)


class SlowSlots:
    """One boolean a grain."""

    def __init__(self, count: int) -> None:
        self.used = [False] * count

    def free_ranges(self) -> list[tuple[int, int]]:
        """(grains, first grain) of each."""
        text = "".join("u" if used else "f" for used in self.used)
        return [(len(found.group()), found.start()) for found in re.finditer("f+", text)]

    def best(self, count: int) -> int | None:
        """Where a slot of so many grains goes."""
        fitting = [one for one in self.free_ranges() if one[0] >= count]
        return min(fitting)[1] if fitting else None

    def mark(self, slot: Slot, used: bool) -> None:
        for grain in grains(slot):
            assert self.used[grain] is not used
            self.used[grain] = used


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, GRAINS + 1)),
        st.tuples(st.just("release"), st.integers(0, GRAINS)),
        st.tuples(st.just("take_at"), st.tuples(st.integers(0, GRAINS), st.integers(1, 4))),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(STEPS)
def test_slots_are_chosen_and_joined_as_in_a_list_of_grains(steps: list[tuple[str, object]]) -> None:
    fast, slow, held = SwapSlots(GRAINS * GRAIN_BYTES), SlowSlots(GRAINS), list[Slot]()
    for what, argument in steps:
        if what == "take":
            assert isinstance(argument, int)
            slot, at = fast.take(argument * GRAIN_BYTES), slow.best(argument)
            assert slot == (None if at is None else Slot(at * GRAIN_BYTES, argument * GRAIN_BYTES))
            if slot is not None:
                slow.mark(slot, True)
                held.append(slot)
        elif what == "take_at":
            assert isinstance(argument, tuple)
            first, count = argument
            slot = Slot(first * GRAIN_BYTES, count * GRAIN_BYTES)
            if first + count <= GRAINS and not any(slow.used[grain] for grain in grains(slot)):
                fast.take_at(slot)
                slow.mark(slot, True)
                held.append(slot)
            else:
                with pytest.raises(Refused, match="is not free in the pool"):
                    fast.take_at(slot)
        elif held:
            assert isinstance(argument, int)
            slot = held.pop(argument % len(held))
            fast.release(slot)
            slow.mark(slot, False)
        assert fast.slots() == sorted(held)
        assert fast.free_bytes == slow.used.count(False) * GRAIN_BYTES


def test_a_pool_whose_slots_are_released_is_one_range_again() -> None:
    pool = SwapSlots(8 * GRAIN_BYTES)
    taken = [pool.take(GRAIN_BYTES) for _ in range(8)]
    assert pool.take(GRAIN_BYTES) is None
    for slot in taken[::2] + taken[1::2]:
        assert slot is not None
        pool.release(slot)
    assert pool.take(8 * GRAIN_BYTES) == Slot(0, 8 * GRAIN_BYTES)


@pytest.mark.parametrize("size", [0, -GRAIN_BYTES, GRAIN_BYTES + 1])
def test_a_size_that_is_no_multiple_of_the_grain_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"of {size} bytes: it must be a positive multiple of {GRAIN_BYTES}"):
        SwapSlots(GRAIN_BYTES).take(size)
    with pytest.raises(ValueError, match="a pool of"):
        SwapSlots(size)


def test_a_slot_that_begins_inside_a_grain_is_refused() -> None:
    with pytest.raises(ValueError, match="a slot at 4096: it must be a multiple of 2097152"):
        SwapSlots(4 * GRAIN_BYTES).take_at(Slot(4096, GRAIN_BYTES))


def test_the_copier_has_the_same_grain() -> None:
    assert GRAIN_BYTES == copier.GRAIN_BYTES


def test_a_slot_that_is_not_in_use_is_not_released() -> None:
    pool = SwapSlots(4 * GRAIN_BYTES)
    slot = pool.take(2 * GRAIN_BYTES)
    assert slot is not None
    for wrong in (Slot(0, GRAIN_BYTES), Slot(GRAIN_BYTES, GRAIN_BYTES), Slot(2 * GRAIN_BYTES, 2 * GRAIN_BYTES)):
        with pytest.raises(Refused, match="is not in use"):
            pool.release(wrong)
    pool.release(slot)
    with pytest.raises(Refused, match="is not in use"):
        pool.release(slot)
