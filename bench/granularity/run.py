"""What the GPU loses to each call of the driver, measured: the rules by which the library charges.

    python3 bench/granularity/run.py OUT [--only sizes,traces,...] [--seconds 100]

Needs one GPU that no other program uses, and libcuda.so.1; parts that compile need nvcc. It uses neither the library nor the arbiter: what
is measured is the driver alone. Loss is the difference of cuMemGetInfo's free figure; where `nvml_lost` is given, of NVML's figure of
this process. OUT/granularity.csv has a row a measurement, OUT/traces.csv every step of random sequences with the addresses that the
driver gave out, from which its packing can be read. Each part runs in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.granularity import arrays, code, errors, limits, linear, managed, modules, others
from bench.granularity.driver import HEADER, Rows

PARTS = {
    "sizes": linear.sizes,
    "addresses": linear.addresses,
    "traces": linear.traces,
    "pitch": linear.pitch,
    "arrays": arrays.arrays,
    "arrays_per_block": arrays.arrays_per_block,
    "limits": limits.limits,
    "limits_used": limits.limits_used,
    "stacks": limits.stacks,
    "local": limits.local,
    "modules": modules.modules,
    "many_kernels": modules.many_kernels,
    "code": code.code,
    "code_of_many": code.code_of_many,
    "contexts": code.contexts,
    "others": others.others,
    "streams": others.streams,
    "sharing": others.sharing,
    "managed": managed.managed,
    "errors": errors.errors,
    "green": errors.green,
}
"""In this order."""
BY_LOADING = ("modules", "many_kernels", "code", "code_of_many")
"""These run once lazily and once eagerly."""


def machine(rows: Rows) -> None:
    """Where and when: the GPU, its driver, the date, the commit (TANGRAM_COMMIT where there is no git)."""
    output = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        check=False,
        capture_output=True,
        text=True,
    )
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True)
    commit = os.environ.get("TANGRAM_COMMIT") or git.stdout.strip() or "unknown"
    rows.add("machine", output.stdout.strip(), "", "", "", "", "", f"{time.strftime('%Y-%m-%d')} at {commit}")


def main() -> int:
    """Run the parts; exit status 1 when one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma between")
    parser.add_argument("--seconds", type=float, default=120, help="a part is ended after so long")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(arguments.out / "granularity.csv", HEADER)
    if arguments.part:
        PARTS[arguments.part](rows)
        return 0
    machine(rows)
    failed = 0
    runs = [
        (name, mode)
        for name in arguments.only.split(",")
        for mode in (("LAZY", "EAGER") if name in BY_LOADING else ("",))
    ]
    for name, mode in runs:
        env = {**os.environ, **({"CUDA_MODULE_LOADING": mode} if mode else {})}
        began = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, __file__, str(arguments.out), "--part", name],
                env=env,
                check=False,
                timeout=arguments.seconds,
                capture_output=True,
                text=True,
            )
            error = "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1:]
        except subprocess.TimeoutExpired:
            error = "ended by force"
        if error:
            failed += 1
            rows.add(name, "the part", "", "", "", "", "", error)
        print(f"{name} {mode}: {time.monotonic() - began:.1f} s {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
