"""Draw gpu-time.csv: request latencies by way, and core limits asked and given.

python3 bench/gpu_time/plot.py gpu-time.csv        writes gpu-time.svg beside it
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

Row = dict[str, str]
DARK, LIGHT = "#0b5394", "#9aa5b1"


def latencies(axes: Axes, rows: list[Row]) -> None:
    cases = [row["case"] for row in rows if row["figure"] == "p50"]
    for at, case in enumerate(reversed(cases)):
        found = {row["figure"]: row for row in rows if row["case"] == case}
        middle, high = float(found["p50"]["value"]), float(found["p99"]["value"])
        axes.plot([middle, high], [at, at], color=LIGHT, linewidth=5, solid_capstyle="butt")
        axes.plot([middle], [at], "o", color=DARK, markersize=6)
        rate = found.get("neighbour's kernels")
        text = f" {middle:,.0f} / {high:,.0f} us" + (f", neighbour {float(rate['value']):.1f}/s" if rate else "")
        axes.annotate(text, (high, at), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(cases)), list(reversed(cases)), fontsize=8)
    axes.set_xscale("log")
    axes.margins(x=0.25)
    axes.set_xlim(right=axes.get_xlim()[1] * 2)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("request, us: p50 to p99 of all repeats", fontsize=8)


def limits(axes: Axes, rows: list[Row]) -> None:
    shown = [row for row in rows if row["figure"] in ("GPU time", "throughput of no limit")]
    cases = list(dict.fromkeys(row["case"] for row in shown))
    for at, case in enumerate(reversed(cases)):
        requested = float(re.findall(r"(\d+) %", case)[0])
        axes.plot([requested, requested], [at - 0.35, at + 0.35], color="#444444", linewidth=1)
        for row in (row for row in shown if row["case"] == case):
            given = row["figure"] == "GPU time"
            axes.plot([float(row["low"]), float(row["high"])], [at, at], color=LIGHT, linewidth=3)
            label = row["figure"] if at == 0 else None
            axes.plot([float(row["value"])], [at], "o" if given else "x", color=DARK, markersize=5, label=label)
    axes.set_yticks(range(len(cases)), list(reversed(cases)), fontsize=7)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% (line: asked)", fontsize=8)
    axes.legend(fontsize=7, loc="lower right")


def main() -> int:
    """See the module."""
    source = Path(sys.argv[1])
    with source.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["repeat"] == "all"]
    parts = {
        "lc": [row for row in rows if row["part"] == "lc" and not row["case"].startswith("the last arbiter")],
        "caps": [row for row in rows if row["part"] == "caps" and row["figure"] != "throughput"],
    }
    drawn = [name for name in parts if parts[name]]
    if not drawn:
        print(f"{source}: no latency and no limit was measured, nothing to draw", file=sys.stderr)
        return 0
    mpl.rcParams["svg.hashsalt"], mpl.rcParams["svg.fonttype"] = "tangram", "none"
    heights = [0.25 * len({row["case"] for row in parts[name]}) + 0.8 for name in drawn]
    figure, axes = plt.subplots(
        len(drawn), figsize=(9, sum(heights) + 0.4), layout="constrained", squeeze=False, height_ratios=heights
    )
    for name, at in zip(drawn, axes[:, 0], strict=True):
        {"lc": latencies, "caps": limits}[name](at, parts[name])
        at.grid(axis="x", color="#e4e7eb", linewidth=0.6)
        at.set_axisbelow(True)
    about = rows[0]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    title = f"{about['gpu']}, driver {about['driver']}, {about['date']}, commit {commits}"
    figure.suptitle(title, fontsize=10)
    figure.savefig(source.with_suffix(".svg"), metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
