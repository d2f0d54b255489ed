"""Time `place()` on fleets of 8-GPU nodes, and write `place.csv`.

Run: python -m bench.placement.place. Names come as new strings each time, as they do from a decoded request.
"""

from __future__ import annotations

import csv
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory, MigInstance
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import place

GPUS = 8
GPU_MIB = 80 * 1024
ROUNDS = 200

REQUESTS = {
    "one share": PodRequest((GpuRequest("a", "share", 1, 8, 8192, 30),)),
    "share over 4 GPUs": PodRequest((GpuRequest("a", "share", 4, 32, 8192, 30),)),
    "3 shares": PodRequest(tuple(GpuRequest(f"c{i}", "share", 1, 8, 8192 * (i + 1), 10) for i in range(3))),
    "whole GPU": PodRequest((GpuRequest("a", "whole", 1, core_percent=100),)),
    "one share, fits nowhere": PodRequest((GpuRequest("a", "share", 1, 81, GPU_MIB + 1024),)),
    "MIG instance (one node in ten has MIG)": PodRequest((GpuRequest("a", "mig", 1, profile="1g.10gb"),)),
}


def fleet(nodes: int) -> Fleet:
    """Nodes half full at random; each tenth in MIG mode."""
    random = np.random.default_rng(7)
    built = Fleet()
    for number in range(nodes):
        name, mig = f"node-{number:05d}", number % 10 == 0
        gpus = tuple(
            Gpu(
                f"GPU-{number}-{row}", row, "h100", GPU_MIB, mig=mig,
                instances=tuple(MigInstance(f"MIG-{number}-{row}-{i}", "1g.10gb", 9856, i, 0) for i in range(7 * mig)),
            )
            for row in range(GPUS)
        )  # fmt: skip
        used = [
            AssignedGpu(c.uuid, c.index, int(random.integers(0, 70)) * 1024, int(random.integers(0, 80))) for c in gpus
        ]
        built.set_node(name, Inventory(gpus), [assigned for assigned in used if assigned.mib])
    return built


def main() -> None:
    rows = []
    for nodes in (1_000, 10_000):
        built = fleet(nodes)
        for what, request in REQUESTS.items():
            took_ms = []
            for _ in range(ROUNDS if "nowhere" not in what else ROUNDS // 10):
                names = tuple(f"node-{number:05d}" for number in range(nodes))
                start = time.perf_counter()
                place(built, request, names)
                took_ms.append(1000 * (time.perf_counter() - start))
            cuts = statistics.quantiles(took_ms, n=100)
            rows.append([nodes, GPUS, what, f"{cuts[49]:.3f}", f"{cuts[98]:.3f}", os.cpu_count(), platform.machine()])
            sys.stdout.write("  ".join(str(value) for value in rows[-1]) + "\n")
    with Path(__file__).with_name("place.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["nodes", "gpus", "request", "p50_ms", "p99_ms", "cpus", "machine"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
