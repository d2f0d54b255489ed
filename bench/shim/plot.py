"""Draw results-gpu.csv: for each figure the ratio with / without the library, every round's spread and the median.

python3 bench/shim/plot.py results-gpu.csv        writes results-gpu.svg beside it
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt


def label(row: dict[str, str]) -> str:
    name = row["figure"].removesuffix("_ms").replace("_", " ")
    return f"{name}  ({float(row['without_median']):,.4g} {row['unit']} without)"


def main() -> int:
    """See the module."""
    source = Path(sys.argv[1])
    with source.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["ratio_median"]]
    if not rows:
        print(f"{source}: no figure was measured", file=sys.stderr)
        return 1
    mpl.rcParams["svg.hashsalt"] = "tangram"
    figure, axes = plt.subplots(figsize=(9, 0.34 * len(rows) + 1.4), layout="constrained")
    for at, row in enumerate(reversed(rows)):
        low, middle, high = (float(row[f"ratio_{name}"]) for name in ("low", "median", "high"))
        axes.plot([low, high], [at, at], color="#9aa5b1", linewidth=5, solid_capstyle="butt")
        axes.plot([middle], [at], "o", color="#0b5394", markersize=6)
    axes.axvline(1, color="#444444", linewidth=1)
    axes.set_yticks(range(len(rows)), [label(row) for row in reversed(rows)])
    axes.set_xlabel("time with the library / without: median and range of the rounds")
    axes.set_xscale("log")
    axes.grid(axis="x", which="both", color="#e4e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    about = rows[0]
    axes.set_title(f"{about['gpu']}, driver {about['driver']}, {about['date']}, commit {about['commit']}", fontsize=10)
    figure.savefig(source.with_suffix(".svg"), metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
