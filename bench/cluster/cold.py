"""How long `make demo` takes on a machine that has nothing of ours yet, and again: `python -m bench.cluster.cold FOLDER [--test]`.

FOLDER gets a clean clone and an empty home folder, so every cache of compilers and installers is cold; Debian's packages stay installed,
since a machine cannot forget them. `--test` runs `make test` after the two. Writes cold.csv beside itself: run, step, wall seconds, and
processor seconds of the programs that the step ran. Programs and images are built at the same time, so their steps overlap. The first
row of a run is the whole of it, with the load that the machine had from others when it began.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from hack.cluster.layout import STATE
from hack.kubectl import ROOT

OUT: Final = Path(__file__).with_name("cold.csv")
COLUMNS: Final = ("run", "step", "wall_s", "processor_s", "load_before")
CACHES: Final = (
    "TANGRAM_CACHE",
    "XDG_CACHE_HOME",
    "GOCACHE",
    "GOMODCACHE",
    "GOPATH",
    "GOFLAGS",
    "UV_CACHE_DIR",
    "PIP_CACHE_DIR",
)
"""Variables that would lead to another user's warm cache."""

Row = tuple[str, str, float, float, float | str]


def processor_s() -> float:
    """Of all programs that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(run: str, target: str, folder: Path) -> list[Row]:
    """`make TARGET` in the clone. Raises CalledProcessError when it fails."""
    steps = folder / f"{run}.csv"
    environment = {
        name: value for name, value in os.environ.items() if name not in {*CACHES, "VIRTUAL_ENV", "KUBECONFIG"}
    }
    environment |= {"HOME": str(folder / "home"), "TANGRAM_STEPS_CSV": str(steps)}
    load, began, worked = os.getloadavg()[0], time.monotonic(), processor_s()
    with (folder / f"{run}.log").open("w") as log:
        subprocess.run(
            ["make", target], cwd=folder / "tree", env=environment, check=True, stdout=log, stderr=subprocess.STDOUT
        )
    whole: Row = (run, f"make {target}", round(time.monotonic() - began, 1), round(processor_s() - worked, 1), load)
    with steps.open(newline="") as rows:
        return [whole, *((run, what, float(wall), float(work), "") for what, wall, work in csv.reader(rows))]


def main() -> int:
    """Clone, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="must not exist")
    parser.add_argument("--test", action="store_true", help="`make test` too")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    if STATE.exists():
        print(f"{STATE}: a cluster is up; `make cluster-down` first", file=sys.stderr)
        return 1
    (folder / "home").mkdir(parents=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "tree")], check=True)
    runs = [("cold", "demo"), ("again", "demo"), *([("test", "test")] if arguments.test else [])]
    rows: list[Row] = []
    for run, target in runs:
        rows += measure(run, target, folder)
        with OUT.open("w", newline="") as out:
            csv.writer(out).writerows([COLUMNS, *rows])
        print(*next(row for row in rows if row[0] == run))
    subprocess.run(["make", "cluster-down"], cwd=folder / "tree", check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
