"""Leases of one grant: never beyond the limit, never denied while memory is free."""

from __future__ import annotations

import pytest

from vgpu.api.errors import BadDocument
from vgpu.memory.ledger import Ledger
from vgpu.memory.records import Denied, Granted, Recalled

ONE, TWO, THREE, FOUR = 1, 2, 3, 4


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
    assert wanted == Recalled(ONE, 0, wanted.recall, 300)  # type: ignore[union-attr]
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


def test_a_sibling_that_will_still_answer_an_earlier_recall_is_waited_for_and_recalled_from_again() -> None:
    book = ledger(1000, ONE, TWO, THREE, FOUR)
    book.request(ONE, 0, 1, 400, 400, 0)
    book.request(TWO, 0, 1, 600, 600, 0)
    first, second = book.request(THREE, 0, 1, 100, 100, 0)
    assert book.request(FOUR, 0, 1, 100, 100, 0) == []
    granted, *recalls = book.give_back(ONE, 0, 100, first.recall, 0.01)  # type: ignore[union-attr]
    assert granted == Granted(THREE, 0, 1, 100)
    assert [one.process for one in recalls] == [ONE, THREE], "TWO owes the answer for what THREE has by now"
    for one in recalls:
        assert book.give_back(one.process, 0, 0, one.recall, 0.02) == []  # type: ignore[union-attr]
    (again,) = book.give_back(TWO, 0, 0, second.recall, 0.03)  # type: ignore[union-attr]
    assert again == Recalled(TWO, 0, again.recall, 100)  # type: ignore[union-attr]
    assert book.give_back(TWO, 0, 100, again.recall, 0.04) == [Granted(FOUR, 0, 1, 100)]  # type: ignore[union-attr]


def test_such_a_sibling_is_recalled_from_once_more_and_no_more() -> None:
    book = ledger(1000, ONE, TWO, THREE, FOUR)
    book.request(ONE, 0, 1, 100, 100, 0)
    book.request(TWO, 0, 1, 900, 900, 0)
    first, second = book.request(THREE, 0, 1, 100, 100, 0)
    book.give_back(ONE, 0, 100, first.recall, 0.01)  # type: ignore[union-attr]
    (third,) = book.request(FOUR, 0, 1, 100, 100, 0.01)
    assert third.process == THREE  # type: ignore[union-attr]
    book.give_back(THREE, 0, 0, third.recall, 0.02)  # type: ignore[union-attr]
    (again,) = book.give_back(TWO, 0, 0, second.recall, 0.03)  # type: ignore[union-attr]
    assert book.give_back(TWO, 0, 0, again.recall, 0.04) == [Denied(FOUR, 0, 1)]  # type: ignore[union-attr]


def test_a_sibling_that_hangs_up_answers_the_recall() -> None:
    book = ledger(1000, ONE, TWO)
    book.request(ONE, 0, 1, 800, 800, 0)
    book.request(TWO, 0, 1, 500, 500, 0)
    assert book.leave(ONE, 0.01) == [Granted(TWO, 0, 1, 500)]


def test_a_request_beyond_the_limit_recalls_from_no_process() -> None:
    book = ledger(1000, ONE, TWO)
    book.request(ONE, 0, 1, 800, 800, 0)
    assert book.request(TWO, 0, 1, 1001, 1001, 0) == [Denied(TWO, 0, 1)]


def test_requests_are_decided_in_the_order_they_came() -> None:
    book = ledger(1000, ONE, TWO, THREE)
    book.request(ONE, 0, 1, 900, 900, 0)
    (wanted,) = book.request(TWO, 0, 1, 200, 200, 0)
    assert book.request(THREE, 0, 1, 100, 100, 0) == [], "it would fit, but an earlier request waits"
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
    assert isinstance(wanted, Recalled)
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


def test_no_process_is_waited_for_longer_than_half_a_second() -> None:
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
