"""How long a decision of the swap policy takes with 50 containers, and write `decide.csv`.

Run: python -m bench.memory_swap.decide. Each round, one container becomes busy or idle a while after the one before, and the policy decides. Its orders are
carried out between two decisions, which is not counted. The baseline is the same list of events where all containers stay within their
guarantees. Goal of the design: at most 1 ms. Processor time does not grow with the load of the machine.
"""

from __future__ import annotations

import csv
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from vgpu.api.names import CLASSES
from vgpu.memory.swap.actions import Action, Grant, SwapIn, SwapOut
from vgpu.memory.swap.events import (
    Able,
    GpuSeen,
    Idle,
    Joined,
    MemoryContract,
    PoolSeen,
    Progress,
    Requested,
    Suspended,
    SwappedIn,
    SwappedOut,
    Used,
    Working,
)
from vgpu.memory.swap.policy import SwapPolicy

GIB = 2**30
CONTAINERS = 50
ROUNDS = 3000
STEP_S = 0.7
SCENARIOS: dict[str, tuple[int, float, bool]] = {
    "all within guarantees": (1, 1.0, False),
    "turns on one GPU": (1, 8.0, False),
    "turns on 8 GPUs, each container on two": (8, 12.0, False),
    "turns on one GPU, requests within guarantees": (1, 8.0, True),
}
"""What -> (GPUs, GiB that each container uses of each of its GPUs, whether requests within guarantees come)."""


class Node:
    """A policy whose orders are carried out at once."""

    def __init__(self, gpus: int, used_gib: float) -> None:
        self.policy, self.now_s, self.random = SwapPolicy(), 0.0, random.Random(7)
        self.away: dict[tuple[str, str], int] = {}
        self.coming: list[str] = []
        self.took_ms: list[float] = []
        self.cpu_ms: list[float] = []
        self.most_paused = 0
        self.gpus_of: dict[str, list[str]] = {}
        for gpu in map(str, range(gpus)):
            self.policy.apply(GpuSeen(0.0, gpu, 140 * GIB))
            self.policy.apply(PoolSeen(0.0, gpu, 1000 * GIB, True))
        for number in range(CONTAINERS):
            name, here = f"c{number}", sorted({str(number % gpus), str((number + 3) % gpus)})
            self.gpus_of[name] = here
            contract = MemoryContract(dict.fromkeys(here, (2 * GIB, 24 * GIB)), CLASSES[number % 3], number % 5)
            self.policy.apply(Joined(0.0, name, contract))
            self.policy.apply(Able(0.0, name))
            for gpu in here:
                used = int(used_gib * GIB)
                away = max(0, used - 2 * GIB)  # those with work bring theirs back
                self.away[name, gpu] = away
                self.policy.apply(Used(0.0, name, gpu, 0, used, away))

    def decide(self) -> None:
        """One timed decision, and what follows from it."""
        start, cpu = time.perf_counter(), time.process_time()
        actions = self.policy.decide(self.now_s)
        self.took_ms.append(1000 * (time.perf_counter() - start))
        self.cpu_ms.append(1000 * (time.process_time() - cpu))
        self.most_paused = max(self.most_paused, len(self.policy.paused()))
        for action in actions:
            self._obey(action)

    def bring_back(self) -> None:
        """As far as there is room."""
        for name in list(self.coming):
            for gpu in self.gpus_of[name]:
                moves = min(self.away[name, gpu], self.policy.room_bytes(name, gpu))
                self.away[name, gpu] -= moves
                self.policy.apply(Progress(self.now_s, name, gpu, "in", moves))
                if not self.away[name, gpu]:
                    self.policy.apply(SwappedIn(self.now_s, name, gpu))
            if not any(self.away[name, gpu] for gpu in self.gpus_of[name]):
                self.coming.remove(name)
            break  # what is left for the others is known after the next decision

    def _obey(self, action: Action) -> None:
        match action:
            case SwapOut(name=name, gpus=gpus):
                self.coming = [one for one in self.coming if one != name]
                self.policy.apply(Suspended(self.now_s, name))
                for gpu, moves in gpus.items():
                    self.away[name, gpu] += moves
                    self.policy.apply(Progress(self.now_s, name, gpu, "out", moves))
                    self.policy.apply(SwappedOut(self.now_s, name, gpu))
            case SwapIn(name=name):
                self.coming.append(name)
            case Grant():
                pass


def measure(gpus: int, used_gib: float, within_guarantee: bool) -> Node:
    """All rounds of one scenario."""
    node = Node(gpus, used_gib)
    if within_guarantee:
        for number in range(25):
            name = f"new{number}"
            node.policy.apply(Joined(0.0, name, MemoryContract({"0": (GIB, GIB)})))
    for round_ in range(ROUNDS):
        node.now_s += STEP_S * node.random.random()
        name = f"c{node.random.randrange(CONTAINERS)}"
        node.policy.apply((Working if node.random.random() < 0.7 else Idle)(node.now_s, name))
        if within_guarantee:
            name = f"new{round_ % 25}"
            node.policy.apply(Used(node.now_s, name, "0", 0, 0, 0))
            node.policy.apply(Requested(node.now_s, name, f"r{round_}", "0", GIB, False, 0.0))
        node.decide()
        node.bring_back()
    return node


def main() -> None:
    """Measure, print, write the CSV."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    rows: list[list[object]] = []
    baseline_ms = 0.0
    for what, scenario in SCENARIOS.items():
        node = measure(*scenario)
        cuts = statistics.quantiles(node.took_ms, n=100)
        baseline_ms = baseline_ms or cuts[49]
        rows.append(
            [
                what, CONTAINERS, scenario[0], ROUNDS, node.most_paused, f"{cuts[49]:.3f}", f"{cuts[98]:.3f}",
                f"{statistics.mean(node.cpu_ms):.3f}", f"{statistics.quantiles(node.cpu_ms, n=100)[98]:.3f}", f"{cuts[49] / baseline_ms:.2f}", commit, date.today().isoformat(),
                f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.machine()}",
            ]
        )  # fmt: skip
        sys.stdout.write("  ".join(map(str, rows[-1])) + "\n")
    with Path(__file__).with_name("decide.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            [
                "what", "containers", "gpus", "rounds", "most_paused", "p50_ms", "p99_ms", "mean_cpu_ms", "p99_cpu_ms", "p50_to_baseline", "commit", "date",
                "machine",
            ]
        )  # fmt: skip
        writer.writerows(rows)


if __name__ == "__main__":
    main()
