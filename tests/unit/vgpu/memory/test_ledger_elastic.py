"""Resident leases stay within the guarantee, and all leases within the burst limit."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from vgpu.memory.ledger import Ledger
from vgpu.memory.records import Denied, Event, Granted, Recalled

ONE, TWO = 1, 2


def ledger(guarantee: int = 100, burst: int = 300, *processes: int) -> Ledger:
    made = Ledger([guarantee])
    made.set_limits([guarantee], 0, [burst])
    for process in processes or (ONE, TWO):
        made.join(process)
    return made


def lease(book: Ledger, process: int, amount: int, *, elastic: bool) -> list[Event]:
    return book.request(process, 0, 1, amount, amount, 0, elastic=elastic)


def test_resident_memory_may_fill_the_guarantee_and_elastic_memory_the_rest_up_to_the_limit_in_all() -> None:
    book = ledger()
    assert lease(book, ONE, 101, elastic=False) == [Denied(ONE, 0, 1)]
    assert lease(book, ONE, 100, elastic=False) == [Granted(ONE, 0, 1, 100)]
    assert lease(book, TWO, 200, elastic=True) == [Granted(TWO, 0, 1, 200)]
    assert book.unleased_bytes(0) == 0


def test_elastic_memory_alone_may_fill_the_limit_and_then_nothing_resident_fits() -> None:
    book = ledger()
    assert lease(book, ONE, 290, elastic=True) == [Granted(ONE, 0, 1, 290)]
    (recalled,) = lease(book, TWO, 11, elastic=False)
    assert isinstance(recalled, Recalled), "the elastic lease may be unused"
    assert book.give_back(ONE, 0, 0, recalled.recall, 0) == [Denied(TWO, 0, 1)]
    assert lease(book, TWO, 10, elastic=False) == [Granted(TWO, 0, 1, 10)]


def test_a_context_and_its_growth_are_resident() -> None:
    book = ledger()
    lease(book, ONE, 150, elastic=True)
    assert book.begin_context(ONE, 0, 1, 60, 0) == [Granted(ONE, 0, 1, 60)]
    assert book.bound_context(ONE, 0, 3, 40, 0) == [Granted(ONE, 0, 3, 40)]
    assert book.bound_context(ONE, 0, 5, 41, 0) == [Denied(ONE, 0, 5)]


def test_a_lower_burst_limit_takes_nothing_away_and_grants_no_more() -> None:
    book = ledger()
    lease(book, ONE, 200, elastic=True)
    book.set_limits([100], 0, [150])
    assert book.unleased_bytes(0) == 0
    assert lease(book, ONE, 1, elastic=True) == [Denied(ONE, 0, 1)]
    assert book.leased_bytes(0) == 200


def test_a_burst_below_the_guarantee_has_no_effect() -> None:
    book = ledger(100, 50)
    assert lease(book, ONE, 100, elastic=True) == [Granted(ONE, 0, 1, 100)]


def test_leases_stated_to_a_new_arbiter_are_resident_and_can_be_returned_as_elastic() -> None:
    book = ledger()
    book.state(ONE, 0, 200, 200)
    assert lease(book, ONE, 1, elastic=False) == [Denied(ONE, 0, 1)]
    book.give_back(ONE, 0, 150, 0, 0, elastic=True)
    assert lease(book, ONE, 50, elastic=False) == [Granted(ONE, 0, 1, 50)]


def test_what_is_returned_is_of_the_kind_that_the_process_names() -> None:
    book = ledger()
    lease(book, ONE, 100, elastic=False)
    lease(book, ONE, 100, elastic=True)
    book.give_back(ONE, 0, 50, 0, 0)
    assert lease(book, ONE, 50, elastic=False) == [Granted(ONE, 0, 1, 50)]
    assert lease(book, ONE, 1, elastic=False) == [Denied(ONE, 0, 1)]
    book.give_back(ONE, 0, 50, 0, 0, elastic=True)
    assert lease(book, ONE, 1, elastic=False) == [Denied(ONE, 0, 1)]


def test_the_end_of_a_process_ends_both_kinds() -> None:
    book = ledger()
    lease(book, ONE, 100, elastic=False)
    lease(book, ONE, 200, elastic=True)
    book.leave(ONE, 0)
    assert lease(book, TWO, 100, elastic=False) == [Granted(TWO, 0, 1, 100)]
    assert lease(book, TWO, 200, elastic=True) == [Granted(TWO, 0, 1, 200)]


def test_what_a_process_states_to_be_elastic_is_no_longer_resident_after_a_restart() -> None:
    book = ledger()
    book.state(ONE, 0, 200, 200)
    assert lease(book, ONE, 1, elastic=False) == [Denied(ONE, 0, 1)]
    assert book.states_elastic(ONE, 0, 150, 0) == []
    assert book.claimed_bytes(0) == (50, 150)
    assert lease(book, TWO, 50, elastic=False) == [Granted(TWO, 0, 1, 50)]
    book.give_back(ONE, 0, 150, 0, 0, elastic=True)
    assert book.claimed_bytes(0) == (100, 0)


def test_a_request_that_waits_is_decided_when_kinds_become_known() -> None:
    book = Ledger([100], may_answer=lambda _: True)
    book.set_limits([100], 0, [300])
    for process in (ONE, TWO):
        book.join(process)
    book.state(ONE, 0, 200, 200)
    (recalled,) = lease(book, TWO, 60, elastic=False)
    assert isinstance(recalled, Recalled)
    assert book.states_elastic(ONE, 0, 180, 0) == [Granted(TWO, 0, 1, 60)]


def test_a_statement_changes_nothing_that_was_leased_from_this_arbiter() -> None:
    book = ledger()
    lease(book, ONE, 80, elastic=False)
    lease(book, ONE, 40, elastic=True)
    assert book.states_elastic(ONE, 0, 120, 0) == []
    assert book.claimed_bytes(0) == (80, 40)


def test_a_part_that_became_resident_after_a_restart_stays_so() -> None:
    book = ledger()
    book.state(ONE, 0, 80, 80)
    assert book.convert(ONE, 0, 3, 30) == Granted(ONE, 0, 3, 30)
    book.states_elastic(ONE, 0, 80, 0)
    assert book.claimed_bytes(0) == (30, 50)


@dataclass
class Kinds:
    """The obvious slow version of one process after a restart: each byte of its lease is resident, elastic, or of an unknown kind."""

    bytes: list[str]

    def count(self, kind: str) -> int:
        return self.bytes.count(kind)

    def become(self, before: str, after: str, amount: int) -> None:
        for at, kind in enumerate(self.bytes):
            if kind == before and amount > 0:
                self.bytes[at], amount = after, amount - 1

    def drop(self, amount: int, *order: str) -> None:
        for kind in order:
            for _ in range(min(amount, self.count(kind))):
                self.bytes.remove(kind)
                amount -= 1


@given(
    st.integers(0, 60),
    st.lists(
        st.tuples(
            st.sampled_from(["state", "resident", "elastic", "return", "return elastic", "convert"]), st.integers(0, 70)
        ),
        max_size=30,
    ),
)
def test_kinds_after_a_restart_are_as_the_slow_version_has_them(stated: int, steps: list[tuple[str, int]]) -> None:
    book, kinds = ledger(1000, 2000, ONE), Kinds(["unknown"] * stated)
    book.state(ONE, 0, stated, stated)
    for what, amount in steps:
        some = min(amount, len(kinds.bytes))
        match what:
            case "state":
                kinds.become("unknown", "elastic", amount - kinds.count("elastic"))
                book.states_elastic(ONE, 0, amount, 0)
            case "resident" | "elastic":
                kinds.bytes += [what] * amount
                lease(book, ONE, amount, elastic=what == "elastic")
            case "return":
                kinds.drop(some, "resident", "unknown", "elastic")
                book.give_back(ONE, 0, some, 0, 0)
            case "return elastic":
                kinds.drop(some, "elastic", "resident", "unknown")
                book.give_back(ONE, 0, some, 0, 0, elastic=True)
            case "convert":
                rest = some - kinds.count("elastic")
                kinds.become("elastic", "resident", some)
                kinds.become("unknown", "resident", rest)
                assert isinstance(book.convert(ONE, 0, 3, some), Granted)
        elastic = kinds.count("elastic")
        assert book.claimed_bytes(0) == (len(kinds.bytes) - elastic, elastic)
        assert elastic <= book.leased_bytes(0)


@dataclass
class Model:
    """The obvious slow version: a list of all that is leased."""

    leases: list[tuple[int, bool, int]] = field(default_factory=list)

    def sum(self, *, elastic: bool | None = None) -> int:
        return sum(amount for _, kind, amount in self.leases if elastic in (None, kind))

    def has(self, process: int, *, elastic: bool) -> int:
        return sum(amount for one, kind, amount in self.leases if (one, kind) == (process, elastic))

    def fits(self, amount: int, *, elastic: bool) -> bool:
        return self.sum() + amount <= 300 and (elastic or self.sum(elastic=False) + amount <= 100)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([ONE, TWO]), st.booleans(), st.sampled_from(["lease", "return", "end"]), st.integers(0, 320)
        ),
        max_size=40,
    )
)
def test_any_leases_and_returns_are_decided_as_the_slow_version_decides(
    happenings: list[tuple[int, bool, str, int]],
) -> None:
    book, model = ledger(), Model()
    for process in (ONE, TWO):
        book.leases_exactly(process, 0, exact=True)  # no recalls
    for process, elastic, what, amount in happenings:
        if what == "lease":
            granted = lease(book, process, amount, elastic=elastic) == [Granted(process, 0, 1, amount)]
            assert granted is model.fits(amount, elastic=elastic)
            model.leases += [(process, elastic, amount)] if granted else []
        elif what == "return":
            back = min(amount, model.has(process, elastic=elastic))
            book.give_back(process, 0, back, 0, 0, elastic=elastic)
            model.leases.append((process, elastic, -back))
        else:
            book.leave(process, 0)
            book.join(process)
            book.leases_exactly(process, 0, exact=True)
            model.leases = [one for one in model.leases if one[0] != process]
        assert book.leased_bytes(0) == model.sum()
        assert book.unleased_bytes(0) == 300 - model.sum()
