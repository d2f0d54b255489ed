"""Figures as they come: one row a figure of one repeat, in gpu-time.csv; repeat `all` is over all repeats of the run."""

from __future__ import annotations

import csv
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from bench.gpu_time.node import median, quantile

QUANTILES = (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))
HEADER = ("part", "case", "figure", "unit", "repeat", "value", "low", "high", "note", "gpu", "driver", "date", "commit")


class Results:
    def __init__(self, path: Path, about: dict[str, str]) -> None:
        self._file = path.open("w", newline="", buffering=1)
        self._about = list(about.values())
        self._began = time.monotonic()
        self._seen: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
        csv.writer(self._file).writerow(HEADER)

    def add(
        self, part: str, case: str, figure: str, unit: str, repeat: int | str, value: float, note: str = ""
    ) -> None:
        self._row(part, case, figure, unit, repeat, _short(value), "", "", note)
        if isinstance(repeat, int):
            self._seen[part, case, figure, unit].append(value)

    def over_all(self, part: str, case: str, figure: str, unit: str, value: float, note: str = "") -> None:
        """A figure of all repeats together; the range is that of the repeats, where there were several."""
        each = self._seen.get((part, case, figure, unit), [])
        low, high = (_short(min(each)), _short(max(each))) if each else ("", "")
        self._row(part, case, figure, unit, "all", _short(value), low, high, note)

    def sum_up(self, part: str) -> None:
        """The median over the repeats of each figure of a part."""
        for (at, case, figure, unit), values in list(self._seen.items()):
            if at == part and figure not in ("p50", "p99", "p99.9"):
                self.over_all(at, case, figure, unit, median(values))

    def not_run(self, part: str, case: str, why: object) -> None:
        self._row(part, case, "not run", "", "", "", "", "", str(why).replace("\n", " / ")[-400:])

    def _row(self, *words: object) -> None:
        csv.writer(self._file).writerow([*words, *self._about])
        part, case, figure, unit, repeat, value, low, high, note = words
        spread = f" [{low} .. {high}]" if low != "" else ""
        at = time.monotonic() - self._began
        print(f"{at:6.1f} s  {part}  {case}  {figure} = {value} {unit}{spread}  ({repeat})  {note}", flush=True)


class Requests:
    """How long requests took, by case: the quantiles of each repeat as they come, and in the end of all repeats together, beside those of the
    case that is alone."""

    def __init__(self, results: Results, part: str, unit: str) -> None:
        self._results, self._part, self._unit = results, part, unit
        self._took: dict[str, list[float]] = {}
        self._alone: dict[str, str] = {}

    def add(self, case: str, repeat: int, took: list[float], *, alone: str) -> None:
        """Of one repeat."""
        self._took.setdefault(case, []).extend(took)
        self._alone[case] = alone
        for name, part in QUANTILES:
            self._results.add(self._part, case, name, self._unit, repeat, quantile(took, part))

    def over_all(self, cases: Iterable[str] | None = None) -> None:
        """Those of `cases` that there are, in this order; all, in the order in which they came."""
        for case in self._took if cases is None else cases:
            if case not in self._took:
                continue
            took, alone = self._took[case], self._took[self._alone[case]]
            for name, part in QUANTILES:
                value = quantile(took, part)
                note = f"{len(took)} requests, {value / quantile(alone, part):.3f} x alone"
                self._results.over_all(self._part, case, name, self._unit, value, note)


def _short(number: float) -> float:
    return float(f"{number:.5g}")
