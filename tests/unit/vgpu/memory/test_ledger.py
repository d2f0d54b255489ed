"""Leases of one grant: never beyond the limit, never refused while there is room."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.errors import BadDocument
from vgpu.memory.ledger import PROMISE_S, RECALLS, Ledger
from vgpu.memory.records import Denied, Granted, Wanted

ONE, TWO, THREE = 1, 2, 3


def ledger(limit: int, *processes: int) -> Ledger:
    made = Ledger([limit])
    for process in processes:
        made.join(process)
    return made


def test_a_request_gets_its_need_and_a_part_of_the_rest() -> None:
    assert ledger(1000, ONE).request(ONE, 0, 7, 100, 1000, 0) == [Granted(ONE, 0, 7, 100 + 900 // 4)]


def test_the_last_byte_can_be_had_and_not_one_more() -> None:
    book = ledger(1000, ONE)
    assert book.request(ONE, 0, 1, 1000, 1000, 0) == [Granted(ONE, 0, 1, 1000)]
    assert book.request(ONE, 0, 2, 1, 1, 0) == [Denied(ONE, 0, 2)]


def test_a_process_that_hangs_up_gives_its_lease_back() -> None:
    book = ledger(1000, ONE, TWO)
    book.request(ONE, 0, 1, 1000, 1000, 0)
    book.leave(ONE, 0)
    assert book.request(TWO, 0, 1, 1000, 1000, 0) == [Granted(TWO, 0, 1, 1000)]


def test_what_a_sibling_does_not_use_is_recalled_and_granted() -> None:
    book = ledger(1000, ONE, TWO)
    book.request(ONE, 0, 1, 800, 800, 0)
    (wanted,) = book.request(TWO, 0, 1, 500, 900, 0)
    assert wanted == Wanted(ONE, 0, wanted.recall, 300)  # type: ignore[union-attr]
    assert book.give_back(ONE, 0, 300, wanted.recall, 0.01) == [Granted(TWO, 0, 1, 500)]  # type: ignore[union-attr]


def test_a_request_is_refused_once_every_sibling_has_answered() -> None:
    book = ledger(1000, ONE, TWO)
    book.request(ONE, 0, 1, 800, 800, 0)
    (wanted,) = book.request(TWO, 0, 1, 500, 900, 0)
    assert book.give_back(ONE, 0, 100, wanted.recall, 0.01) == [Denied(TWO, 0, 1)]  # type: ignore[union-attr]


def test_a_sibling_that_does_not_answer_delays_a_request_a_bounded_time_and_only_once() -> None:
    book = ledger(1000, ONE, TWO)
    book.request(ONE, 0, 1, 800, 800, 0)
    book.request(TWO, 0, 1, 500, 900, 0)
    assert book.deadline_s() == pytest.approx(0.05)
    assert book.expire(0.049) == []
    assert book.expire(0.051) == [Denied(TWO, 0, 1)]
    assert book.request(TWO, 0, 2, 500, 900, 0.06) == [Denied(TWO, 0, 2)], (
        "it still owes the answer: not waited for again"
    )


def test_a_sibling_that_hangs_up_answers_the_recall() -> None:
    book = ledger(1000, ONE, TWO)
    book.request(ONE, 0, 1, 800, 800, 0)
    book.request(TWO, 0, 1, 500, 500, 0)
    assert book.leave(ONE, 0.01) == [Granted(TWO, 0, 1, 500)]


def test_a_request_beyond_the_limit_bothers_nobody() -> None:
    book = ledger(1000, ONE, TWO)
    book.request(ONE, 0, 1, 800, 800, 0)
    assert book.request(TWO, 0, 1, 1001, 1001, 0) == [Denied(TWO, 0, 1)]


def test_requests_are_decided_in_the_order_they_came() -> None:
    book = ledger(1000, ONE, TWO, THREE)
    book.request(ONE, 0, 1, 900, 900, 0)
    (wanted,) = book.request(TWO, 0, 1, 200, 200, 0)
    assert book.request(THREE, 0, 1, 100, 100, 0) == [], "it would fit, but it waits its turn"
    events = book.give_back(ONE, 0, 200, wanted.recall, 0.01)  # type: ignore[union-attr]
    assert events == [Granted(TWO, 0, 1, 200), Granted(THREE, 0, 1, 100)]


def test_after_a_restart_nothing_is_leased_before_processes_have_stated_what_they_hold() -> None:
    book = Ledger([1000], opens_at_s=10)
    book.join(ONE)
    book.join(TWO)
    book.state(ONE, 0, 500, 600)
    assert book.request(ONE, 0, 1, 300, 300, 9.5) == []
    assert book.deadline_s() == 10
    book.state(TWO, 0, 400, 400)
    (wanted,) = book.expire(10)
    assert isinstance(wanted, Wanted)
    assert book.unleased_bytes(0) == 0
    assert book.used_bytes(0) == 900


def test_what_is_stated_beyond_the_limit_stands_and_nothing_more_is_leased() -> None:
    book = ledger(1000, ONE, TWO)
    book.state(ONE, 0, 1500, 1500)
    assert book.leased_bytes(0) == 1500
    assert book.unleased_bytes(0) == 0
    book.request(TWO, 0, 1, 1, 1, 0)
    assert book.expire(1) == [Denied(TWO, 0, 1)]


def test_a_process_that_has_requested_cannot_state_its_lease_away() -> None:
    book = ledger(1000, ONE)
    book.request(ONE, 0, 1, 1000, 1000, 0)
    book.state(ONE, 0, 0, 0)
    assert book.leased_bytes(0) == 1000


@pytest.mark.parametrize("gpu", [1, 63])
def test_a_gpu_the_grant_does_not_have_is_refused(gpu: int) -> None:
    with pytest.raises(BadDocument, match=f"names GPU {gpu}: this container has 1, from 0"):
        ledger(1000, ONE).request(ONE, gpu, 1, 1, 1, 0)


def test_more_than_leased_cannot_be_returned() -> None:
    with pytest.raises(BadDocument, match="RETURN of 1 bytes of GPU 0: 0 to 0 are leased"):
        ledger(1000, ONE).give_back(ONE, 0, 1, 0, 0)


def test_a_second_request_before_the_answer_is_refused() -> None:
    book = ledger(1000, ONE, TWO)
    book.request(ONE, 0, 1, 800, 800, 0)
    book.request(TWO, 0, 1, 500, 500, 0)
    with pytest.raises(BadDocument, match="one at a time"):
        book.request(TWO, 0, 2, 1, 1, 0)


def test_a_context_is_held_before_it_is_made_and_is_no_lease() -> None:
    book = ledger(1000, ONE)
    assert book.begin_context(ONE, 0, 7, 300, 0) == [Granted(ONE, 0, 7, 300)]
    assert (book.leased_bytes(0), book.context_bytes(0), book.unleased_bytes(0)) == (0, 300, 700)
    assert book.request(ONE, 0, 8, 701, 701, 0) == [Denied(ONE, 0, 8)]
    assert book.request(ONE, 0, 9, 700, 700, 0) == [Granted(ONE, 0, 9, 700)]


def test_room_for_a_context_is_recalled_from_siblings() -> None:
    book = ledger(1000, ONE, TWO)
    book.request(ONE, 0, 1, 800, 800, 0)
    (wanted,) = book.begin_context(TWO, 0, 1, 300, 0)
    assert wanted == Wanted(ONE, 0, wanted.recall, 100)  # type: ignore[union-attr]
    assert book.give_back(ONE, 0, 100, wanted.recall, 0.01) == [Granted(TWO, 0, 1, 300)]  # type: ignore[union-attr]


def test_a_context_without_room_is_refused_and_leases_nothing() -> None:
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


def test_a_context_that_shrinks_makes_room_for_who_waits() -> None:
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


def test_no_more_managed_memory_is_believed_than_is_used() -> None:
    book = ledger(1000, ONE)
    book.request(ONE, 0, 1, 400, 400, 0)
    book.state(ONE, 0, 2**63, 0, 2**52)
    assert book.part_of(ONE, 0).managed_bytes == 400
    book.state(ONE, 0, 100, 0, 300)
    assert book.part_of(ONE, 0).managed_bytes == 100
    for at_s in range(1, 6):
        book.measure(ONE, 0, 700, at_s=at_s, now_s=at_s)
        assert book.context_bytes(0) + book.leased_bytes(0) >= 700
    assert book.context_bytes(0) == 700, "who states more than it has is charged for it"


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
    assert book.unleased_bytes(0) == 1600 - 500 - 300 - 50, "room is kept beside a context that came back"


def test_a_process_that_has_restated_what_it_has_says_only_what_it_uses() -> None:
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


def test_a_sibling_that_may_answer_is_waited_for_longer_than_one_that_is_stopped() -> None:
    stopped: set[int] = set()
    book = Ledger([1000], may_answer=lambda process: process not in stopped)
    for process in (ONE, TWO):
        book.join(process)
    book.request(ONE, 0, 1, 800, 800, 0)
    (wanted,) = book.request(TWO, 0, 1, 500, 900, 0)
    assert book.expire(0.06) == []
    assert book.expire(0.3) == []
    assert book.give_back(ONE, 0, 300, wanted.recall, 0.4) == [Granted(TWO, 0, 1, 500)]  # type: ignore[union-attr]

    book.request(TWO, 0, 2, 400, 400, 1)
    stopped.add(ONE)
    assert book.expire(1.06) == [Denied(TWO, 0, 2)]


def test_nobody_is_waited_for_longer_than_half_a_second() -> None:
    book = Ledger([1000], may_answer=lambda _: True)
    for process in (ONE, TWO):
        book.join(process)
    book.request(ONE, 0, 1, 800, 800, 0)
    book.request(TWO, 0, 1, 500, 500, 0)
    now = 0.0
    while not (events := book.expire(now)):
        deadline = book.deadline_s()
        assert deadline is not None
        assert deadline > now
        now = deadline
    assert events == [Denied(TWO, 0, 1)]
    assert now == pytest.approx(0.5)


def test_a_context_that_grows_uses_the_room_that_was_kept_beside_it() -> None:
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


def test_the_room_beside_all_contexts_is_at_most_a_sixteenth_of_the_limit() -> None:
    book = Ledger([1600], room_bytes=80)
    for process in (ONE, TWO):
        book.join(process)
        book.begin_context(process, 0, 1, 500, 0)
    assert book.unleased_bytes(0) == 1600 - 1000 - 100


def test_a_begin_that_was_promised_is_granted_though_the_rest_is_gone_and_a_context_takes_more_by_now() -> None:
    book = ledger(1000, ONE, TWO)
    assert book.promise(ONE, 0, 300, 0) == 300
    assert (book.context_bytes(0), book.unleased_bytes(0)) == (0, 1000)
    assert book.request(TWO, 0, 1, 700, 700, 0) == [Granted(TWO, 0, 1, 700)]
    assert book.begin_context(ONE, 0, 7, 310, 0.1) == [Granted(ONE, 0, 7, 300)]
    assert book.expire(PROMISE_S + 1) == []
    assert book.context_bytes(0) == 300, "it is no promise any more"


def test_a_request_that_does_not_fit_for_a_promise_waits_until_it_ends() -> None:
    book = ledger(1000, ONE, TWO)
    book.promise(ONE, 0, 300, 0)
    assert book.request(TWO, 0, 1, 701, 701, 0.5) == []
    assert book.deadline_s() == PROMISE_S
    assert book.expire(PROMISE_S - 0.01) == []
    assert book.expire(PROMISE_S) == [Granted(TWO, 0, 1, 701)]
    assert (book.context_bytes(0), book.deadline_s()) == (0, None)


def test_a_request_that_a_promise_does_not_stand_in_the_way_of_is_refused_at_once() -> None:
    book = ledger(1000, ONE, TWO)
    book.promise(ONE, 0, 300, 0)
    assert book.request(TWO, 0, 1, 1001, 1001, 0) == [Denied(TWO, 0, 1)]


def test_a_request_that_waits_for_a_promise_is_refused_when_its_context_is_begun() -> None:
    book = ledger(1000, ONE, TWO)
    book.promise(ONE, 0, 300, 0)
    book.request(TWO, 0, 1, 701, 701, 0)
    assert book.begin_context(ONE, 0, 7, 300, 0.1) == [Granted(ONE, 0, 7, 300), Denied(TWO, 0, 1)]


def test_a_promised_begin_does_not_wait_behind_others_and_the_next_one_may_come_at_once() -> None:
    book = ledger(1000, ONE, TWO, THREE)
    book.promise(ONE, 0, 300, 0)
    book.promise(THREE, 0, 300, 0)
    book.request(TWO, 0, 1, 600, 600, 0.05)
    assert book.begin_context(ONE, 0, 7, 300, 0.1) == [Granted(ONE, 0, 7, 300)]
    book.end_context(ONE, 0, 0.2, made=False)
    assert book.begin_context(ONE, 0, 8, 300, 0.25) == []


def test_a_process_that_leases_first_gives_up_what_it_was_promised() -> None:
    book = ledger(1000, ONE)
    book.promise(ONE, 0, 300, 0)
    assert book.request(ONE, 0, 1, 800, 800, 0.1) == [Granted(ONE, 0, 1, 800)]


def test_a_promise_is_not_requested_again_and_again_when_a_sibling_does_not_answer() -> None:
    book = Ledger([1000], may_answer=lambda _: True)
    for process in (ONE, TWO, THREE):
        book.join(process)
    book.request(THREE, 0, 1, 100, 100, 0)
    book.promise(ONE, 0, 300, 0.4)
    book.request(TWO, 0, 2, 700, 700, 0.41)
    turns = [at_s for at_s in iter(lambda: book.deadline_s(), None) if book.expire(at_s) or True]
    assert turns[-1] == 0.4 + PROMISE_S
    assert len(turns) < 20


def test_what_a_promised_process_restates_outlives_the_promise() -> None:
    book = ledger(1000, ONE)
    book.promise(ONE, 0, 300, 0)
    book.end_context(ONE, 0, 0.1)
    book.restate_context(ONE, 0, 300)
    book.expire(PROMISE_S)
    assert book.context_bytes(0) == 300


def test_nothing_is_promised_that_is_not_free_or_while_somebody_waits_or_before_all_have_restated() -> None:
    book = ledger(1000, ONE, TWO, THREE)
    assert book.promise(ONE, 0, 1001, 0) == 0
    book.promise(ONE, 0, 300, 0)
    book.request(TWO, 0, 1, 701, 701, 0)
    assert book.promise(THREE, 0, 1, 0) == 0
    closed = Ledger([1000], opens_at_s=1)
    closed.join(ONE)
    assert closed.promise(ONE, 0, 1, 0.5) == 0


def test_a_promise_ends_with_its_process() -> None:
    book = ledger(1000, ONE)
    book.promise(ONE, 0, 300, 0)
    book.leave(ONE, 0.1)
    assert book.deadline_s() is None


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


def test_what_a_context_may_grow_by_is_refused_where_it_does_not_fit() -> None:
    book = ledger(1000, ONE, TWO)
    book.begin_context(ONE, 0, 1, 300, 0)
    book.request(TWO, 0, 1, 650, 650, 0)
    assert book.bound_context(ONE, 0, 2, 51, 0) == [Wanted(TWO, 0, RECALLS | 1, 1)]
    assert book.give_back(TWO, 0, 0, RECALLS | 1, 0) == [Denied(ONE, 0, 2)]
    assert book.context_bytes(0) == 300
    assert book.bound_context(ONE, 0, 3, 50, 0) == [Granted(ONE, 0, 3, 50)]


def test_the_room_beside_a_context_pays_for_what_it_may_grow_by() -> None:
    book = Ledger([1600], room_bytes=100)
    book.join(ONE)
    book.begin_context(ONE, 0, 1, 300, 0)
    book.request(ONE, 0, 2, 1200, 1200, 0)
    assert book.unleased_bytes(0) == 0
    assert book.bound_context(ONE, 0, 3, 100, 0) == [Granted(ONE, 0, 3, 100)]
    assert book.bound_context(ONE, 0, 4, 1, 0) == [Denied(ONE, 0, 4)]
    book.settle_bound(ONE, 0, 1)
    book.measure(ONE, 0, 1500, at_s=1, now_s=1)
    assert book.unleased_bytes(0) == 0, "the room is kept again"
