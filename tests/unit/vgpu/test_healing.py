"""A silent container is healed soon, then ever more seldom, on each of its cards."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vgpu.healing import MOST_S, Healing

FIRST_S = 0.1


def heals(healing: Healing, card: str, until_s: float) -> list[float]:
    """One that is silent until then."""
    times = []
    while (at_s := healing.due_s(card, FIRST_S)) <= until_s:
        healing.healed(card, at_s, FIRST_S)
        times.append(round(at_s, 3))
    return times


def test_a_silence_brings_fewer_heals_the_longer_it_lasts() -> None:
    assert heals(Healing(0.0), "a", 2.0) == [0.1, 0.3, 0.7, 1.5]


def test_a_heal_of_one_card_leaves_the_others_due() -> None:
    healing = Healing(0.0)
    assert heals(healing, "a", 1.0) == heals(healing, "b", 1.0) == [0.1, 0.3, 0.7]


def test_a_word_begins_anew() -> None:
    healing = Healing(0.0)
    heals(healing, "a", 5.0)
    healing.heard(6.0)
    assert heals(healing, "a", 6.5) == [6.1, 6.3]


@given(st.floats(FIRST_S, 60.0), st.floats(FIRST_S, 10.0))
def test_who_is_stopped_stands_still_no_longer_than_it_was_silent(stopped_at_s: float, first_s: float) -> None:
    healing, at_s = Healing(0.0), 0.0
    while (at_s := healing.due_s("a", first_s)) < stopped_at_s:
        healing.healed("a", at_s, first_s)
    stood_s = at_s - stopped_at_s
    assert stood_s <= max(first_s, min(stopped_at_s + first_s, MOST_S)) + 1e-9
