"""GPU time: latency beside a busy neighbour, core limits, right results after suspends, what a switch takes.

    python3 bench/gpu_time/run.py --out FOLDER [--budget 300] [--only lc,floods,caps,gated,work,sums,switches,wakes,models,clocks,copies,faults] [--fake]

    lc        5 launches of 48 us every 10 ms beside kernels of 59.5 ms: alone, under the driver's time slicing, and held by us
    caps      core limits of 10, 30, 50, 70 % and 30 + 60 % together, for own kernels, also cooperative ones and of two processes, and, where PyTorch is there, matrix products, graphs and small operations
    work      an experiment: limits that are moved so that the work done, not the time, is what was asked
    sums      results of kernels that were suspended over and over
    models    a transformer that decodes at batch 1 beside training and beside matrix products: time slicing, MPS, and held by us
    clocks    why announced requests take longer beside large matrix products: the GPU's clock, by its power
    copies    requests that copy in and out, beside a best-effort container that does nothing but copy; with its copy channels stopped too
    faults    arbiter and containers killed, stopped and started anew at every step, 50 times: what lives goes on, with right results
    switches  how long suspends and resumes take, and NVML's figures meanwhile
    wakes     how late a thread of the arbiter is that sleeps, naps or spins; with 50 containers, how late the suspend for a request is

Repeats of all ways alternate in one run; rows of FOLDER/gpu-time.csv are written as they come, and gpu-time.svg at the end. A
part that fails is a row `not run`, and the exit status is 1. Needs gcc; TANGRAM_LIBRARY names a libtangram.so built elsewhere,
TANGRAM_COMMIT the commit where there is no git, TANGRAM_TEST_PYTHON a Python with PyTorch.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.gpu_time import caps, clocks, copies, faults, floods, gated, latency, models, switches, wakes, work
from bench.gpu_time.node import Node, node
from bench.gpu_time.results import Results

HERE = Path(__file__).parent
PARTS: dict[str, tuple[float, Callable[[Node, Results, float], None]]] = {
    "lc": (0.28, latency.run),
    "floods": (0.1, floods.run),
    "sums": (0.04, switches.sums),
    "switches": (0.04, switches.run),
    "wakes": (0.16, wakes.run),
    "caps": (0.32, caps.run),
    "gated": (0.3, gated.run),
    "work": (0.16, work.run),
    "models": (0.4, models.run),
    "clocks": (0.16, clocks.run),
    "copies": (0.12, copies.run),
    "faults": (0.3, faults.run),
}
"""Part of the budget, and what runs. In this order."""


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--budget", type=float, default=300, help="seconds for everything")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma between")
    parser.add_argument("--fake", action="store_true", default=None, help="on the fake driver, though there is a GPU")
    arguments = parser.parse_args()
    requested = arguments.only.split(",")
    if unknown := set(requested) - set(PARTS):
        parser.error(f"--only names {', '.join(sorted(unknown))}: parts are {', '.join(PARTS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    began, failed, spent = time.monotonic(), False, 0.0
    whole = sum(PARTS[name][0] for name in requested)
    with node(arguments.fake) as here:
        results = Results(arguments.out / "gpu-time.csv", here.machine.describe())
        for name in (name for name in PARTS if name in requested):
            share, run = PARTS[name]
            left_s = arguments.budget - (time.monotonic() - began)
            seconds = left_s * share / (whole - spent)
            spent += share
            try:
                run(here, results, seconds)
            except Exception as error:  # noqa: BLE001 a part that breaks off is a row, and the others still run
                failed = True
                results.not_run(name, "the part", f"{type(error).__name__}: {error}")
            here.machine.end_containers()
            here.stop_arbiter()
        log = here.machine.folder / "arbiter.log"
        if log.exists():  # no arbiter was needed for a part that cannot run here
            accused = log.read_text(errors="replace").count("computes while it reports that it is idle")
            results.add(
                "all", "containers, all of them honest", "taken for liars", "times", "all", accused, "0 is right"
            )
            shutil.copy(log, arguments.out / "arbiter.log")
    if not {"lc", "caps"}.intersection(requested):
        return int(failed)
    plot = subprocess.run([sys.executable, str(HERE / "plot.py"), str(arguments.out / "gpu-time.csv")], check=False)
    return 1 if failed or plot.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
