"""MIG: the time of a plan and of a choice against their goals, and the mix of requests on demand against static layouts.

Run: python -m bench.mig [--requests 40000] [--seeds 10]. Writes times.csv and mix.csv beside itself.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from bench.mig.mix import FLEETS, MIX, TABLE, replay
from vgpu.api.mig import Layout, with_slot
from vgpu.mig.plan import GpuInstance, GpuState, plan
from vgpu.scheduling.mig_choice import MigGpu, MixWorth, choose

HERE = Path(__file__).parent
LOADS = (0.95, 1.1, 1.3)
GOALS_MS = {
    "plan of one GPU": 5.0,
    "choice among 1,000 GPUs": 20.0,
    "choice among 1,000 GPUs, no layout seen before": 20.0,
}
"""Specified. The last one holds for the first choice after a start or a new mix."""


def layouts(count: int, seed: int) -> list[Layout]:
    """Random ones, as different as can be."""
    chance, found = random.Random(seed), []
    for _ in range(count):
        layout: Layout = ()
        for _ in range(chance.randrange(8)):
            free = [slot for profile in TABLE.profiles for slot in TABLE.free_slots(layout, profile.name)]
            layout = with_slot(layout, chance.choice(free)) if free else layout
        found.append(layout)
    return found


def took_ms(call: Callable[[], object]) -> float:
    """Processor time of one call: others may use the processor meanwhile."""
    start = time.thread_time()
    call()
    return 1000 * (time.thread_time() - start)


def times() -> dict[str, list[float]]:
    """Milliseconds of each call, by goal."""
    counts = [
        {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
        {"1g.10gb": 7},
        {"2g.20gb": 3, "1g.10gb.me": 1},
        {"7g.80gb": 1},
    ]
    plans = []
    for at, layout in enumerate(layouts(500, 1)):
        instances = tuple(GpuInstance(number, slot) for number, slot in enumerate(layout))
        state = GpuState(0, "GPU", "0x0", True, True, True, TABLE, instances)
        plans.append(took_ms(lambda state=state, at=at: plan(state, True, counts[at % 4])))  # type: ignore[misc]
    warm, cold = [], []
    for seed in range(10):
        worth, some = MixWorth(TABLE, MIX), layouts(1000, seed)
        gpus = [MigGpu(str(at), worth, layout) for at, layout in enumerate(some)]
        for profile in MIX:
            cold.append(took_ms(lambda gpus=gpus, profile=profile: choose(gpus, profile)))  # type: ignore[misc]
            warm.append(took_ms(lambda gpus=gpus, profile=profile: choose(gpus, profile)))  # type: ignore[misc]
    return dict(zip(GOALS_MS, (plans, warm, cold), strict=True))


def main() -> None:
    """Run both and print what was found."""
    parser = argparse.ArgumentParser(
        prog="bench.mig", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--seeds", type=int, default=10)
    chosen = parser.parse_args()
    with (HERE / "times.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["what", "median_ms", "most_ms", "goal_ms"])
        for what, found in times().items():
            row = [what, f"{statistics.median(found):.3f}", f"{max(found):.3f}", GOALS_MS[what]]
            writer.writerow(row)
            print(*row, flush=True)
    with (HERE / "mix.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["load", "fleet", "allocation_percent", "sd", "seeds", *(f"refused_{profile}_percent" for profile in MIX)]
        )
        for load in LOADS:
            for name, make in FLEETS.items():
                runs = [replay(make(), load, seed, chosen.requests) for seed in range(chosen.seeds)]
                refused = [f"{statistics.mean(run.refused[profile] for run in runs):.2f}" for profile in MIX]
                held = [run.allocation for run in runs]
                spread = statistics.stdev(held) if len(held) > 1 else 0.0
                row = [load, name, f"{statistics.mean(held):.2f}", f"{spread:.2f}", len(runs), *refused]
                writer.writerow(row)
                print(*row, flush=True)


if __name__ == "__main__":
    main()
