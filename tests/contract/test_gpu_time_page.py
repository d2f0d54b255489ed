"""The tables of bench/gpu_time/README.md are what bench/gpu_time/gpu-time.csv says, goals that are missed or were not measured included."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu_time import caps
from bench.gpu_time.goals import (
    AT_POWER_CAP,
    BY_THE_WALL,
    LOADS,
    NOT_MEASURED,
    THROUGHPUT,
    TIME,
    WAITED,
    Figures,
    Line,
    lines,
)
from bench.gpu_time.table import Row, tables
from vgpu.gputime.driver_abi import BRANCHES

ROOT = Path(__file__).resolve().parents[2]
FOUND, AHEAD_1_MS, AHEAD = "found by the library", "announced 1.0 ms ahead", "announced 1.5 ms ahead"
ALONE = {"p50": 100.0, "p99": 200.0}
WAKES = "50 containers: wake-up to suspend"
KEYS = ("part", "case", "figure", "repeat")
IDLE = "processor while nothing happens"

LC = [
    f"5 launches beside kernels of 60 ms, {way}, times alone"
    for way in (FOUND, f"{FOUND}, as an arbiter that spins should", AHEAD_1_MS, AHEAD)
]
PAIR = [f"pair, {way}, times alone" for way in (FOUND, AHEAD)]
BETTER = "decode, in each pair found and announced: better than time slicing and than MPS without a cap, p50 and p99"
WALL = "GPU time at core limits, by the wall, most points off what was asked"
WORKING = "the same, of products that are waited for one by one, of the time in which they have work"
WORK = (
    "throughput at core limits, away from the GPU's power cap, most points off what was asked "
    "(left out: 8192^3 bf16 matmul; 8192^3 bf16 matmul, waited for; graph of 20 matmuls)"
)
LEFT_OUT = "the same, of those left out"
LATE = "from the arbiter's wake-up to the suspend, 50 containers, us"
NOTHING = "the arbiter while nothing happens, % of a core"
ROWS = [*LC, *PAIR, BETTER, WALL, WORKING, WORK, LEFT_OUT, LATE, NOTHING]

MET: dict[str, Figures] = {
    "lc": {
        "alone": ALONE,
        FOUND: {"p50": 300.0, "p99": 640.0},
        AHEAD_1_MS: {"p50": 135.0, "p99": 280.0},
        AHEAD: {"p50": 103.0, "p99": 250.0},
    },
    "models": {
        "pair: alone": ALONE,
        "pair: time slicing": {"p50": 136.0, "p99": 301.0},
        "pair: MPS": {"p50": 136.0, "p99": 301.0},
        f"pair: {FOUND}": {"p50": 135.0, "p99": 300.0},
        f"pair: {AHEAD}": {"p50": 110.0, "p99": 250.0},
    },
    "caps": {
        "1 ms kernels, no limit": {"throughput": 990.0},
        **{f"{load}, 30 %": {TIME: 30.5, BY_THE_WALL: 30.5, THROUGHPUT: 32.0} for load in LOADS},
        **{f"{load}, 30 %": {TIME: 30.5, BY_THE_WALL: 30.5, THROUGHPUT: 38.0} for load in AT_POWER_CAP},
        "1 ms kernels, 60 % beside 30 %": {TIME: 60.5, BY_THE_WALL: 60.5, THROUGHPUT: 62.0},
    },
    "wakes": {WAKES: {"p50": 50.0, "p99": 150.0}, "50 containers": {IDLE: 2.0}},
}
"""Every goal just so."""

AT_30 = [f"{load}, 30 %" for load in (*LOADS, *AT_POWER_CAP)]
EDGES = [
    ("lc", FOUND, "p50", 330.0, 330.1, LC[0]),
    ("lc", FOUND, "p99", 840.0, 840.1, LC[0]),
    ("lc", FOUND, "p50", 300.0, 300.1, LC[1]),
    ("lc", FOUND, "p99", 640.0, 640.1, LC[1]),
    ("lc", AHEAD_1_MS, "p50", 135.0, 135.1, LC[2]),
    ("lc", AHEAD_1_MS, "p99", 280.0, 280.1, LC[2]),
    ("lc", AHEAD, "p50", 103.0, 103.1, LC[3]),
    ("lc", AHEAD, "p99", 250.0, 250.1, LC[3]),
    ("models", f"pair: {FOUND}", "p50", 135.0, 135.1, PAIR[0]),
    ("models", f"pair: {FOUND}", "p99", 300.0, 300.1, PAIR[0]),
    ("models", f"pair: {AHEAD}", "p50", 110.0, 110.1, PAIR[1]),
    ("models", f"pair: {AHEAD}", "p99", 250.0, 250.1, PAIR[1]),
    *(
        ("models", f"pair: {other}", figure, slowest + 0.1, slowest, BETTER)
        for other in ("time slicing", "MPS")
        for figure, slowest in (("p50", 135.0), ("p99", 300.0))
    ),
    ("models", f"pair: {AHEAD}", "p50", 135.9, 136.0, BETTER),
    ("models", f"pair: {FOUND}", "p99", 300.9, 301.0, BETTER),
    *(("caps", case, BY_THE_WALL, 30.5, 30.54, WALL) for case in AT_30),
    *(("caps", case, BY_THE_WALL, 29.5, 29.46, WALL) for case in AT_30),
    ("caps", "1 ms kernels, 60 % beside 30 %", BY_THE_WALL, 59.5, 59.46, WALL),
    ("caps", f"{WAITED}, 30 %", TIME, 30.5, 30.54, WORKING),
    ("caps", f"{WAITED}, 30 %", TIME, 29.5, 29.46, WORKING),
    *(("caps", f"{load}, 30 %", THROUGHPUT, 32.0, 32.04, WORK) for load in LOADS),
    *(("caps", f"{load}, 30 %", THROUGHPUT, 28.0, 27.96, WORK) for load in LOADS),
    ("caps", "1 ms kernels, 60 % beside 30 %", THROUGHPUT, 58.0, 57.96, WORK),
    ("wakes", WAKES, "p50", 50.0, 50.4, LATE),
    ("wakes", WAKES, "p99", 150.0, 150.4, LATE),
    ("wakes", "50 containers", IDLE, 2.0, 2.04, NOTHING),
]
"""Part, case, figure, the last value that meets a goal, one that misses it, and the goal's row."""


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    with (ROOT / "bench/gpu_time/gpu-time.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def seen(part: str, case: str, figure: str, value: float | None) -> dict[str, Line]:
    """The rows where this figure is another, or missing."""
    of = {name: kept for name, kept in MET[part][case].items() if name != figure}
    of |= {} if value is None else {figure: value}
    found = list(lines(MET | {part: MET[part] | {case: of}}))
    assert [one.what for one in found] == ROWS
    return {one.what: one for one in found}


def test_the_pages_tables_are_those_of_the_csv(rows: list[Row]) -> None:
    _, _, body = tables(rows).partition("\n\n")  # before it stands which of the commits this clone has
    assert body in (ROOT / "bench/gpu_time/README.md").read_text()


@pytest.mark.parametrize("folder", [ROOT, None])
def test_the_tables_are_made_by_a_script_from_anywhere(folder: Path | None, rows: list[Row], tmp_path: Path) -> None:
    where = folder or tmp_path
    script, figures = (ROOT / "bench/gpu_time" / name for name in ("table.py", "gpu-time.csv"))
    names = [str(path.relative_to(where) if folder else path) for path in (script, figures)]
    (tmp_path / "page.md").write_text("before\n<!-- figures -->\nold\n<!-- end -->\nafter\n")
    done = subprocess.run(
        [sys.executable, "-S", *names, str(tmp_path / "page.md")],
        cwd=where,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    written = f"before\n<!-- figures -->\n\n{tables(rows)}\n<!-- end -->\nafter\n"
    assert (tmp_path / "page.md").read_text() == written


@pytest.mark.parametrize("part", ["lc", "models", "caps", "wakes"])
def test_a_page_is_made_of_the_parts_that_were_run(part: str, rows: list[Row]) -> None:
    made = tables([row for row in rows if row["part"] != part])
    assert "| **not measured**, not met |" in made
    kept = tables([row for row in rows if row["part"] == part])
    assert kept.count("| **not measured**, not met |") > made.count("| **not measured**, not met |")
    assert not any(table.endswith("---|") for table in kept.split("\n\n"))
    assert "Taken for liars" in made
    assert "Taken for liars" not in kept


@pytest.mark.parametrize(
    ("part", "case", "figure", "goal"),
    [
        ("lc", FOUND, "p99", f"| {LC[0]} | 3.3 / 4.2 |"),
        (
            "models",
            "decode beside training: alone",
            "p99",
            f"| decode beside training, {AHEAD}, times alone | 1.1 / 1.25 |",
        ),
        ("models", "decode beside training: MPS", "p99", f"| {BETTER} | 10 of 10 |"),
        ("caps", "small operations, 10 %", BY_THE_WALL, f"| {WALL} | 0.5 |"),
        ("caps", "small operations, 10 %", THROUGHPUT, f"| {WORK} | 2 |"),
        ("wakes", WAKES, "p99", f"| {LATE} | 50 / 150 |"),
        ("wakes", "50 containers", IDLE, f"| {NOTHING} | 2 |"),
    ],
)
@pytest.mark.parametrize("value", ["", "nan", None])
def test_a_figure_without_a_value_is_not_met_on_the_page(
    part: str, case: str, figure: str, goal: str, value: str | None, rows: list[Row]
) -> None:
    at = next(at for at, row in enumerate(rows) if [row[key] for key in KEYS] == [part, case, figure, "all"])
    instead = [] if value is None else [rows[at] | {"value": value}]
    assert f"{goal} **not measured**, not met |" in tables([*rows[:at], *instead, *rows[at + 1 :]])
    assert f"{goal} **not measured**, not met |" not in tables(rows)


@pytest.mark.parametrize(
    ("part", "alone", "other"),
    [
        ("lc", "alone", "| time slicing | 1,530 | 2,521 |  | 16.0 |"),
        ("models", "decode beside training: alone", "| decode beside training: MPS | 6.24 | 19.94 | 44.41 |  | 98.4 ("),
        ("clocks", "alone, held", "| beside 16384^3 matmul | 4.45 | 12.30 |  | 1,599 | 62.1 |"),
    ],
)
def test_without_the_case_that_is_alone_there_is_nothing_to_report(
    part: str, alone: str, other: str, rows: list[Row]
) -> None:
    assert other in tables([row for row in rows if (row["part"], row["case"]) != (part, alone)])


def test_a_case_whose_rows_all_have_no_value_is_not_left_out(rows: list[Row]) -> None:
    case = {"part": "caps", "case": "small operations, 10 %"}
    made = tables([row | ({"value": ""} if row.items() >= case.items() else {}) for row in rows])
    assert all(f"| {row} | {goal} | **not measured**, not met |" in made for row, goal in ((WALL, 0.5), (WORK, 2)))


def test_each_goal_has_a_row_and_is_met_by_what_just_reaches_it() -> None:
    assert [(one.what, one.met) for one in lines(MET)] == [(what, True) for what in ROWS]


@pytest.mark.parametrize(("part", "case", "figure", "reached", "missed", "row"), EDGES)
def test_a_goal_is_met_up_to_its_edge_and_not_past_it(
    part: str, case: str, figure: str, reached: float, missed: float, row: str
) -> None:
    assert seen(part, case, figure, reached)[row].met
    found = seen(part, case, figure, missed)
    assert not found[row].met
    assert found[row].seen != NOT_MEASURED
    concerned = {edge[-1] for edge in EDGES if edge[:3] == (part, case, figure)}
    assert {what for what, one in found.items() if not one.met} <= concerned


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
@pytest.mark.parametrize(("part", "case", "figure", "row"), [(*edge[:3], edge[-1]) for edge in EDGES])
def test_a_figure_that_is_missing_or_no_number_was_not_measured(
    part: str, case: str, figure: str, row: str, value: float | None
) -> None:
    one = seen(part, case, figure, value)[row]
    assert (one.seen, one.met) == (NOT_MEASURED, False)


@pytest.mark.parametrize(("part", "case", "concerned"), [("lc", "alone", LC), ("models", "pair: alone", PAIR)])
@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 0.0])
def test_without_what_it_is_alone_nothing_was_measured(
    part: str, case: str, concerned: list[str], value: float | None
) -> None:
    found = seen(part, case, "p99", value)
    assert [what for what, one in found.items() if not one.met] == concerned
    assert {found[what].seen for what in concerned} == {NOT_MEASURED}


@pytest.mark.parametrize("case", ["pair: alone", f"pair: {FOUND}", f"pair: {AHEAD}", "pair: time slicing", "pair: MPS"])
def test_each_way_of_each_pair_has_its_row_though_the_way_was_not_run(case: str) -> None:
    models = {name: of for name, of in MET["models"].items() if name != case}
    models |= {name.replace("pair", "other"): of for name, of in MET["models"].items()}
    found = {one.what: one for one in lines({"models": models})}
    assert list(found)[4:9] == [*PAIR, *(row.replace("pair", "other") for row in PAIR), BETTER]
    assert all(found[row.replace("pair", "other")].met for row in PAIR)
    assert not all(found[row].met for row in (*PAIR, BETTER))


def test_one_pair_that_is_worse_is_counted() -> None:
    better = seen("models", "pair: MPS", "p50", 120.0)[BETTER]
    assert (better.goal, better.seen, better.met) == ("2 of 2", "1", False)


@pytest.mark.parametrize("load", [*LOADS, *AT_POWER_CAP])
def test_a_load_that_was_not_run_is_not_left_out(load: str) -> None:
    kept = {case: of for case, of in MET["caps"].items() if not case.startswith(f"{load}, ")}
    found = {one.what: one for one in lines(MET | {"caps": kept})}
    assert list(found) == ROWS
    row = LEFT_OUT if load in AT_POWER_CAP else WORK
    assert [found[WALL].seen, found[row].seen] == [NOT_MEASURED] * 2
    assert not found[WALL].met


def test_a_load_of_an_unknown_name_counts_for_the_goals() -> None:
    for case, wall in (("new matmul, 30 %", 30.6), ("new matmul, 60 % beside 30 %", 60.6)):
        of = {TIME: wall, BY_THE_WALL: wall, THROUGHPUT: wall + 5}
        found = lines(MET | {"caps": MET["caps"] | {case: of}})
        assert [one.what for one in found if not one.met] == [WALL, WORK]


def test_the_loads_are_those_of_the_benchmark() -> None:
    assert {*LOADS, *AT_POWER_CAP} == {load.name for load in caps.loads(1)}


def test_what_is_left_out_has_a_row_without_a_goal() -> None:
    for value, shown in ((38.26, "8.26"), (20.0, "10.00"), (None, NOT_MEASURED)):
        one = seen("caps", "graph of 20 matmuls, 30 %", THROUGHPUT, value)[LEFT_OUT]
        assert (one.goal, one.seen, one.met) == ("-", shown, True)
    assert seen("caps", "small operations, 30 %", THROUGHPUT, 60.0)[LEFT_OUT].seen == "8.00"


@pytest.mark.parametrize("part", [*MET, "all of them"])
def test_a_part_that_was_not_run_has_its_rows(part: str) -> None:
    of_part = {
        "lc": LC,
        "models": [*(row.replace("pair", "decode") for row in PAIR), BETTER],
        "caps": [WALL, WORKING, WORK],
        "wakes": [LATE, NOTHING],
    }
    found = list(lines({name: of for name, of in MET.items() if part not in (name, "all of them")}))
    assert len(found) == len(ROWS)
    missed = of_part[part] if part in of_part else [what for rows in of_part.values() for what in rows]
    assert [one.what for one in found if not one.met] == missed
    assert {one.seen for one in found if not one.met} == {NOT_MEASURED}


def test_the_table_of_launch_gating_is_that_of_its_csv() -> None:
    with (ROOT / "bench/gpu_time/gated.csv").open(newline="") as file:
        had = [row for row in csv.DictReader(file) if row["figure"] == "had" and row["repeat"] != "all"]
    found: dict[str, dict[str, list[str]]] = {}
    for row in had:
        kernels, _, percent = row["case"].partition(" kernels, ")
        found.setdefault(kernels, {}).setdefault(percent, []).append(f"{float(row['value']):.1f}")
    assert len(found) == 5
    page = (ROOT / "docs/operations/gpu-time.md").read_text()
    for kernels, shares in found.items():
        ranges = [
            values[0] if len({*values}) == 1 else " to ".join(sorted(values, key=float)) for values in shares.values()
        ]
        assert f"| {kernels} | {' | '.join(ranges)} |" in page


def test_the_page_names_the_known_driver_branches() -> None:
    page = (ROOT / "docs/operations/gpu-time.md").read_text()
    assert f"branches {min(BRANCHES)} to {max(BRANCHES)}, whose interface is known" in page
    assert f"| verdict | driver {min(BRANCHES)} to {max(BRANCHES)} | another driver |" in page
