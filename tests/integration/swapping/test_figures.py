"""What the measurements of swapping compute from: stamps, shapes, rows."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.memory_swap import beside, published, shapes, stamps
from bench.memory_swap.figures import Figure, Figures
from bench.memory_swap.stamps import Stamp, Stamps
from tests.examples import examples

ABOUT = {"gpu": "g", "driver": "d", "date": "2026-11-26", "commit": "c"}
TIMES = st.lists(st.integers(0, 10_000), max_size=30, unique=True)


def slow_changes(first: list[int], second: list[int]) -> list[tuple[int, int, int]]:
    """(at, to, gap): walks every time that there is."""
    found, last, who = [], -1, -1
    for at in range(10_001):
        for number, ended in enumerate((first, second)):
            if at in ended:
                if who not in (-1, number):
                    found.append((at, number, at - last))
                last, who = at, number
    return found


@settings(max_examples=examples(60))
@given(TIMES, TIMES)
def test_changes_are_where_the_other_one_ends_next(first: list[int], second: list[int]) -> None:
    second = [one for one in second if one not in first]
    found = stamps.changes(*([Stamp(at - 0.5, at) for at in sorted(times)] for times in (first, second)))
    assert [(one.at_s, one.to, one.gap_s) for one in found] == slow_changes(first, second)
    assert all(one.piece_s == 0.5 for one in found)


def test_another_process_reads_stamps_while_they_are_written(tmp_path: Path) -> None:
    written = Stamps(tmp_path / "stamps")
    assert stamps.read(tmp_path / "stamps") == []
    began_ns = time.monotonic_ns()
    ended_ns = written.add(began_ns)
    assert stamps.read(tmp_path / "stamps") == [Stamp(began_ns / 1e9, ended_ns / 1e9)]


def test_stamps_beyond_the_file_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamps, "CAPACITY", 2)
    written = Stamps(tmp_path / "stamps")
    for _ in range(3):
        written.add(0)
    assert (written.dropped, len(stamps.read(tmp_path / "stamps"))) == (1, 2)


@given(st.integers(2**24, 2**36))
def test_a_model_has_its_size_and_its_segments_hold_it(total_bytes: int) -> None:
    tensors = shapes.tensors(total_bytes)
    assert sum(tensors) == pytest.approx(total_bytes, rel=0.01)
    for form in shapes.FORMS:
        blocks = shapes.blocks(form, total_bytes)
        assert sum(blocks) >= sum(tensors) * 0.99
        assert all(size % shapes.PAGE == 0 for size in blocks)


def test_the_model_of_16_gb_is_that_of_the_issue() -> None:
    assert len(shapes.blocks("2 MiB", 8000 * shapes.PAGE)) == 8000
    assert set(shapes.blocks("expandable", 16 * 10**9)) == {20 * shapes.MIB}
    large = [size for size in shapes.blocks("segments", 16 * 10**9) if size > shapes.MIDDLE_SEGMENT]
    assert sum(large) > 0.95 * 16 * 10**9


def test_the_published_ratios_are_those_that_the_issue_names() -> None:
    (big,) = [one for one in published.PROGRAMS if one.name == "big_50"]
    assert round(big.ratios["quantum 1000 s"], 2) == 0.74
    assert round(big.ratios["unified memory"], 2) == 4.25


def test_a_run_goes_on_where_an_earlier_one_ended(tmp_path: Path) -> None:
    one = Figures(tmp_path / "new" / "f.csv", ABOUT)
    one.add("jobs", "a, b", 0, {"both": Figure(1.5, "s", 'a "note"')}, complete=False)
    one.add("jobs", "c", 0, {"both": Figure(2.5, "s")})
    one.not_run("jobs", "d", "why\nso")
    again = Figures(tmp_path / "new" / "f.csv", ABOUT)
    assert again.rows == one.rows
    assert [again.done("jobs", name, 0) for name in ("a, b", "c", "d")] == [False, True, False]
    assert not again.done("jobs", "c", 1)
    assert again.value("jobs", "a, b", "both", 0) == 1.5
    assert again.value("jobs", "a, b", "both", 1) is None


def test_the_spread_has_median_least_and_most(tmp_path: Path) -> None:
    made = Figures(tmp_path / "f.csv", ABOUT)
    for repeat, value in enumerate((3.0, 1.0, 2.0)):
        made.add("jobs", "a", repeat, {"both": Figure(value, "s")})
    (line,) = made.spread()
    assert line.split()[-6:] == ["s", "[1", "..", "3]", "of", "3"]


def test_what_a_server_loses_beside_training_is_told_beside_its_own_spread() -> None:
    alone = beside.Served([100.0] * 10, [10.0] * 100, busy=0.5)
    other = beside.Served([104.0] * 10, [10.0] * 99 + [20.0], busy=0.5)
    again = beside.Served([100.0] * 10, [10.1] * 100, busy=0.5)
    rows = beside.rows(5, alone, other, again, kept=0.46)
    assert rows["5/s: first token p50 beside"].value == pytest.approx(1.04)
    assert rows["5/s: per token p50 beside"] == (pytest.approx(1), "", "goal <= 1.02; solo's own 1.010")
    assert rows["5/s: per token p99 beside"].value == pytest.approx(1, abs=0.02)
    assert rows["5/s: training keeps of what is left"].value == pytest.approx(0.92)
