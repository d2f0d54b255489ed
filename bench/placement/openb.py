"""Replay the openb trace with every policy, and write `openb.csv`: allocation when the arrived pods request 100 % of the capacity.

Run: python -m bench.placement.openb FOLDER [--lists default,...] [--policies binpack,...] [--seeds 10] [--jobs 2]
FOLDER contains the trace's node list, pod lists and published_table.csv. Rows of lists and policies that are not run stay as they are.

Two policies of others are replayed by the same code, to check the protocol against what was published of them. Both are written
from their description (Weng et al., USENIX ATC '23): BestFit takes the node that is left with least, CPU and GPU weighing the same;
FGD follows the gradient of fragmentation, in the paper's steps, and breaks ties by name.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from vgpu.scheduling.arrays import GpuArrays
from vgpu.scheduling.policies import registry as policy
from vgpu.scheduling.policies.outcome import PlacementOutcome, Scores
from vgpu.scheduling.simulate import Host, Job, Numbers, SimulatedCluster, least_gpu, replay
from vgpu.scheduling.workload import read_nodes, read_pods

FIRST_SEED = 42
RESULTS = Path(__file__).with_name("openb.csv")
COLUMNS = ["list", "policy", "allocation_at_100", "sd", "published", "best_published", "seeds", "most_cpu_s"]
MOST_CPU_MILLI, MOST_GPU = 128_000, 8
"""Of a node of the trace: what BestFit weighs by."""


def best_fit(outcome: PlacementOutcome) -> Scores:
    """What is left of the node, CPU and GPU weighing the same."""
    _, after = outcome.gpus
    return (after.cpu_milli / MOST_CPU_MILLI + outcome.node_free_mib / 1000 / MOST_GPU,)


def fgd(outcome: PlacementOutcome) -> Scores:
    """The drop of fragmentation as the paper scores it."""
    before, after = outcome.gpus
    drop = outcome.distribution.unusable(before) - outcome.distribution.unusable(after, outcome.kind)
    return (-(100 / (1 + np.exp(-drop))).astype(int),)


def best_fit_bare(cluster: SimulatedCluster, _: Job, fit: Numbers) -> int:
    """BestFit of a pod without a GPU."""
    left = cluster.cpu_milli[fit] / MOST_CPU_MILLI + cluster.gpu_mib[fit] / 1000 / MOST_GPU
    return int(fit[np.argmin(left)])


def fgd_bare(cluster: SimulatedCluster, job: Job, fit: Numbers) -> int:
    """FGD of a pod without a GPU."""
    fleet, columns = cluster.fleet, np.array([cluster.fleet.column[name] for name in cluster.names[fit]])
    before = GpuArrays(
        fleet.free_mib[:, columns], fleet.free_percent[:, columns], fleet.total_mib[:, columns],
        fleet.model[:, columns], cluster.cpu_milli[fit].astype(np.int32),
    )  # fmt: skip
    after = replace(before, cpu_milli=before.cpu_milli - np.int32(job.cpu_milli))
    drop = fleet.distribution.unusable(before) - fleet.distribution.unusable(after)
    return int(fit[np.argmax((100 / (1 + np.exp(-drop))).astype(int))])


BARE = {"BestFit": best_fit_bare, "FGD": fgd_bare}
THEIRS = {"BestFit": best_fit, "FGD": fgd}
POLICIES = {**policy.POLICIES, **{name: policy.PlacementPolicy(score) for name, score in THEIRS.items()}}


def one(hosts: list[Host], jobs: list[Job], seed: int) -> tuple[float, float]:
    """(allocation at 100 %, CPU seconds) of a seed."""
    policy.POLICIES.update(POLICIES)  # type: ignore[attr-defined]
    start = time.process_time()
    bare = BARE.get(jobs[0].request.policy, least_gpu)
    return replay(hosts, jobs, seed, 1.0, bare=bare).at(100).allocation, time.process_time() - start


def published(folder: Path) -> dict[tuple[str, str], float]:
    """(list, policy) -> allocation at 100 %."""
    with (folder / "published_table.csv").open(newline="") as file:
        return {
            (row["trace"].removeprefix("openb_pod_list_"), row["policy"]): float(row["alloc_mean"])
            for row in csv.DictReader(file)
            if row["arrived_pct"] == "100"
        }


def main() -> None:
    """Replay and write."""
    parser = argparse.ArgumentParser(prog="openb", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lists", default="default,gpushare40,gpuspec10,gpuspec25,multigpu20")
    parser.add_argument("--policies", default=",".join(["BestFit", "FGD", "binpack", "fragmentation", "spread"]))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    theirs, seeds = published(arguments.folder), range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    nodes = (arguments.folder / "openb_node_list_gpu_node.csv").read_text()
    rows = read_rows()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for name in arguments.lists.split(","):
            text = (arguments.folder / f"openb_pod_list_{name}.csv").read_text()
            best = max(mean for (trace, _), mean in theirs.items() if trace == name)
            for chosen in arguments.policies.split(","):
                hosts, jobs = read_nodes(nodes, "nodes"), read_pods(text, name, chosen)
                found = list(pool.map(one, *zip(*((hosts, jobs, seed) for seed in seeds), strict=True)))
                allocated = [part for part, _ in found]
                rows[name, chosen] = [
                    name, chosen, f"{statistics.fmean(allocated):.3f}", f"{statistics.pstdev(allocated):.3f}",
                    str(theirs.get((name, chosen), "")), str(best), str(len(seeds)), f"{max(cpu for _, cpu in found):.1f}",
                ]  # fmt: skip
                print(*rows[name, chosen], flush=True)
                write_rows(rows)


def read_rows() -> dict[tuple[str, str], list[str]]:
    """(list, policy) -> its row."""
    with RESULTS.open(newline="") as file:
        return {(row[0], row[1]): row for row in list(csv.reader(file))[1:]}


def write_rows(rows: dict[tuple[str, str], list[str]]) -> None:
    """After each list and policy: they take minutes each."""
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(row for _, row in sorted(rows.items()))


if __name__ == "__main__":
    main()
