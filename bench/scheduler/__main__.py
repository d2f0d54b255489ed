"""kube-scheduler with the extender: pods a second with it and without, a cold start, and a trace. Writes CSV beside this file.

python -m bench.scheduler [--nodes 1000 --pods 2000 --repeats 2] [--cold-nodes 10000 --cold-pods 50000]
    [--openb FOLDER --lists default --policies fragmentation --seed 42] [--only throughput|cold|openb]

The trace is replayed when its folder is named.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

from bench.scheduler import cold, openb, place
from hack.cluster.build import SHARED_FLAGS, build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import ETCD, HELM, KUBERNETES, kubernetes_version
from hack.cluster.toolchain import find_go

HERE = Path(__file__).parent
MODES = ("alone", "extender", "ahead", "floor")


def throughput(programs: dict[str, Path], folder: Path, nodes: Sequence[int], pods: int, repeats: int) -> None:
    """The modes alternate, so that what else the machine does meets all of them."""
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


def trace(programs: dict[str, Path], folder: Path, arguments: argparse.Namespace) -> None:
    """Every list with every policy, one seed: as it is, with pods without a GPU left to kube-scheduler, and without those pods."""
    rows = []
    for name in arguments.lists:
        for policy, (gpu_only, weight) in product(arguments.policies, ((False, None), (False, 0), (True, None))):
            where = folder / f"{name}-{policy}-{gpu_only}-{weight}"
            run = openb.measure(
                programs, where, arguments.openb, name, policy, arguments.seed, gpu_only=gpu_only, spare_weight=weight
            )
            print(
                f"{name}, {policy}, {run.without_gpu} pods without a GPU: {run.allocation} % allocated, simulated {run.simulated} %, {run.took_s} s",
                flush=True,
            )
            rows.append({**asdict(run), "machine": machine()})
            write(HERE / "openb.csv", rows)


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
    parser.add_argument("--openb", type=Path)
    parser.add_argument("--lists", nargs="*", default=["default"])
    parser.add_argument("--policies", nargs="*", default=["fragmentation"])
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--only", choices=["throughput", "cold", "openb"])
    arguments = parser.parse_args()
    programs = build(cache_folder(), [KUBERNETES, ETCD, HELM], Steps())
    programs["floor"] = cache_folder() / "bench" / "floor"
    command = [find_go(cache_folder()), "build", *SHARED_FLAGS, "-o", programs["floor"], "."]
    subprocess.run(command, cwd=HERE / "floor", check=True)
    with tempfile.TemporaryDirectory() as name:
        if arguments.only in (None, "throughput"):
            throughput(programs, Path(name), arguments.nodes, arguments.pods, arguments.repeats)
        if arguments.only in (None, "cold"):
            cold_start(programs, Path(name), arguments.cold_nodes, arguments.cold_pods, arguments.repeats)
        if arguments.openb and arguments.only in (None, "openb"):
            trace(programs, Path(name), arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
