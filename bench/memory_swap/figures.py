"""Figures of runs that may be cut short and go on: one row a figure in a CSV, and what has its rows already is not measured again."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

COLUMNS: Final = ("part", "case", "repeat", "figure", "value", "unit", "note", "gpu", "driver", "date", "commit")
DONE: Final = "done"
"""The figure of a measurement that is complete."""
NOT_RUN: Final = "not run"


class Figure(NamedTuple):
    """One number."""

    value: float
    unit: str = ""
    note: str = ""


class Figures:
    """The rows of a file, old and new. `about`: gpu, driver, date, commit of the new ones."""

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        self._path, self._about = path, dict(about)
        self.rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="") as file:
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writeheader()

    def done(self, part: str, case: str, repeat: int) -> bool:
        """Is that measurement complete?"""
        key = (part, case, str(repeat), DONE)
        return any((row["part"], row["case"], row["repeat"], row["figure"]) == key for row in self.rows)

    def value(self, part: str, case: str, figure: str, repeat: int) -> float | None:
        """Of a measurement, the last one's; None without it."""
        key = (part, case, figure, str(repeat))
        found = [row for row in self.rows if (row["part"], row["case"], row["figure"], row["repeat"]) == key]
        return float(found[-1]["value"]) if found else None

    def add(self, part: str, case: str, repeat: int, figures: Mapping[str, Figure], *, complete: bool = True) -> None:
        """Append its rows at once."""
        for name, figure in figures.items():
            self._append(part, case, str(repeat), name, f"{figure.value:.6g}", figure.unit, figure.note)
        if complete:
            self._append(part, case, str(repeat), DONE, "1", "", "")

    def not_run(self, part: str, case: str, why: object) -> None:
        """It may run another time."""
        self._append(part, case, "", NOT_RUN, "", "", str(why).replace("\n", " / ")[-400:])

    def _append(self, *words: str) -> None:
        row = dict(zip(COLUMNS, words, strict=False)) | self._about
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)
        self.rows.append(row)
        part, case, repeat, figure, value, unit, note = words
        if figure != DONE:
            print(f"{part:8} {case:44} {repeat:2} {figure:30} {value:>10} {unit} {note}", flush=True)

    def spread(self) -> list[str]:
        """A line for each figure with repeats: median, lowest, highest, how many."""
        seen: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
        for row in self.rows:
            if row["value"] and row["figure"] != DONE:
                seen[row["part"], row["case"], row["figure"], row["unit"]].append(float(row["value"]))
        return [
            f"{part:8} {case:44} {figure:30} {statistics.median(values):10.4g} {unit} [{min(values):.4g} .. {max(values):.4g}] of {len(values)}"
            for (part, case, figure, unit), values in seen.items()
        ]
