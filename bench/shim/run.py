"""What the library costs: the same program alternately with and without it, on the fake driver.

    uv run python bench/shim/run.py [--build DIR] [--rounds 7] [--before LIBRARY]

Writes bench/shim/results.csv: per call the median over the rounds without and with the library, their difference, and the
spread (lowest to highest) of each; with `--before` the same of an earlier build of the library. Turns alternate, so that a machine
that slows down slows all.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.integration.shim.conftest import GPUS, Stage

LIMIT_MIB = 16000


def measure(stage: Stage, library: str, *words: str) -> dict[str, float]:
    """One run of the program: ns by name. No library: an empty path."""
    kernel = str(stage.build / "fake/libfake-kernel.so")  # there are channels, as on a GPU: launches are counted
    env = stage.env(LD_PRELOAD=f"{library}:{kernel}" if library else kernel)
    done = subprocess.run([stage.build / "tests/bench", *words], env=env, capture_output=True, text=True, check=True)
    return {name: float(ns) for name, ns in (line.split(",") for line in done.stdout.splitlines())}


def main() -> None:
    """See the module."""
    import tempfile

    root = Path(__file__).parents[2]
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path, default=root / "shim/build")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--before", type=Path, help="libtangram.so of an earlier commit")
    arguments = parser.parse_args()
    subprocess.run(
        ["make", "-s", "-C", root / "shim", "lib", "fake", "programs", f"BUILD={arguments.build}"], check=True
    )
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        (Path(folder) / "grants").mkdir()
        stage = Stage(arguments.build, Path(folder))
        stage.start_driver()
        stage.grant((GPUS[0], LIMIT_MIB))
        stage.start_arbiter("--grace-ms", "0")
        libraries = {"without": "", "with": stage.library}
        if arguments.before:
            libraries["before"] = str(arguments.before.resolve())
        seen: dict[str, dict[str, list[float]]] = {which: defaultdict(list) for which in libraries}
        for _ in range(arguments.rounds):
            for which, library in libraries.items():
                for words in (("calls",), ("start", "300")):
                    for name, ns in measure(stage, library, *words).items():
                        seen[which][name].append(ns)
        stage.close()
    with (Path(__file__).parent / "results.csv").open("w", newline="") as out:
        table = csv.writer(out)
        spreads = [f"{which}_{end}" for which in libraries for end in ("low", "high")]
        table.writerow(["call", *(f"{which}_ns" for which in libraries), "added_ns", *spreads])
        for name in seen["without"]:
            middle = [statistics.median(seen[which][name]) for which in libraries]
            added = middle[1] - middle[0]
            spread = [end(seen[which][name]) for which in libraries for end in (min, max)]
            table.writerow([name, *(round(value, 1) for value in (*middle, added, *spread))])
            print(f"{name:28}" + "".join(f" {value:12.1f}" for value in middle) + f" {added:+12.1f}")


if __name__ == "__main__":
    main()
