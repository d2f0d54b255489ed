"""All that only a GPU can show, in one command, within a time budget; the CSVs are written even when something fails.

    python3 tests/gpu/run.py --out results [--only paths,charge,guard,view,estate,idle,mps,frameworks,leftovers,answers,peers,bench] [--budget 600] [--fake] [--burst]

With --burst memory is elastic (parts `paths` and `frameworks` unless others are named): rows that may answer otherwise are in
burst_differences.py. Parts beyond the budget are rows `not run`. Exit status 1 when a row is `no`. TANGRAM_LIBRARY names a
libtangram.so built elsewhere, else it is built with gcc; TANGRAM_COMMIT names the commit where there is no git.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.gpu import (
    burst_differences,
    charge,
    driver_answers,
    estate,
    frameworks,
    guard,
    idle,
    leftovers,
    mps,
    paths,
    peers,
    view,
)
from tests.gpu.kit import burst
from tests.gpu.kit.machine import Machine, Watcher, machine, real_driver
from tests.gpu.kit.results import Results

ROOT = Path(__file__).parents[2]
PARTS = ("paths", "charge", "guard", "view", "estate", "idle", "mps", "frameworks", "leftovers", "answers", "peers", "bench")
"""In this order; a part gets what is left of the budget."""
BENCH_S = 400
"""Kept for the benchmark while the parts before it run, when it is requested."""
BURST_PARTS = ("paths", "frameworks")
OWN = ("peers", "bench")
"""Each has a machine of its own."""
POOL_PARTS = ("answers",)
"""They need memory that can be swapped, without --burst too, in containers of their own beside plain ones."""
BURST_POOL_MIB = 512
"""Containers of those parts have a limit 2 MiB above their guarantees, so hardly anything can be away."""


def _run(part: str, here: Machine, watch: Watcher, results: Results, until: Callable[[], bool]) -> None:
    """All cases of a part, while there is time."""
    if part == "frameworks":
        frameworks.run(here, watch, results, until)
        return
    one: dict[str, Callable[[str], None]] = {
        "paths": lambda name: paths.run_case(here, watch, results, name, cases[name]),
        "charge": lambda name: charge.run_case(here, watch, results, name),
        "guard": lambda name: guard.run_case(here, watch, results, name),
        "view": lambda name: view.run_case(here, results, name),
        "estate": lambda name: estate.run_case(here, results, name),
        "idle": lambda name: idle.run_case(here, results, name),
        "mps": lambda name: mps.run_case(here, results, name),
        "leftovers": lambda name: leftovers.run_case(here, watch, results, name),
        "answers": lambda name: driver_answers.run_case(here, results, name),
    }
    cases = dict(paths.cases())
    names: dict[str, list[str]] = {
        "paths": list(cases),
        "charge": list(charge.CASES),
        "guard": list(guard.CASES),
        "view": list(view.CASES),
        "estate": list(estate.CASES),
        "idle": list(idle.CASES),
        "mps": list(mps.CASES),
        "leftovers": list(leftovers.CASES),
        "answers": list(driver_answers.CASES),
    }
    for name in names[part]:
        if until():
            results.part, results.case = part, name
            results.not_run("the case", "no time left in the budget")
        else:
            one[part](name)


def _bench(out: Path, seconds: float, fake: bool) -> int:
    words = [sys.executable, str(ROOT / "bench/shim/on_gpu.py"), str(out), "--budget", str(int(seconds))]
    try:
        return subprocess.run([*words, *(["--fake"] if fake else [])], check=False, timeout=seconds + 45).returncode
    except subprocess.TimeoutExpired:
        print("bench: ended by force; its CSV has what was measured till then", flush=True)
        return 1


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSVs")
    parser.add_argument("--only", default="", help="parts, comma between")
    parser.add_argument("--budget", type=float, default=600, help="seconds for everything")
    parser.add_argument("--fake", action="store_true", default=None, help="on the fake driver, though there is a GPU")
    parser.add_argument("--burst", action="store_true", help="on elastic memory")
    arguments = parser.parse_args()
    requested = arguments.only.split(",") if arguments.only else list(BURST_PARTS if arguments.burst else PARTS)
    if unknown := set(requested) - set(PARTS):
        parser.error(f"--only names {', '.join(sorted(unknown))}: parts are {', '.join(PARTS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    began, failed = time.monotonic(), 0
    end = began + arguments.budget - (min(BENCH_S, arguments.budget / 2) if "bench" in requested else 0)
    for of_pool in (False, True):
        parts = [one for one in PARTS if one in requested and one not in OWN and (one in POOL_PARTS) == of_pool]
        if not parts:
            continue
        pool_mib = BURST_POOL_MIB if arguments.burst or of_pool else 0
        with machine(arguments.fake, pool_mib, arguments.burst) as here:
            for part in parts:
                failed += _one(part, here, arguments.out, lambda: time.monotonic() > end)
                print(f"{part}: done after {time.monotonic() - began:.0f} s", flush=True)
            if (here.folder / "arbiter.log").exists():
                shutil.copy(here.folder / "arbiter.log", arguments.out / f"arbiter{'-pool' * of_pool}.log")
    fake = bool(arguments.fake) or not real_driver()
    if "peers" in requested:
        failed += peers.run(fake, Results.at(arguments.out / "peers.csv"), lambda: time.monotonic() > end)
    if "bench" in requested:
        failed += _bench(arguments.out, began + arguments.budget - time.monotonic(), fake)
    return 1 if failed else 0


def _one(part: str, here: Machine, out: Path, until: Callable[[], bool]) -> int:
    """One part into its own CSV, with an arbiter of its own; how many rows are `no`."""
    name = f"{part}-burst" if here.burst else part
    results = Results.at(out / f"{name}.csv", burst_differences.EXPECTED if here.burst else None)
    with results.one(part, "machine"):
        for what, value in here.describe().items():
            results.fact(what, value)
        if here.burst:
            results.fact("the arbiter serves bursts", burst.served())
    with results.one(part, "the part"):
        here.start_arbiter()
        watch = here.watcher()
        _run(part, here, watch, results, until)
    here.end_containers()
    here.stop_arbiter()
    if here.burst:
        burst_differences.sum_up(results, part)
    counts = {ok: sum(row.ok == ok for row in results.rows) for ok in ("yes", "no", "differs", "not run")}
    print(f"{part}: {counts}, threads {threading.active_count()}", flush=True)
    return counts["no"]


if __name__ == "__main__":
    sys.exit(main())
