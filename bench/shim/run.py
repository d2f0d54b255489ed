"""What the library costs: the same program with and without it, in turns, on the fake driver.

    uv run python bench/shim/run.py [--build DIR] [--rounds 7]

Writes bench/shim/results.csv: per call the median over the rounds without and with the library, their difference, and the
spread (lowest to highest) of each. Turns alternate, so that a machine that slows down slows both.
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
from tests.integration.shim.conftest import CARDS, Stage

LIMIT_MIB = 16000


def measure(stage: Stage, with_library: bool, *words: str) -> dict[str, float]:
    """One run of the program: ns by name."""
    kernel = str(stage.build / "fake/libfake-kernel.so")  # there are channels, as on a GPU: launches are counted
    env = stage.env(LD_PRELOAD=f"{stage.library}:{kernel}" if with_library else kernel)
    done = subprocess.run([stage.build / "tests/bench", *words], env=env, capture_output=True, text=True, check=True)
    return {name: float(ns) for name, ns in (line.split(",") for line in done.stdout.splitlines())}


def main() -> None:
    """See the module."""
    import tempfile

    root = Path(__file__).parents[2]
    options = argparse.ArgumentParser()
    options.add_argument("--build", type=Path, default=root / "shim/build")
    options.add_argument("--rounds", type=int, default=7)
    given = options.parse_args()
    subprocess.run(["make", "-s", "-C", root / "shim", "lib", "fake", "programs", f"BUILD={given.build}"], check=True)
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        (Path(folder) / "grants").mkdir()
        stage = Stage(given.build, Path(folder))
        stage.start_driver()
        stage.grant((CARDS[0], LIMIT_MIB))
        stage.start_arbiter("--grace-ms", "0")
        seen: dict[bool, dict[str, list[float]]] = {False: defaultdict(list), True: defaultdict(list)}
        for _ in range(given.rounds):
            for with_library in (False, True):
                for words in (("calls",), ("start", "300")):
                    for name, ns in measure(stage, with_library, *words).items():
                        seen[with_library][name].append(ns)
        stage.close()
    with (Path(__file__).parent / "results.csv").open("w", newline="") as out:
        table = csv.writer(out)
        table.writerow(
            ["call", "without_ns", "with_ns", "added_ns", "without_low", "without_high", "with_low", "with_high"]
        )
        for name, without in seen[False].items():
            low, high = statistics.median(without), statistics.median(seen[True][name])
            spread = [min(without), max(without), min(seen[True][name]), max(seen[True][name])]
            row = [name, *(round(value, 1) for value in (low, high, high - low, *spread))]
            table.writerow(row)
            print(f"{name:28} {low:12.1f} {high:12.1f} {high - low:+12.1f}")


if __name__ == "__main__":
    main()
