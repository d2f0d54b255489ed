"""Throughput of kube-scheduler with the extender and without, and a cold start: writes throughput.csv and cold.csv beside this file.

python -m bench.scheduler [--nodes 1000 --pods 2000 --repeats 2] [--cold-nodes 10000 --cold-pods 50000] [--only throughput|cold]
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.scheduler import cold, place
from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import ETCD, HELM, KUBERNETES, kubernetes_version

HERE = Path(__file__).parent
MODES = ("alone", "extender")


def throughput(programs: dict[str, Path], folder: Path, nodes: Sequence[int], pods: int, repeats: int) -> None:
    """Each mode by turns, so that what else the machine does meets all of them."""
    rows = []
    for count in nodes:
        for repeat in range(repeats):
            for mode in MODES:
                run = place.measure(programs, folder / f"{count}-{mode}-{repeat}", mode, count, min(pods, count * 2))
                print(f"{count} nodes, {mode}: {run.pods_a_second} pods/s, {run.writes}", flush=True)
                rows.append({**asdict(run), "machine": machine()})
                write(HERE / "throughput.csv", rows)


def cold_start(programs: dict[str, Path], folder: Path, nodes: int, pods: int, repeats: int) -> None:
    """Every start against a cluster of its own."""
    rows = []
    for repeat in range(repeats):
        found = cold.measure(programs, folder / f"cold-{repeat}", nodes, pods)
        print(f"cold start, {nodes} nodes, {pods} pods: {found.ready_s} s, {found.highest_rss_mib} MiB", flush=True)
        rows.append({**asdict(found), "machine": machine()})
        write(HERE / "cold.csv", rows)


def machine() -> str:
    """What it ran on."""
    python = platform.python_version()
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {python}, Kubernetes {kubernetes_version()}"


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """All rows so far."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="bench.scheduler", description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="*", default=[1_000, 5_000])
    parser.add_argument("--pods", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cold-nodes", type=int, default=10_000)
    parser.add_argument("--cold-pods", type=int, default=50_000)
    parser.add_argument("--only", choices=["throughput", "cold"])
    asked = parser.parse_args()
    programs = build(cache_folder(), [KUBERNETES, ETCD, HELM], Steps())
    with tempfile.TemporaryDirectory() as name:
        if asked.only != "cold":
            throughput(programs, Path(name), asked.nodes, asked.pods, asked.repeats)
        if asked.only != "throughput":
            cold_start(programs, Path(name), asked.cold_nodes, asked.cold_pods, asked.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
