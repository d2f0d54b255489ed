"""How long `helm template` of the chart takes, beside a chart with nothing in it.

    uv run python -m bench.chart [--repeat 21] [--csv bench/chart/render.csv]

Every run renders the empty chart and then the chart with each values file, so that both see the same load of the machine. Columns: the least and
the median wall-clock time, and the median processor time, milliseconds; and how many times the empty chart's processor time that is, which grows
little with the machine's load. What helm itself needs to start is in both.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Final

from bench.rows import append
from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import HELM, kubernetes_version

HERE: Final = Path(__file__).parent
CHART: Final = HERE.parents[1] / "deploy/helm/tangram"
GOAL_MS: Final = 1000.0
"""Specified: the chart renders in a second."""


def empty_chart(folder: Path) -> Path:
    """A chart with a name and one template, which is empty."""
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text("apiVersion: v2\nname: empty\nversion: 0.1.0\n")
    (folder / "templates/nothing.yaml").write_text("")
    return folder


def run_ms(command: Sequence[str]) -> tuple[float, float]:
    """(wall-clock time, processor time) of a command, milliseconds. Raises CalledProcessError."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - started
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return wall * 1000, (used.ru_utime + used.ru_stime) * 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Status 1 if no run of some values reaches the goal."""
    parser = argparse.ArgumentParser(
        prog="bench.chart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=21)
    parser.add_argument("--csv", type=Path, default=HERE / "render.csv")
    chosen = parser.parse_args(arguments)
    helm = str(build(cache_folder(), [HELM], Steps())[HELM.name])
    template = [helm, "template", "tangram"]
    options = ["-n", "tangram-system", "--kube-version", kubernetes_version()]
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "empty chart": [*template, str(empty_chart(Path(folder)))],
            "defaults": [*template, str(CHART), *options],
        }
        for values in sorted((CHART / "ci").glob("*-values.yaml")):
            commands[values.name.removesuffix("-values.yaml")] = [*template, str(CHART), *options, "-f", str(values)]
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(chosen.repeat):
            for name, command in commands.items():
                times[name].append(run_ms(command))
    base = statistics.median(used for _, used in times["empty chart"])
    slow = False
    for name, measured in times.items():
        least, used = min(wall for wall, _ in measured), statistics.median(used for _, used in measured)
        row = {
            "date": date.today().isoformat(),
            "machine": f"{os.cpu_count()} x {platform.machine()}",
            "values": name,
            "runs": chosen.repeat,
            "least_ms": round(least),
            "median_ms": round(statistics.median(wall for wall, _ in measured)),
            "cpu_ms": round(used),
            "times_empty": round(used / base, 2),
        }
        append(chosen.csv, row)
        print(row)
        slow |= least > GOAL_MS  # what other programs add is not the chart's
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
