"""Whether policy `cool` takes the cooler class among equals, and whether it opens more GPUs for it: shares on nodes whose inventories have heat classes.

Run: python -m bench.placement.heat [--pods 1200] [--seeds 5]. Writes heat.csv beside itself. 100 nodes of 8 H100-80; of the GPUs 30 % are cool, 50 % normal and 20 % hot,
at random, and they stay so. Each pod requests 20 GiB, so that four fill a GPU. `hotter than needed`: pods that got a GPU although a GPU as full, in quarters, was of a
cooler class. Both policies have the same pods and GPUs.
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path
from typing import Final

from vgpu.api.inventory import HEAT_CLASSES, Gpu, Inventory
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import Placement, place

NODES, GPUS, GPU_MIB, SHARE_MIB = 100, 8, 80 * 1024, 20 * 1024
WEIGHTS: Final = {"cool": 0.3, "normal": 0.5, "hot": 0.2}
"""Pulled out of the air."""
POLICIES: Final = ("binpack", "cool")


def fleet(seed: int) -> Fleet:
    """Empty nodes."""
    chance, built = random.Random(seed), Fleet()
    for number in range(NODES):
        heat = chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=GPUS)
        gpus = tuple(Gpu(f"GPU-{number}-{row}", row, "h100", GPU_MIB, heat=heat[row]) for row in range(GPUS))
        built.set_node(f"node-{number:03d}", Inventory(gpus))
    return built


def coolest_as_full(built: Fleet, left_mib: int) -> int:
    """Number of the coolest class among GPUs with so much free."""
    return min(
        gpu.heat_number
        for name, at in built.column.items()
        for row, gpu in enumerate(built.inventory[name].gpus)
        if built.free_mib[row, at] == left_mib
    )


def run(policy: str, pods: int, seed: int) -> tuple[dict[str, int], int, int]:
    """Pods by class of their GPU, those that got a hotter one than needed, and GPUs in use at the end."""
    built, classes, hotter = fleet(seed), dict.fromkeys(HEAT_CLASSES, 0), 0
    used: set[str] = set()
    request = PodRequest((GpuRequest("main", "share", 1, SHARE_MIB // 1024, SHARE_MIB, 20),), policy=policy)
    for _ in range(pods):
        found = place(built, request, list(built.column))
        assert isinstance(found, Placement)
        (assigned,) = found.assignment.held()
        at = built.column[found.node]
        gpu = built.inventory[found.node].gpus[assigned.index]
        hotter += gpu.heat_number > coolest_as_full(built, int(built.free_mib[assigned.index, at]))
        built.debit(found.node, assigned)
        classes[gpu.heat] += 1
        used.add(assigned.uuid)
    return classes, hotter, len(used)


def main() -> None:
    """Run both policies, print, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=5)
    chosen = parser.parse_args()
    path = Path(__file__).with_name("heat.csv")
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["policy", "pods", "seeds", "cool_percent", "normal_percent", "hot_percent", "hotter_than_needed_percent", "gpus_in_use"])  # fmt: skip
        for policy in POLICIES:
            runs = [run(policy, chosen.pods, seed) for seed in range(chosen.seeds)]
            whole = chosen.pods * chosen.seeds
            parts = [100 * sum(classes[name] for classes, _, _ in runs) / whole for name in ("cool", "normal", "hot")]
            hotter = 100 * sum(one for _, one, _ in runs) / whole
            gpus = sum(used for _, _, used in runs) / len(runs)
            writer.writerow([policy, chosen.pods, chosen.seeds, *(f"{part:.1f}" for part in (*parts, hotter)), f"{gpus:.0f}"])  # fmt: skip
    print(path.read_text(), end="")


if __name__ == "__main__":
    main()
