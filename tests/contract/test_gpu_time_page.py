"""The tables of docs/gpu-time.md are what bench/gpu_time/gpu-time.csv says, goals that are missed included."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bench.gpu_time.goals import Of, lines
from bench.gpu_time.table import Row, tables

ROOT = Path(__file__).resolve().parents[2]
MET: Of = {
    "alone": {"p50": 100.0, "p99": 200.0},
    "found by the library": {"p50": 300.0, "p99": 640.0},
    "announced 1.0 ms ahead": {"p50": 135.0, "p99": 280.0},
    "announced 1.5 ms ahead": {"p50": 103.0, "p99": 250.0},
}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    with (ROOT / "bench/gpu_time/gpu-time.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_pages_tables_are_those_of_the_csv(rows: list[Row]) -> None:
    _, _, body = tables(rows).partition("\n\n")  # before it stands which of the commits this clone has
    assert body in (ROOT / "docs/gpu-time.md").read_text()


def test_a_goal_that_is_just_reached_is_met() -> None:
    assert [one.met for one in lines({"lc": MET})] == [True] * 4


@pytest.mark.parametrize("figure", ["p50", "p99"])
@pytest.mark.parametrize("way", list(MET)[1:])
def test_a_goal_that_is_missed_is_not_met(way: str, figure: str) -> None:
    off = MET | {way: MET[way] | {figure: MET[way][figure] * 1.5}}
    missed = [one.what for one in lines({"lc": off}) if not one.met]
    assert missed
    assert all(way in what for what in missed)


def test_a_limit_that_is_off_in_either_direction_is_not_met() -> None:
    for seen, met in ((30.4, True), (30.6, False), (29.4, False)):
        caps = {"kernels, 30 % beside 60 %": {"GPU time": seen, "throughput of no limit": 30.0}}
        assert [one.met for one in lines({"caps": caps})] == [met, True], seen


def test_by_the_wall_counts_where_a_load_waits() -> None:
    caps = {"waited for, 30 %": {"GPU time": 33.0, "GPU time by the wall": 30.0, "throughput of no limit": 30.0}}
    assert [one.met for one in lines({"caps": caps})] == [True, True]


@pytest.mark.parametrize("other", ["time slicing", "MPS"])
def test_a_pair_that_is_worse_than_others_is_told(other: str) -> None:
    of = {"p50": 1.0, "p99": 2.0}
    ways = ("alone", "time slicing", "MPS", "found by the library", "announced 1.5 ms ahead")
    models = {f"pair: {way}": {name: value * 3 for name, value in of.items()} for way in ways[1:3]}
    models |= {f"pair: {way}": of for way in (ways[0], *ways[3:])}
    *_, better = lines({"models": models})
    assert better.met
    models[f"pair: {other}"] = {"p50": 3.0, "p99": 1.9}
    *_, better = lines({"models": models})
    assert (better.seen, better.met) == ("0", False)
