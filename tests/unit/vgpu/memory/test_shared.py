"""Memory that processes of a container share is charged once: never less than its size, never more."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.api.errors import BadDocument
from vgpu.memory import shared
from vgpu.memory.ledger import Ledger
from vgpu.memory.records import Denied, Event, Granted, Recalled

ONE, TWO, THREE = 1, 2, 3
KEY, OTHER = b"key", b"other"


def made(limit: int = 1000, amount: int = 600) -> Ledger:
    """ONE has made so much under KEY, TWO and THREE are there."""
    book = Ledger([limit])
    for process in (ONE, TWO, THREE):
        book.join(process)
    book.request(ONE, 0, 1, amount, amount, 0)
    book.make(ONE, 0, KEY, amount)
    return book


def test_a_process_pays_nothing_for_memory_of_a_sibling() -> None:
    book = made()
    assert book.hold(TWO, 0, 5, KEY, 600, 0) == [Granted(TWO, 0, 5, 600)]
    assert (book.leased_bytes(0), book.shared_bytes(0), book.unleased_bytes(0)) == (600, 0, 400)


@pytest.mark.parametrize("how", ["frees it", "dies"])
def test_after_the_end_of_the_maker_all_openers_together_are_charged_once(how: str) -> None:
    book = made()
    book.hold(TWO, 0, 5, KEY, 600, 0)
    book.hold(THREE, 0, 5, KEY, 600, 0)
    if how == "dies":
        book.leave(ONE, 0)
    else:
        book.drop(ONE, 0, KEY, 600, 0, made=True)
    assert (book.leased_bytes(0), book.shared_bytes(0), book.unleased_bytes(0)) == (0, 600, 400)
    book.drop(TWO, 0, KEY, 0, 0, made=False)
    assert book.unleased_bytes(0) == 400
    book.leave(THREE, 0)
    assert book.unleased_bytes(0) == 1000


def test_memory_of_another_container_is_charged_to_the_first_opener_only() -> None:
    book = made(amount=300)
    assert book.hold(TWO, 0, 5, OTHER, 700, 0) == [Granted(TWO, 0, 5, 700)]
    assert book.unleased_bytes(0) == 0
    assert book.hold(THREE, 0, 5, OTHER, 700, 0) == [Granted(THREE, 0, 5, 700)]


def test_what_does_not_fit_is_recalled_and_then_refused() -> None:
    book = made(amount=900)
    (wanted,) = book.hold(TWO, 0, 5, OTHER, 200, 0)
    assert wanted == Recalled(ONE, 0, wanted.recall, 100)  # type: ignore[union-attr]
    assert book.give_back(ONE, 0, 0, wanted.recall, 0) == [Denied(TWO, 0, 5)]
    assert book.shared_bytes(0) == 0


def test_a_waiting_opener_needs_no_free_memory_once_a_maker_is_known() -> None:
    book = made(amount=900)
    (wanted,) = book.hold(TWO, 0, 5, OTHER, 200, 0)
    book.make(ONE, 0, KEY, 700)
    book.make(ONE, 0, OTHER, 200)
    assert book.give_back(ONE, 0, 0, wanted.recall, 0) == [Granted(TWO, 0, 5, 200)]  # type: ignore[union-attr]


def test_a_maker_without_a_sufficient_lease_does_not_count() -> None:
    book = made()
    book.make(ONE, 0, OTHER, 1)
    book.hold(TWO, 0, 5, OTHER, 1, 0)
    assert book.shared_bytes(0) == 1


def test_a_restatement_after_a_restart_counts_and_is_charged_once() -> None:
    book = Ledger([1000], opens_at_s=10)
    for process in (ONE, TWO):
        book.join(process)
    book.restate_hold(TWO, 0, KEY, 600)
    assert book.shared_bytes(0) == 600
    book.state(ONE, 0, 600, 600)
    assert book.unleased_bytes(0) == 0
    book.make(ONE, 0, KEY, 600)
    assert (book.shared_bytes(0), book.unleased_bytes(0)) == (0, 400)


def test_more_than_leased_cannot_be_dropped() -> None:
    with pytest.raises(BadDocument, match="DROP of 601 bytes of GPU 0: 0 to 600 are leased"):
        made().drop(ONE, 0, KEY, 601, 0, made=True)


def test_a_key_that_no_process_has_can_be_dropped() -> None:
    book = made()
    book.drop(TWO, 0, OTHER, 0, 0, made=False)
    assert book.unleased_bytes(0) == 400


def test_a_container_cannot_fill_the_arbiters_memory_with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "ENTRIES_LIMIT", 2)
    book = made()
    book.hold(TWO, 0, 5, b"1", 1, 0)
    assert book.hold(TWO, 0, 6, b"2", 1, 0) == [Denied(TWO, 0, 6)]
    book.make(ONE, 0, b"3", 1)
    with pytest.raises(BadDocument, match="one more key of GPU 0"):
        book.restate_hold(THREE, 0, b"4", 1)
    book.drop(TWO, 0, b"1", 0, 0, made=False)
    assert book.hold(TWO, 0, 7, b"2", 1, 0) == [Granted(TWO, 0, 7, 1)]


@dataclass
class SharedMemoryModel:
    """The obvious slow version: memory is there as long as a process has it. No lease is ahead of its use."""

    book: Ledger
    there: set[int] = field(default_factory=set)
    memory: dict[bytes, int] = field(default_factory=dict)
    made: set[tuple[int, bytes]] = field(default_factory=set)
    opened: set[tuple[int, bytes]] = field(default_factory=set)

    def held(self, key: bytes) -> set[int]:
        return {process for process, its in self.made | self.opened if its == key}

    def forget(self) -> None:
        self.memory = {key: amount for key, amount in self.memory.items() if self.held(key)}

    def check(self, limit: int) -> None:
        there = sum(self.memory.values())
        assert self.book.leased_bytes(0) + self.book.shared_bytes(0) == there
        assert self.book.unleased_bytes(0) == limit - there


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "make", "foreign", "open", "open", "close", "free"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(0, 60),
    ),
    max_size=60,
)


@settings(max_examples=examples(500))
@given(st.integers(0, 150), STEPS)
def test_in_whatever_order_processes_come_and_go_what_is_there_is_charged_once(
    limit: int, steps: list[tuple[str, int, int, int]]
) -> None:
    node, serial = SharedMemoryModel(Ledger([limit])), 0
    for what, process, number, amount in steps:
        keys = sorted(node.memory)
        key = keys[number % len(keys)] if keys else b""
        if what == "join" and process not in node.there:
            node.book.join(process)
            node.there.add(process)
        elif process not in node.there:
            continue
        elif what == "leave":
            node.book.leave(process, 0)
            node.there.discard(process)
            node.made = {one for one in node.made if one[0] != process}
            node.opened = {one for one in node.opened if one[0] != process}
        elif what == "make":
            serial += 1
            if settled(node.book, node.book.request(process, 0, serial, amount, amount, 0)):
                node.book.make(process, 0, name(serial), amount)
                node.memory[name(serial)] = amount
                node.made.add((process, name(serial)))
        elif what == "foreign":
            serial += 1
            if settled(node.book, node.book.hold(process, 0, serial, name(serial), amount, 0)):
                node.memory[name(serial)] = amount
                node.opened.add((process, name(serial)))
        elif what == "open" and key and (process, key) not in node.opened:
            serial += 1
            answer = node.book.hold(process, 0, serial, key, node.memory[key], 0)
            assert answer == [Granted(process, 0, serial, node.memory[key])], "it is there and paid for"
            node.opened.add((process, key))
        elif what == "close" and (process, key) in node.opened:
            node.book.drop(process, 0, key, 0, 0, made=False)
            node.opened.discard((process, key))
        elif what == "free" and (process, key) in node.made:
            node.book.drop(process, 0, key, node.memory[key], 0, made=True)
            node.made.discard((process, key))
        node.forget()
        node.check(limit)


def name(serial: int) -> bytes:
    return b"%06d" % serial


def settled(book: Ledger, events: list[Event]) -> bool:
    """Granted, at last? Those that are asked have nothing unused."""
    for event in list(events):
        if isinstance(event, Recalled):
            events = book.give_back(event.process, 0, 0, event.recall, 0) or events
    return any(isinstance(event, Granted) for event in events)


def test_what_nvml_moves_from_a_maker_to_its_heir_is_not_taken_for_a_context() -> None:
    book = made(2000)
    book.begin_context(TWO, 0, 3, 100, 0)
    book.end_context(TWO, 0, 0)
    book.hold(TWO, 0, 5, KEY, 600, 0)
    for second in range(1, 5):
        book.measure(TWO, 0, 100, at_s=second, now_s=second)
    book.measure(TWO, 0, 700, at_s=5, now_s=5)
    assert book.context_bytes(0) == 100, "NVML knows of the maker's end before the arbiter does"
    book.leave(ONE, 5)
    for second in range(6, 12):
        book.measure(TWO, 0, 700, at_s=second, now_s=second)
        assert (book.context_bytes(0), book.shared_bytes(0)) == (100, 600)
    book.drop(TWO, 0, KEY, 0, 12, made=False)
    for second in range(13, 18):
        book.measure(TWO, 0, 130, at_s=second, now_s=second)
    assert (book.context_bytes(0), book.shared_bytes(0)) == (130, 0)
