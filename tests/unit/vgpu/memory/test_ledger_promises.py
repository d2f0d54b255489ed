"""Memory that is promised for a context which a process may make soon."""

from __future__ import annotations

from vgpu.memory.ledger import PROMISE_S, Ledger
from vgpu.memory.records import Denied, Granted

ONE, TWO, THREE = 1, 2, 3


def ledger(limit: int, *processes: int) -> Ledger:
    made = Ledger([limit])
    for process in processes:
        made.join(process)
    return made


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
    times_s = [at_s for at_s in iter(lambda: book.deadline_s(), None) if book.expire(at_s) or True]
    assert times_s[-1] == 0.4 + PROMISE_S
    assert len(times_s) < 20


def test_what_a_promised_process_restates_outlives_the_promise() -> None:
    book = ledger(1000, ONE)
    book.promise(ONE, 0, 300, 0)
    book.end_context(ONE, 0, 0.1)
    book.restate_context(ONE, 0, 300)
    book.expire(PROMISE_S)
    assert book.context_bytes(0) == 300


def test_nothing_is_promised_that_is_not_free_or_while_a_request_waits_or_before_all_have_restated() -> None:
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
