"""What the library costs on a real driver: every figure with and without it, in turns, in one run.

    python3 bench/shim/on_gpu.py OUT_FOLDER [--budget 280] [--fake]

Calls and starts come from C programs, a training step and serving from PyTorch (a row `not run` where it is absent). One round
is one figure without and one with the library, and the next round turns their order about; the ratio is taken within rounds,
so that a machine that slows down slows both. At least ROUNDS rounds, or the row says how many there were. Writes
results-gpu.csv and results-gpu.svg. Needs gcc; TANGRAM_LIBRARY names a libtangram.so built elsewhere.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.gpu.kit.machine import Lines, Machine, machine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_MIB = 102400
"""Room for 64 contexts."""
ROUNDS, PROCESSES = 5, 64
PAIRS, ROUNDS_OF_A_PAIR = 8, 2
HEADER = (
    "figure", "unit", "without_median", "with_median", "added_median", "ratio_median", "ratio_low", "ratio_high",
    "without_low", "without_high", "with_low", "with_high", "rounds", "gpu", "driver", "date", "commit",
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
                statistics.median(ratios), min(ratios), max(ratios),
                min(off), max(off), min(on), max(on),
            )  # fmt: skip
            made.append(
                [name, "ms" if name.endswith("_ms") else "ns", *(float(f"{one:.5g}") for one in numbers), len(rounds)]
            )
        made += [[name, "not run: " + why, *[""] * 10, 0] for name, why in self.absent.items()]
        return made


def in_turns(table: Table, rounds: int, until: float, one: Callable[[bool], Figures]) -> None:
    """Rounds of `one(with the library?)`, at least two, as many as the time allows."""
    for number in range(rounds):
        if number >= 2 and time.monotonic() > until:
            return
        found = {held: one(held) for held in ((False, True) if number % 2 == 0 else (True, False))}
        table.add(found[False], found[True])


def program(here: Machine, name: str) -> Path:
    """A C program of this folder."""
    made = here.folder / name
    words = ["gcc", "-std=c11", "-O2", "-D_GNU_SOURCE", "-o", str(made), str(HERE / f"{name}.c"), "-ldl"]
    subprocess.run(words, check=True)
    return made


def figures(words: list[str], env: dict[str, str]) -> Figures:
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{words} ended with {done.returncode}: {done.stderr[-400:]}")
    return {name: float(ns) for name, ns in (line.split(",") for line in done.stdout.splitlines())}


def torch_rounds(here: Machine, table: Table, key: str, name: str, until: float) -> None:
    """PAIRS of processes, one of each kind, that all start at once; then a pair after the other has its rounds, in turns."""
    python = os.environ.get("TANGRAM_TEST_PYTHON", sys.executable)
    device = os.environ.get("TANGRAM_BENCH_DEVICE", "cuda")
    words = [python, str(HERE / f"{name}.py"), device]
    pairs: list[dict[bool, Lines]] = [
        {held: here.lines(words, key if held else "") for held in (False, True)} for _ in range(PAIRS)
    ]
    try:
        for one in [one for pair in pairs for one in pair.values()]:
            one.receive(120)
    except RuntimeError as error:
        table.absent[name] = str(error).splitlines()[-1][-200:]
        pairs = []
    for number, pair in enumerate(pairs):
        if number > 0 and time.monotonic() > until:
            break

        def ask(held: bool, pair: dict[bool, Lines] = pair) -> Figures:
            pair[held].send("round")
            return {key: float(value) for key, value in pair[held].receive().items()}

        in_turns(table, ROUNDS_OF_A_PAIR, until, ask)
    here.end_tenants()


def measure(here: Machine, budget: float, done: Callable[[Table], None]) -> Table:
    """All figures. Each part has a share of the time; `done` is told the table after each."""
    table = Table()
    key = here.grant(LIMIT_MIB)
    bench, first = str(program(here, "bench")), str(program(here, "first"))
    began = time.monotonic()

    def part(words: list[str], rounds: int, share: float) -> None:
        """`share`: of the budget, until which this may go on."""
        in_turns(table, rounds, began + share * budget, lambda held: figures(words, here.env(key if held else "")))
        done(table)
        print(f"{' '.join(words)}: {time.monotonic() - began:.0f} s", flush=True)

    part([bench, "start", "100"], 2 * ROUNDS, 0.05)
    part([first, "one"], 24 * ROUNDS, 0.3)
    part([bench, "calls"], ROUNDS, 0.45)
    part([first, "many", str(PROCESSES)], ROUNDS, 0.6)
    for name, share in (("training", 0.72), ("serving", 0.97)):
        torch_rounds(here, table, key, name, began + share * budget)
        done(table)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return table


def write(table: Table, about: dict[str, str], out: Path) -> None:
    with (out / "results-gpu.csv").open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *([*row, *about.values()] for row in table.rows())])


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--budget", type=float, default=280, help="seconds")
    parser.add_argument("--fake", action="store_true", default=None, help="on the fake driver, though there is a GPU")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with machine(given.fake) as here:
        about = here.describe()
        here.start_arbiter()
        table = measure(here, given.budget, lambda table: write(table, about, given.out))
    for row in table.rows():
        print(*row[:5], row[-1], sep="  ")
    plot = subprocess.run([sys.executable, str(HERE / "plot.py"), str(given.out / "results-gpu.csv")], check=False)
    return 1 if table.absent or plot.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
