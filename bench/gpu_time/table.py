"""The figures of gpu-time.csv as tables, between the marks of README.md.

python3 bench/gpu_time/table.py gpu-time.csv            prints them
python3 bench/gpu_time/table.py gpu-time.csv PAGE.md    writes them into the page, between <!-- figures --> and <!-- end -->
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.gpu_time import goals
from bench.gpu_time.goals import BY_THE_WALL, QUANTILES, THROUGHPUT, TIME

Row = dict[str, str]


def _figures(rows: list[Row], part: str) -> dict[str, dict[str, Row]]:
    """Over all repeats: case -> figure -> row. Rows without a value are left out, their cases are not."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["part"] == part and row["repeat"] == "all":
            of = found.setdefault(row["case"], {})
            if row["value"]:
                of[row["figure"]] = row
    return found


def _cell(of: dict[str, Row], figure: str, form: str) -> str:
    """Empty where there is no such figure."""
    return format(float(of[figure]["value"]), form) if figure in of else ""


def _times(of: dict[str, Row], alone: dict[str, Row]) -> str:
    """p50 and p99 of those alone; empty where one is missing."""
    if not all(name in each for each in (of, alone) for name in QUANTILES):
        return ""
    return " / ".join(f"{float(of[name]['value']) / float(alone[name]['value']):.2f}" for name in QUANTILES)


def _spread(of: dict[str, Row], figure: str) -> str:
    """The value and the range of the repeats; empty where there is no such figure."""
    if figure not in of:
        return ""
    value, low, high = (f"{float(of[figure][name]):.1f}" for name in ("value", "low", "high"))
    return value if low == value == high else f"{value} ({low} to {high})"


def _goals(rows: list[Row]) -> list[str]:
    values: dict[str, goals.Figures] = {}
    for part in dict.fromkeys(row["part"] for row in rows):
        found = _figures(rows, part)
        values[part] = {case: {name: float(row["value"]) for name, row in of.items()} for case, of in found.items()}
    head = [
        "| what was to be reached; over all repeats together, p50 / p99 where there are two figures | goal | seen |",
        "|---|---|---|",
    ]
    lines = ((one, one.seen if one.met else f"**{one.seen}**, not met") for one in goals.lines(values))
    return head + [f"| {one.what} | {one.goal} | {seen} |" for one, seen in lines]


def _latency(rows: list[Row]) -> list[str]:
    found = {case: of for case, of in _figures(rows, "lc").items() if not case.startswith("the last arbiter")}
    if not found:
        return []
    lines = [
        "| 5 launches of 48 us every 10 ms, beside kernels of 59.5 ms | p50 us | p99 us | of alone | neighbour's kernels a second |",
        "|---|---|---|---|---|",
    ]
    for case, of in found.items():
        words = [
            *(_cell(of, name, ",.0f") for name in QUANTILES),
            _times(of, found.get("alone", {})),
            _cell(of, RATE, ".1f"),
        ]
        lines.append(f"| {case} | {' | '.join(words)} |")
    return lines


RATE = "neighbour's kernels"


def _models(rows: list[Row]) -> list[str]:
    found = _figures(rows, "models")
    if not found:
        return []
    lines = [
        "| decode at batch 1, 50 requests a second | p50 ms | p99 ms | p99.9 ms | of alone, p50 / p99 | neighbour's progress of alone % |",
        "|---|---|---|---|---|---|",
    ]
    for case, of in found.items():
        if "p50" not in of:
            continue
        alone = found.get(case.partition(":")[0] + ": alone", {})
        seen = " | ".join(_cell(of, name, ".2f") for name in (*QUANTILES, "p99.9"))
        lines.append(f"| {case} | {seen} | {_times(of, alone)} | {_spread(of, KEPT)} |")
    return lines


KEPT = "neighbour's steps of alone"


def _clocks(rows: list[Row]) -> list[str]:
    found = _figures(rows, "clocks")
    if not found:
        return []
    lines = [
        "| decode of 8 tokens as a graph; beside others announced 1.5 ms ahead where not noted otherwise | p50 ms | p99 ms | of alone, p50 / p99 | clock in the requests, MHz | neighbour's steps a second |",
        "|---|---|---|---|---|---|",
    ]
    alone = found.get("alone, held", {})
    for case, of in found.items():
        seen = " | ".join(_cell(of, name, ".2f") for name in QUANTILES)
        lines.append(
            f"| {case} | {seen} | {_times(of, alone)} | {_cell(of, 'clock', ',.0f')} | {_cell(of, STEPS, '.1f')} |"
        )
    return lines


STEPS = "neighbour's steps"


def _copies(rows: list[Row]) -> list[str]:
    found = {case.partition(": ")[2]: of for case, of in _figures(rows, "copies").items() if ": " in case}
    if not found:
        return []
    lines = [
        "| requests that copy in and out, beside a neighbour that does nothing but copy | p50 us | p99 us | neighbour's copies, GB/s each way |",
        "|---|---|---|---|",
    ]
    for case, of in found.items():
        words = [*(_cell(of, name, ",.0f") for name in QUANTILES), _cell(of, COPIED, ".1f")]
        lines.append(f"| {case} | {' | '.join(words)} |")
    return lines


COPIED = "neighbour copies in each direction"


def _accused(rows: list[Row]) -> list[str]:
    found = [row for row in rows if row["figure"] == "taken for liars"]
    if not found:
        return []
    times = sum(float(row["value"]) for row in found)
    commits = " and ".join(dict.fromkeys(row["commit"] for row in found))
    return [
        f"Taken for liars by NVML's count in the runs of {commits}, of containers that were all honest: {times:.0f}."
    ]


def _limits(rows: list[Row]) -> list[str]:
    found = _figures(rows, "caps")
    if not found:
        return []
    lines = ["| core limit | GPU time % | throughput, % of no limit |", "|---|---|---|"]
    for case, of in found.items():
        if TIME in of:
            lines.append(f"| {case} | {_spread(of, TIME)} | {_spread(of, THROUGHPUT)} |")
    return lines


def _work(rows: list[Row]) -> list[str]:
    found = _figures(rows, "work")
    if not found:
        return []
    lines = [
        "| limits moved by the work done (an experiment) | throughput, % of no limit | GPU time % |",
        "|---|---|---|",
    ]
    for case, of in found.items():
        lines.append(f"| {case} | {_spread(of, THROUGHPUT)} | {_spread(of, BY_THE_WALL)} |")
    return lines


def _wakes(rows: list[Row]) -> list[str]:
    found = _figures(rows, "wakes")
    if not found:
        return []
    lines = ["| how late the arbiter is | p50 us | p99 us | its processor time, % of a core |", "|---|---|---|---|"]
    for case, of in found.items():
        if "p50" in of:
            words = [*(_cell(of, name, ".0f") for name in QUANTILES), _cell(of, "processor", ".1f")]
            lines.append(f"| {case} | {' | '.join(words)} |")
    for case, of in found.items():
        used = ((figure.removeprefix("processor "), _spread(of, figure)) for figure in (IDLE, BUSY) if figure in of)
        lines += [f"| {case}: {when} | | | {spread} |" for when, spread in used]
    return lines


IDLE, BUSY = "processor while nothing happens", "processor beside requests"


def _switches(rows: list[Row]) -> list[str]:
    found = _figures(rows, "switches")
    if not found:
        return []
    names = {"suspend": "suspend", "resume": "resume", "enabled": "enabling channels that are enabled"}
    lines = ["| the driver's call, as the arbiter times it | p50 us | p99 us |", "|---|---|---|"]
    for case, of in found.items():
        if case in names:
            lines.append(f"| {names[case]} | {' | '.join(_cell(of, name, '.0f') for name in QUANTILES)} |")
    return lines


def _sums(rows: list[Row]) -> list[str]:
    found = {row["figure"]: row for row in rows if row["part"] == "sums"}
    checks = (
        ("Kernels that sum, suspended in mid-flight: {} checked, {}, {} wrong.", "kernels checked", "kernels with a wrong sum"),
        (
            "Copies of 64 MiB to the GPU and back while their channels were suspended again and again: {} checked by a word of each page, {}, {} wrong.",
            "rounds checked", "rounds that came back wrong",
        ),
    )  # fmt: skip
    return [
        text.format(
            f"{float(found[checked]['value']):.0f}", found[checked]["note"], f"{float(found[bad]['value']):.0f}"
        )
        for text, checked, bad in checks
        if checked in found
    ]


def _faults(rows: list[Row]) -> list[str]:
    each = [float(row["value"]) for row in rows if row["part"] == "faults" and row["figure"].startswith("seconds")]
    whole = {row["figure"]: float(row["value"]) for row in rows if row["part"] == "faults" and row["case"] == "all"}
    if not whole:
        return []
    return [
        "Arbiter, latency-critical or best-effort process killed, stopped or started anew at every step: "
        f"{whole['rounds']:.0f} rounds, {whole['kernels checked']:.0f} kernels checked, {whole['kernels with a wrong sum']:.0f} wrong; "
        f"once both were there again they had results within {max(each):.2f} s."
    ]


def is_kept(commit: str) -> bool:
    """Does this history have the commit?"""
    requested = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(requested, cwd=Path(__file__).parent, capture_output=True, check=False).returncode == 0


def tables(rows: list[Row]) -> str:
    of_part: dict[str, dict[str, None]] = {}
    for row in rows:
        of_part.setdefault("{commit} of {date}".format(**row), {})[row["part"]] = None
    commits = ", ".join(f"{commit} ({', '.join(parts)})" for commit, parts in of_part.items())
    about = "{gpu}, driver {driver}; commits ".format(**rows[0]) + commits
    head = f"[gpu-time.csv](gpu-time.csv) ([plot](gpu-time.svg)): {about}."
    lost = sorted(commit for commit in {row["commit"] for row in rows} if not is_kept(commit))
    head += f" Not in this history, because their tree was committed anew: {', '.join(lost)}." if lost else ""
    blocks = [
        [head],
        _goals(rows),
        _latency(rows),
        _models(rows),
        _clocks(rows),
        _limits(rows),
        _work(rows),
        _copies(rows),
        _switches(rows),
        _wakes(rows),
        _sums(rows),
        _faults(rows),
        _accused(rows),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def main() -> int:
    """See the module."""
    with Path(sys.argv[1]).open(newline="") as file:
        made = tables(list(csv.DictReader(file)))
    if len(sys.argv) < 3:
        print(made, end="")
        return 0
    page = Path(sys.argv[2])
    text, count = re.subn(
        r"(<!-- figures -->\n).*?(<!-- end -->)",
        lambda at: f"{at[1]}\n{made}\n{at[2]}",
        page.read_text(),
        flags=re.DOTALL,
    )
    if count != 1:
        print(f"{page}: {count} places between <!-- figures --> and <!-- end -->, one is needed", file=sys.stderr)
        return 1
    page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
