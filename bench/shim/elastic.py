"""What cuMemAlloc and cuMemFree in turns cost on memory that can be swapped, against plain memory: on the fake driver.

    uv run python bench/shim/elastic.py [--build DIR] [--rounds 7]

Writes bench/shim/elastic.csv: per size the medians over the rounds without the library, with it on plain memory and on elastic memory, what
elastic memory adds to plain memory, and the spread of each. Turns alternate, so that a machine that slows down slows all.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.integration.shim.conftest import GPUS, Stage

LIMIT_MIB = 16000
ROOT = Path(__file__).parents[2]
WAYS = {"without": ("", "plain"), "plain": ("library", "plain"), "elastic": ("library", "elastic")}
"""Column: whether the program has the library, and its grant."""


def measure(stage: Stage, way: str) -> dict[str, float]:
    """Nanoseconds by name."""
    library, key = WAYS[way]
    env = stage.env(key=key, LD_PRELOAD=stage.library if library else "", CUDA_VISIBLE_DEVICES="0")
    done = subprocess.run([stage.build / "tests/bench", "pairs"], env=env, capture_output=True, text=True, check=True)
    return {name: float(ns) for name, ns in (line.split(",") for line in done.stdout.splitlines())}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "shim/build")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    seen: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        (Path(folder) / "grants").mkdir()
        stage = Stage(arguments.build.absolute(), Path(folder))
        stage.start_driver()
        for key in ("plain", "elastic"):
            stage.grant((GPUS[0], LIMIT_MIB), key=key)
        burst = f"tangram-burst 1\nwait_s 30\ncard {GPUS[0]} mib={LIMIT_MIB} core_percent=0\nend\n"
        (stage.folder / "grants/elastic/burst").write_text(burst)
        stage.start_arbiter("--grace-ms", "0")
        for _ in range(arguments.rounds):
            for way in WAYS:
                for name, ns in measure(stage, way).items():
                    seen[way][name].append(ns)
        stage.close()
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    with (Path(__file__).parent / "elastic.csv").open("w", newline="") as out:
        table = csv.writer(out)
        spreads = [f"{way}_{end}" for way in WAYS for end in ("low", "high")]
        table.writerow(["call", *(f"{way}_ns" for way in WAYS), "added_ns", *spreads, "date", "commit"])
        for name in seen["without"]:
            middle = [statistics.median(seen[way][name]) for way in WAYS]
            added = middle[2] - middle[1]
            spread = [end(seen[way][name]) for way in WAYS for end in (min, max)]
            values = (round(value, 1) for value in (*middle, added, *spread))
            table.writerow([name, *values, time.strftime("%Y-%m-%d"), commit])
            print(f"{name:32}" + "".join(f" {value:12.1f}" for value in middle) + f" {added:+12.1f}")


if __name__ == "__main__":
    main()
