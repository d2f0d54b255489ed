"""How long tangramctl takes until it answers: its help, its version, and completion.

    uv run python -m bench.cli [--rounds 30] [--csv bench/cli/help.csv]

The installed console script, as a shell starts it, with its compiled files there. Wall time is what a person waits, and grows with the
machine's load; processor time hardly does. So a row of a loaded machine says how much of the goal is used by its processor time.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

CALLS = {
    "tangramctl --help": ("tangramctl", "--help"),
    "tangramctl run --help": ("tangramctl", "run", "--help"),
    "tangramctl --version": ("tangramctl", "--version"),
    "completion of a command for kubectl": ("kubectl_complete-tangram", "r"),
    "python -c pass": ("python", "-c", "pass"),
}
GOAL_MS = 200
"""For help without a command. Specified: what a person takes for at once."""


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(words: Sequence[str], rounds: int) -> tuple[list[float], list[float]]:
    """Wall and processor time of each call, milliseconds."""
    program, environment = Path(sys.executable).with_name(words[0]), {**os.environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [str(program), *words[1:]]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)  # compiles what is not compiled
    wall, cpu = [], []
    for _ in range(rounds):
        cpu_before, before = _cpu_s(), time.perf_counter()
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        wall.append((time.perf_counter() - before) * 1000)
        cpu.append((_cpu_s() - cpu_before) * 1000)
    return wall, cpu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("help.csv"))
    arguments = parser.parse_args()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} at the start"
    rows = []
    for what, words in CALLS.items():
        wall, cpu = measure(words, arguments.rounds)
        goal = GOAL_MS if words == ("tangramctl", "--help") else ""
        rows.append({
            "what": what, "rounds": arguments.rounds, "wall_p50_ms": round(statistics.median(wall)), "wall_max_ms": round(max(wall)),
            "cpu_p50_ms": round(statistics.median(cpu)), "goal_ms": goal, "machine": machine,
        })  # fmt: skip
        print(rows[-1])
    with arguments.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
