"""The charge of contexts: estimated, measured, restated, and the bound of their growth."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.errors import BadDocument
from vgpu.memory.ledger import Ledger
from vgpu.memory.recalls import RECALLS
from vgpu.memory.records import Denied, Granted, Recalled

ONE, TWO, THREE = 1, 2, 3


def ledger(limit: int, *processes: int) -> Ledger:
    made = Ledger([limit])
    for process in processes:
        made.join(process)
    return made


def test_a_context_is_held_before_it_is_made_and_is_no_lease() -> None:
    book = ledger(1000, ONE)
    assert book.begin_context(ONE, 0, 7, 300, 0) == [Granted(ONE, 0, 7, 300)]
    assert (book.leased_bytes(0), book.context_bytes(0), book.unleased_bytes(0)) == (0, 300, 700)
    assert book.request(ONE, 0, 8, 701, 701, 0) == [Denied(ONE, 0, 8)]
    assert book.request(ONE, 0, 9, 700, 700, 0) == [Granted(ONE, 0, 9, 700)]


def test_memory_for_a_context_is_recalled_from_siblings() -> None:
    book = ledger(1000, ONE, TWO)
    book.request(ONE, 0, 1, 800, 800, 0)
    (wanted,) = book.begin_context(TWO, 0, 1, 300, 0)
    assert wanted == Recalled(ONE, 0, wanted.recall, 100)  # type: ignore[union-attr]
    assert book.give_back(ONE, 0, 100, wanted.recall, 0.01) == [Granted(TWO, 0, 1, 300)]  # type: ignore[union-attr]


def test_a_context_that_does_not_fit_is_refused_and_leases_nothing() -> None:
    book = ledger(1000, ONE, TWO)
    book.request(ONE, 0, 1, 800, 800, 0)
    book.begin_context(TWO, 0, 1, 300, 0)
    assert book.expire(1) == [Denied(TWO, 0, 1)]
    assert book.context_bytes(0) == 0


def test_what_nvml_measures_replaces_what_was_held() -> None:
    book = ledger(1000, ONE)
    book.begin_context(ONE, 0, 1, 300, 0)
    book.measure(ONE, 0, 0, at_s=0.5, now_s=0.6)
    assert book.context_bytes(0) == 300, "it is being made"
    book.end_context(ONE, 0, 1.0)
    book.measure(ONE, 0, 250, at_s=0.9, now_s=1.1)
    assert book.context_bytes(0) == 300, "that reading began before it was made"
    book.measure(ONE, 0, 250, at_s=1.0, now_s=1.1)
    assert book.context_bytes(0) == 250


def test_a_context_that_shrinks_frees_memory_for_a_waiting_request() -> None:
    book = ledger(1000, ONE, TWO)
    book.begin_context(ONE, 0, 1, 600, 0)
    book.end_context(ONE, 0, 0)
    book.request(ONE, 0, 2, 10, 10, 0)
    book.request(TWO, 0, 1, 500, 500, 1)
    assert book.measure(ONE, 0, 310, at_s=1, now_s=1.01) == [Granted(TWO, 0, 1, 500)]


def test_a_context_that_grew_past_the_limit_stands_and_nothing_more_is_leased() -> None:
    book = ledger(1000, ONE)
    book.request(ONE, 0, 1, 900, 900, 0)
    book.measure(ONE, 0, 1300, at_s=1, now_s=1)
    assert (book.context_bytes(0), book.unleased_bytes(0)) == (400, 0)
    assert book.request(ONE, 0, 2, 1, 1, 1) == [Denied(ONE, 0, 2)]
    book.leave(ONE, 1)
    assert book.unleased_bytes(0) == 1000


@pytest.mark.parametrize("estimate", [0, 300, 450])
def test_managed_memory_does_not_hide_what_a_context_takes(estimate: int) -> None:
    """NVML lists none of it."""
    book = ledger(2000, ONE)
    book.begin_context(ONE, 0, 1, estimate, 0)
    book.end_context(ONE, 0, 1)
    book.measure(ONE, 0, 300, at_s=1, now_s=1, exact=estimate == 0)
    book.request(ONE, 0, 2, 1000, 1000, 2)
    book.state(ONE, 0, 1000, 1000)
    for at_s in range(3, 9):
        book.measure(ONE, 0, 300, at_s=at_s, now_s=at_s)
        assert (book.context_bytes(0), book.unleased_bytes(0)) == (300, 700)
    book.end_context(ONE, 0, 9, made=False)
    book.measure(ONE, 0, 1, at_s=9, now_s=9)
    book.measure(ONE, 0, 1, at_s=11, now_s=11)
    assert book.context_bytes(0) <= 1


@given(
    context=st.integers(1, 300), grown=st.integers(0, 200), plain=st.integers(0, 300), managed=st.integers(0, 500),
    freed=st.integers(0, 500), unused=st.integers(0, 100),
)  # fmt: skip
def test_contexts_are_charged_to_the_byte_what_nvml_lists_beside_what_is_not_managed(
    context: int, grown: int, plain: int, managed: int, freed: int, unused: int
) -> None:
    """NVML lists none of the managed memory, of which some is freed in the end."""
    book = ledger(5000, ONE)
    book.begin_context(ONE, 0, 1, 0, 0)
    book.end_context(ONE, 0, 1)
    book.measure(ONE, 0, context, at_s=1, now_s=1, exact=True)
    book.request(ONE, 0, 2, plain + managed + unused, 0, 2)
    seconds = itertools.count(3)
    for left in (managed, max(0, managed - freed)):
        book.state(ONE, 0, plain + left, 0, left)
        for at_s in itertools.islice(seconds, 4):
            book.measure(ONE, 0, context + grown + plain, at_s=at_s, now_s=at_s)
        assert book.context_bytes(0) == context + grown
        part = book.part_of(ONE, 0)
        assert (part.managed_bytes, part.still) == (left, True)


def test_stated_managed_memory_counts_up_to_the_used_memory() -> None:
    book = ledger(1000, ONE)
    book.request(ONE, 0, 1, 400, 400, 0)
    book.state(ONE, 0, 2**63, 0, 2**52)
    assert book.part_of(ONE, 0).managed_bytes == 400
    book.state(ONE, 0, 100, 0, 300)
    assert book.part_of(ONE, 0).managed_bytes == 100
    for at_s in range(1, 6):
        book.measure(ONE, 0, 700, at_s=at_s, now_s=at_s)
        assert book.context_bytes(0) + book.leased_bytes(0) >= 700
    assert book.context_bytes(0) == 700, "a process that states more than it has is charged for it"


def test_one_lease_and_one_context_may_be_requested_at_once() -> None:
    book = ledger(1000, ONE, TWO)
    book.request(ONE, 0, 1, 900, 900, 0)
    book.begin_context(TWO, 0, 1, 300, 0)
    assert book.request(TWO, 0, 2, 0, 50, 0) == []
    with pytest.raises(BadDocument, match="CONTEXT of GPU 0 while an earlier one is not answered"):
        book.begin_context(TWO, 0, 3, 300, 0)


def test_a_restated_lease_is_not_taken_for_a_context_by_a_reading_that_came_first() -> None:
    book = ledger(1000, ONE)
    book.measure(ONE, 0, 700, at_s=0, now_s=0)
    book.state(ONE, 0, 400, 400)
    book.restate_context(ONE, 0, 300)
    assert (book.leased_bytes(0), book.context_bytes(0)) == (400, 300)
    book.measure(ONE, 0, 700, at_s=1, now_s=1)
    assert book.context_bytes(0) == 300


def test_a_reading_between_what_is_restated_of_leases_and_of_contexts_takes_neither_away() -> None:
    book = Ledger([1600], room_bytes=50)
    book.join(ONE)
    book.state(ONE, 0, 400, 500)
    book.measure(ONE, 0, 700, at_s=1, now_s=1)
    assert book.context_bytes(0) == 200, "so much is no lease"
    book.restate_context(ONE, 0, 300)
    assert book.context_bytes(0) == 300
    assert book.unleased_bytes(0) == 1600 - 500 - 300 - 50, "context room is reserved beside a restated context"


def test_after_its_restatement_a_process_states_only_its_used_memory() -> None:
    book = ledger(1000, ONE)
    book.state(ONE, 0, 400, 400)
    book.restate_context(ONE, 0, 300)
    book.state(ONE, 0, 100, 100)
    assert (book.leased_bytes(0), book.used_bytes(0), book.context_bytes(0)) == (400, 100, 300)


def test_a_restated_context_is_no_less_than_what_was_measured_beside_the_lease() -> None:
    book = ledger(1000, ONE)
    book.state(ONE, 0, 400, 400)
    book.measure(ONE, 0, 700, at_s=1, now_s=1)
    book.restate_context(ONE, 0, 1)
    assert book.context_bytes(0) == 300
    book.restate_context(ONE, 0, 2**63)
    assert book.context_bytes(0) == 700, "nor more than all that was measured"


def test_a_restated_context_is_bounded_by_the_limit_and_yields_to_the_measure() -> None:
    book = ledger(1000, ONE)
    book.restate_context(ONE, 0, 2**63)
    assert book.context_bytes(0) == 1000
    book.measure(ONE, 0, 300, at_s=1, now_s=1)
    assert book.context_bytes(0) == 300


def test_a_context_that_grows_uses_its_context_room() -> None:
    book = Ledger([1600], room_bytes=80)
    book.join(ONE)
    book.begin_context(ONE, 0, 1, 500, 0)
    book.end_context(ONE, 0, 0)
    free = []
    for at_s, measured in enumerate([500, 530, 580, 620], 1):
        for again in (0.0, 2.0):  # the second is calm
            book.measure(ONE, 0, measured, 10 * at_s + again, 10 * at_s + again)
        free.append(book.unleased_bytes(0))
    assert free == [1020, 1020, 1020, 980]
    book.end_context(ONE, 0, 90, made=False)
    book.measure(ONE, 0, 0, 91, 91)
    book.measure(ONE, 0, 0, 93, 93)
    assert book.unleased_bytes(0) == 1600


def test_the_context_room_of_all_contexts_is_at_most_a_sixteenth_of_the_limit() -> None:
    book = Ledger([1600], room_bytes=80)
    for process in (ONE, TWO):
        book.join(process)
        book.begin_context(process, 0, 1, 500, 0)
    assert book.unleased_bytes(0) == 1600 - 1000 - 100


def test_what_a_context_may_grow_by_is_held_before_the_call_and_settled_after_it() -> None:
    book = ledger(1000, ONE)
    book.begin_context(ONE, 0, 1, 300, 0)
    book.end_context(ONE, 0, 0)
    assert book.bound_context(ONE, 0, 2, 100, 1) == [Granted(ONE, 0, 2, 100)]
    assert book.context_bytes(0) == 400
    book.measure(ONE, 0, 310, at_s=2, now_s=2)
    assert book.context_bytes(0) == 400, "such calls may still be made"
    book.settle_bound(ONE, 0, 3)
    book.measure(ONE, 0, 310, at_s=3, now_s=3)
    assert book.context_bytes(0) == 310


def test_what_was_held_for_calls_and_not_needed_is_free_at_once() -> None:
    book = ledger(1000, ONE)
    book.begin_context(ONE, 0, 1, 300, 0)
    book.end_context(ONE, 0, 0)
    book.bound_context(ONE, 0, 2, 100, 1)
    assert book.request(ONE, 0, 3, 650, 650, 2) == [Denied(ONE, 0, 3)]
    assert book.settle_bound(ONE, 0, 3, 80) == []
    assert book.context_bytes(0) == 320, "what is not known to be unneeded is settled by a reading"
    assert book.request(ONE, 0, 4, 650, 650, 3) == [Granted(ONE, 0, 4, 650)]
    book.settle_bound(ONE, 0, 4, 10**6)
    assert book.context_bytes(0) == 300, "never more than was held"
    book.measure(ONE, 0, 975, at_s=4, now_s=4)
    assert book.context_bytes(0) == 325, "a reading corrects a process that states too much"


def test_what_a_context_may_grow_by_is_refused_where_it_does_not_fit() -> None:
    book = ledger(1000, ONE, TWO)
    book.begin_context(ONE, 0, 1, 300, 0)
    book.request(TWO, 0, 1, 650, 650, 0)
    assert book.bound_context(ONE, 0, 2, 51, 0) == [Recalled(TWO, 0, RECALLS | 1, 1)]
    assert book.give_back(TWO, 0, 0, RECALLS | 1, 0) == [Denied(ONE, 0, 2)]
    assert book.context_bytes(0) == 300
    assert book.bound_context(ONE, 0, 3, 50, 0) == [Granted(ONE, 0, 3, 50)]


def test_a_bound_uses_the_context_room_first() -> None:
    book = Ledger([1600], room_bytes=100)
    book.join(ONE)
    book.begin_context(ONE, 0, 1, 300, 0)
    book.request(ONE, 0, 2, 1200, 1200, 0)
    assert book.unleased_bytes(0) == 0
    assert book.bound_context(ONE, 0, 3, 100, 0) == [Granted(ONE, 0, 3, 100)]
    assert book.bound_context(ONE, 0, 4, 1, 0) == [Denied(ONE, 0, 4)]
    book.settle_bound(ONE, 0, 1)
    book.measure(ONE, 0, 1500, at_s=1, now_s=1)
    assert book.unleased_bytes(0) == 0, "the context room is reserved again"


def with_memory() -> Ledger:
    """A process has a context of 100 and uses 500."""
    book = Ledger([1000])
    book.join(ONE)
    book.begin_context(ONE, 0, 1, 100, 0)
    book.end_context(ONE, 0, 0)
    book.request(ONE, 0, 2, 500, 500, 0)
    book.state(ONE, 0, 500, 500)
    return book


def test_memory_in_host_memory_makes_no_context_smaller_and_its_return_none_larger() -> None:
    book = with_memory()
    for at, away, measured in (
        (1, 0, 600), (3, 0, 600), (5, 0, 600),
        (6, 300, 600),  # read before it left, or after
        (7, 300, 300), (9, 300, 300), (11, 300, 300),
        (12, 0, 300), (13, 0, 600), (15, 0, 600),
    ):  # fmt: skip
        book.measure(ONE, 0, measured, at, at, away_bytes=away)
        assert book.context_bytes(0) == 100
        assert book.part_of(ONE, 0).measured_bytes == measured


def test_a_process_that_keeps_what_it_states_to_be_away_is_charged_for_it_with_the_second_reading() -> None:
    book = with_memory()
    book.measure(ONE, 0, 600, 1, 1, away_bytes=0)
    book.measure(ONE, 0, 600, 3, 3, away_bytes=0)
    book.measure(ONE, 0, 600, 4, 4, away_bytes=300)
    assert book.context_bytes(0) == 100, "it may be read before it left"
    book.measure(ONE, 0, 600, 5, 5, away_bytes=300)
    assert book.context_bytes(0) == 400
    assert book.unleased_bytes(0) == 100
