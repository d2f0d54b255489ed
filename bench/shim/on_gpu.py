"""What the library costs on a real driver: every figure alternately with and without it, in one run.

    python3 bench/shim/on_gpu.py OUT_FOLDER [--budget 400] [--only start,first,loads,calls,many,training,serving] [--fake]

Calls and starts come from C programs, a training step and serving from PyTorch (a row `not run` where it is absent). One round
is one figure without and one with the library, and the next round reverses their order; the ratio is taken within rounds,
so that a machine that slows down slows both. At least ROUNDS rounds, or the row has their number. `ratio_95` is where the
median of the ratios lies with 95 % certainty. Writes results-gpu.csv and results-gpu.svg. Needs gcc; TANGRAM_LIBRARY names a
libtangram.so built elsewhere.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from math import comb
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.gpu.kit.machine import Lines, Machine, machine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_MIB = 102400
"""Room for 64 contexts."""
ROUNDS, PROCESSES = 5, 64
PAIRS, ROUNDS_OF_A_PAIR = 6, 40
"""Short rounds: a machine that is slow for a second is so for both sides."""
CORE_SETS = 4
HEADER = (
    "figure", "unit", "without_median", "with_median", "added_median", "ratio_median", "ratio_low", "ratio_high",
    "ratio_95_low", "ratio_95_high", "without_low", "without_high", "with_low", "with_high", "rounds", "gpu", "driver", "date", "commit",
)  # fmt: skip
Figures = dict[str, float]


@dataclass
class Table:
    """Figures by name, round by round: (without, with)."""

    seen: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, without: Figures, held: Figures) -> None:
        for name in (name for name in without if name in held):
            self.seen[name].append((without[name], held[name]))

    def rows(self) -> list[list[object]]:
        """As HEADER, without the machine."""
        made: list[list[object]] = []
        for name, rounds in self.seen.items():
            off, on = [one for one, _ in rounds], [one for _, one in rounds]
            ratios = [held / bare for bare, held in rounds]
            numbers = (
                statistics.median(off), statistics.median(on), statistics.median(held - bare for bare, held in rounds),
                statistics.median(ratios), min(ratios), max(ratios), *of_median(ratios),
                min(off), max(off), min(on), max(on),
            )  # fmt: skip
            made.append(
                [name, "ms" if name.endswith("_ms") else "ns", *(float(f"{one:.5g}") for one in numbers), len(rounds)]
            )
        made += [[name, "not run: " + why, *[""] * 12, 0] for name, why in self.absent.items()]
        return made


def of_median(values: list[float]) -> tuple[float, float]:
    """Between which two of the values the median of what they were drawn from lies in 95 of 100 cases, whatever its shape: so few are
    below a rank as a fair coin gives. The whole range where there are too few."""
    ordered, count = sorted(values), len(values)
    below = accumulate(comb(count, rank) / 2**count for rank in range(count // 2))
    at = max(0, sum(part <= 0.025 for part in below) - 1)
    return ordered[at], ordered[count - 1 - at]


def in_turns(table: Table, rounds: int, until: float, one: Callable[[bool], Figures]) -> None:
    """Rounds of `one(with the library?)`, at least two, as many as the time allows."""
    for number in range(rounds):
        if number >= 2 and time.monotonic() > until:
            return
        found = {held: one(held) for held in ((False, True) if number % 2 == 0 else (True, False))}
        table.add(found[False], found[True])


def c_program(here: Machine, name: str) -> Path:
    """A C program of this folder, built the first time."""
    made = here.folder / name
    if not made.exists():
        words = ["gcc", "-std=c11", "-O2", "-D_GNU_SOURCE", "-o", str(made), str(HERE / f"{name}.c"), "-ldl"]
        subprocess.run(words, check=True)
    return made


def figures(words: list[str], env: dict[str, str]) -> Figures:
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{words} ended with {done.returncode}: {done.stderr[-400:]}")
    return {name: float(ns) for name, ns in (line.split(",") for line in done.stdout.splitlines())}


def torch_rounds(here: Machine, table: Table, key: str, name: str, until: float) -> None:
    """PAIRS of processes, one of each kind and both on the same cores, that all start at once; then a pair after the other has its
    rounds, alternately."""
    python = os.environ.get("TANGRAM_TEST_PYTHON", sys.executable)
    device = os.environ.get("TANGRAM_BENCH_DEVICE", "cuda")
    words = [python, str(HERE / f"{name}.py"), device]
    pairs: list[dict[bool, Lines]] = []
    for number in range(PAIRS):
        with on_cores(number):
            pairs.append({held: here.lines(words, key if held else "") for held in (False, True)})
    try:
        for one in [one for pair in pairs for one in pair.values()]:
            one.receive(120)
    except RuntimeError as error:
        table.absent[name] = str(error).splitlines()[-1][-200:]
        pairs = []
    for number, pair in enumerate(pairs):
        if number > 0 and time.monotonic() > until:
            break

        def request(held: bool, pair: dict[bool, Lines] = pair) -> Figures:
            pair[held].send("round")
            return {key: float(value) for key, value in pair[held].receive().items()}

        in_turns(table, ROUNDS_OF_A_PAIR, until, request)
    here.end_containers()


@contextmanager
def on_cores(number: int) -> Iterator[None]:
    """What is started meanwhile has one core in CORE_SETS, far from each other, since neighbours may be threads of one."""
    all_cores = os.sched_getaffinity(0)
    sets = min(CORE_SETS, len(all_cores))
    os.sched_setaffinity(0, set(sorted(all_cores)[number % sets :: sets]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


PARTS = {"start": 0.02, "first": 0.1, "loads": 0.2, "calls": 0.3, "many": 0.35, "training": 0.6, "serving": 1.0}
"""In this order, and the part of the time at which each ends; each has two rounds at least."""


def measure(here: Machine, seconds: float, requested: list[str], done: Callable[[Table], None]) -> Table:
    """The parts that are requested. `done` gets the table after each."""
    table = Table()
    key = here.grant(LIMIT_MIB)
    began = time.monotonic()

    def calls(name: str, rounds: int, *words: str) -> Callable[[float], None]:
        def run(until: float) -> None:
            program = [str(c_program(here, name)), *words]
            in_turns(table, rounds, until, lambda held: figures(program, here.env(key if held else "")))

        return run

    runs: dict[str, Callable[[float], None]] = {
        "start": calls("bench", 2 * ROUNDS, "start", "100"),
        "first": calls("first", 24 * ROUNDS, "one"),
        "loads": calls("loads", 8 * ROUNDS),
        "calls": calls("bench", ROUNDS, "calls"),
        "many": calls("first", ROUNDS, "many", str(PROCESSES)),
        "training": lambda until: torch_rounds(here, table, key, "training", until),
        "serving": lambda until: torch_rounds(here, table, key, "serving", until),
    }
    for part in (part for part in PARTS if part in requested):
        runs[part](began + PARTS[part] * seconds)
        done(table)
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    return table


def write(table: Table, about: dict[str, str], out: Path) -> None:
    with (out / "results-gpu.csv").open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *([*row, *about.values()] for row in table.rows())])


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--budget", type=float, default=400, help="seconds for everything")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma between")
    parser.add_argument("--fake", action="store_true", default=None, help="on the fake driver, though there is a GPU")
    arguments = parser.parse_args()
    requested = arguments.only.split(",")
    if unknown := set(requested) - set(PARTS):
        parser.error(f"--only names {', '.join(sorted(unknown))}: parts are {', '.join(PARTS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with machine(arguments.fake) as here:
        about = here.describe()
        here.start_arbiter()
        table = measure(here, arguments.budget, requested, lambda table: write(table, about, arguments.out))
    for row in table.rows():
        print(*row[:5], row[-1], sep="  ")
    plot = subprocess.run([sys.executable, str(HERE / "plot.py"), str(arguments.out / "results-gpu.csv")], check=False)
    return 1 if table.absent or plot.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
