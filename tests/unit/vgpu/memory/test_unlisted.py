"""Memory that NVML lists for no process: what explains it, what is tolerated, and how long it must last."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vgpu.memory.unlisted import (
    APART_S,
    STAYS_S,
    TOLERANCE_BYTES,
    Holder,
    Unlisted,
    UnlistedDetector,
    difference,
    suspected,
    tolerance_bytes,
)

MIB = 2**20
GPU, OTHER = "GPU-a", "GPU-b"
SOME = Unlisted(GPU, 2560 * MIB, 2560 * MIB)

amounts = st.integers(0, 1000)
holders = st.builds(Holder, amounts, amounts, amounts | st.just(0), amounts, st.booleans())


def explained(one: Holder) -> int:
    """The obvious slow version: all ways to explain what a process has, and the largest that counts."""
    ways = [one.listed_bytes or 0, (one.listed_bytes or 0) + one.managed_bytes, one.charged_bytes - one.unused_bytes]
    if one.managed_bytes == 0 or not one.still:
        ways.append(one.charged_bytes)
    return max(ways)


@example(1000, [Holder(100, 500, 1, 90)], 0)
@example(1000, [Holder(100, 500, 1, 90, still=True)], 0)
@example(1000, [Holder(100, 500, 0, 90, still=True)], 0)
@given(st.integers(0, 5000), st.lists(holders), amounts)
def test_what_is_explained_is_taken_off_once_and_the_rest_is_never_below_zero(
    used: int, of: list[Holder], charged: int
) -> None:
    rest = used - sum(map(explained, of))
    assert difference(used, of, charged) == max(rest - charged, 0)


@given(st.integers(0, 5000), st.lists(holders), holders)
def test_one_process_more_never_makes_it_more(used: int, of: list[Holder], more: Holder) -> None:
    before, after = difference(used, of), difference(used, [*of, more])
    assert before is not None
    assert after is not None
    assert after <= before
    assert tolerance_bytes(len(of)) <= tolerance_bytes(len(of) + 1)


@given(st.lists(st.tuples(amounts, amounts)), st.integers(0, 5000))
def test_unexplained_memory_is_found_to_the_byte_if_all_else_is_listed(of: list[tuple[int, int]], hidden: int) -> None:
    """Of each process: its memory, and how much of that is charged."""
    listed = [Holder(held, min(held, charged)) for held, charged in of]
    assert difference(sum(held for held, _ in of) + hidden, listed) == hidden


@example([(300, 100, 50, 0, 90), (300, 1, 0, 500, 90)], 7)
@given(st.lists(st.tuples(amounts, amounts.map(lambda mib: mib + 1), amounts, amounts, amounts)), st.integers(0, 5000))
def test_unexplained_memory_is_found_to_the_byte_beside_stated_managed_memory(
    of: list[tuple[int, int, int, int, int]], hidden: int
) -> None:
    """Of each process: what is listed, what it states of managed memory, what it is charged too little for its contexts, or has of managed
    memory and does not state, and what it leases and does not use."""
    known, used = list[Holder](), hidden
    for listed, managed, grown, variables, unused in of:
        charged = listed + managed + (variables or -min(grown, listed))
        known.append(Holder(listed, charged + unused, managed, unused, still=True))
        used += listed + managed + variables
    assert difference(used, known) == hidden


@example([(300, 100, 500)], 0)
@given(st.lists(st.tuples(amounts, amounts, amounts)), st.integers(0, 5000))
def test_managed_memory_that_is_not_stated_yet_is_not_taken_for_others(
    of: list[tuple[int, int, int]], hidden: int
) -> None:
    """Of each process: what is listed, what it stated of managed memory, and what it took of its lease since."""
    known = [Holder(listed, listed + stated + since, stated, since) for listed, stated, since in of]
    assert difference(sum(map(sum, of)) + hidden, known) == hidden


@given(st.lists(st.tuples(amounts, amounts, st.booleans())), st.integers(0, 5000))
def test_without_a_statement_of_managed_memory_the_whole_charge_counts_as_used(
    of: list[tuple[int, int, bool]], used: int
) -> None:
    """As of the release before: what is listed and what is charged, whichever is more."""
    left = difference(used, [Holder(listed, charged, 0, charged // 2, still) for listed, charged, still in of])
    assert left == max(0, used - sum(max(listed, charged) for listed, charged, _ in of))


@given(st.lists(st.tuples(amounts, amounts, amounts)), st.integers(0, 1000))
def test_managed_memory_in_the_hosts_memory_never_makes_it_more_than_there_is(
    of: list[tuple[int, int, int]], hidden: int
) -> None:
    """Of each process: what is listed, what it has of managed memory, and how much of that is not on the GPU."""
    used = sum(listed + max(0, managed - away) for listed, managed, away in of) + hidden
    known = [Holder(listed, listed + managed, managed, still=True) for listed, managed, _ in of]
    left = difference(used, known)
    assert left is not None
    assert left <= hidden


@given(st.lists(holders), st.integers(0, 10))
def test_a_process_with_an_unknown_amount_makes_it_unknown(of: list[Holder], at: int) -> None:
    of.insert(at, Holder(None, 500))
    assert difference(5000, of) is None
    assert difference(None, []) is None


def test_an_idle_gpu_and_processes_as_an_h200_shows_them_are_within_the_tolerance() -> None:
    """Measured: 5.56 to 5.62 MiB beside each context; managed memory is stated, and taken in steps of 128 MiB."""
    assert TOLERANCE_BYTES > 0
    for count in (1, 2, 8):
        listed = [Holder(1000 * MIB)] * count
        left = difference(count * 1006 * MIB, listed)
        assert left == count * 6 * MIB
        assert left < tolerance_bytes(count)
    for stated in (0, 7482):
        managed = [Holder(518 * MIB, (7482 + 518) * MIB, stated * MIB, still=True)]
        left = difference((518 + 6 + 7552) * MIB, managed)
        assert left == 76 * MIB
        assert left < tolerance_bytes(1)


@example([(1, SOME), (APART_S + 1, SOME), (1, SOME), (1, SOME), (APART_S + 1, SOME)])
@given(st.lists(st.tuples(st.floats(0.01, 2) | st.just(APART_S + 1), st.sampled_from([None, SOME]))))
def test_it_is_found_once_every_reading_of_so_long_showed_it(steps: list[tuple[float, Unlisted | None]]) -> None:
    detector, at_s, shown = UnlistedDetector(), 0.0, []
    for step_s, one in steps:
        at_s += step_s
        shown.append((at_s, one))
        detector.evaluate(at_s, {GPU: one})
        assert (GPU in detector.found) == stays(shown)


def stays(shown: list[tuple[float, Unlisted | None]]) -> bool:
    """The obvious slow version: some readings that follow each other showed it for so long, and all since showed it, too."""
    row = [begun_s for begun_s, seen in itertools.takewhile(lambda one: one[1], reversed(shown))][::-1]
    return any(
        end - begin >= STAYS_S and all(b - a <= APART_S for a, b in itertools.pairwise(row[i : j + 1]))
        for (i, begin), (j, end) in itertools.combinations(enumerate(row), 2)
    )


def test_a_gpu_that_does_not_answer_keeps_its_result_and_an_unread_one_is_dropped() -> None:
    detector = UnlistedDetector()
    for at_s in (0.0, 1.0, 2.0):
        detector.evaluate(at_s, {GPU: SOME})
    detector.evaluate(3.0, {OTHER: None})
    assert detector.found == {GPU: SOME}
    detector.forget(but=[GPU])
    assert detector.found == {GPU: SOME}
    detector.forget(but=[OTHER])
    assert detector.found == {}
    detector.evaluate(4.0, {GPU: SOME})
    assert detector.found == {}, "its row begins anew"


@pytest.mark.parametrize("apart_s", [1.0, 1.9, 5.0])
def test_it_takes_two_readings_at_least(apart_s: float) -> None:
    detector = UnlistedDetector()
    detector.evaluate(0.0, {GPU: SOME})
    assert detector.found == {}
    for number in range(1, 4):
        detector.evaluate(number * apart_s, {GPU: SOME})
    assert detector.found == {GPU: SOME}


OPENS = st.sampled_from([True, False, None])
LOOKED = st.lists(st.tuples(st.lists(st.sampled_from("abc"), min_size=1, unique=True), OPENS), max_size=6)


@given(LOOKED)
def test_a_container_is_named_only_where_no_other_can_be_meant(looked: list[tuple[list[str], bool | None]]) -> None:
    """In every possible case: a process with unknown descriptors has a GPU open or not, and belongs to any of its containers."""
    ways = [[*(keys if opens is not False else []), *([] if opens else [""])] for keys, opens in looked]
    worlds = [frozenset(world) - {""} for world in itertools.product(*ways)]
    same = len(set(worlds)) == 1 and len(worlds[0]) == 1
    assert suspected(looked) == (next(iter(worlds[0])) if same else None)


def test_no_container_is_named_if_no_process_has_a_gpu_open() -> None:
    assert suspected([]) is None
    assert suspected([(["a"], False), (["b"], False)]) is None
    assert suspected([(["a"], True), (["b"], False), (["a"], True)]) == "a"
    assert suspected([(["a"], True), (["a"], None)]) == "a"
    assert suspected([(["a"], True), (["b"], None)]) is None
