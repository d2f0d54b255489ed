"""Whether pods that can use few nodes still fit there, and write `pools.csv`: policy `fragmentation` with and without what it learns
of labels, taints and MIG profiles.

Run: python -m bench.placement.pools [--seeds 10]. Four fleets of 100 nodes, each with one restriction. Pods arrive in random order until
they request `ARRIVE` of the capacity, and none leaves. A pod goes to the nodes that it can use only, as kube-scheduler sees to in both
cases. `without` lets the policy learn what pods request, but neither their constraints nor their MIG instances.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from vgpu.api.inventory import Gpu, Inventory, MigInstance
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.nodes.constraints import ANYWHERE, LabelRequirement, NodeConstraints, Taint, Term, Toleration
from vgpu.scheduling.placement import Placement, place

FIRST_SEED = 42
NODES, GPU_MIB, INSTANCE_MIB = 100, 80 * 1024, 9_728
ARRIVE: Final = 0.95
RESULTS = Path(__file__).with_name("pools.csv")
COLUMNS = ["fleet", "seeds", "restricted_pods", "restricted_placed_percent", "restricted_placed_percent_without", "all_placed_percent", "all_placed_percent_without"]  # fmt: skip
SIZES: Final = ((8_192, 1), (16_384, 1), (24_576, 1), (40_960, 1), (81_920, 1), (81_920, 2))
"""Shares: MiB on each GPU, GPUs."""


@dataclass(frozen=True, slots=True)
class Node:
    """As the fleet counts it."""

    name: str
    inventory: Inventory
    labels: Mapping[str, str]
    taints: tuple[Taint, ...] = ()


@dataclass(frozen=True, slots=True)
class Pod:
    """`units` of `Scene.units` are what it requests."""

    request: PodRequest
    constraints: NodeConstraints
    units: int
    restricted: bool
    """Can it use a part of the nodes only?"""


@dataclass(frozen=True, slots=True)
class Scene:
    """A fleet, and its pods."""

    nodes: Sequence[Node]
    units: int
    """Its capacity: MiB of shares, or MIG instances."""
    pod: Callable[[np.random.Generator], Pod]


def gpus(name: str, count: int, model: str = "h100", mig: int = 0) -> Inventory:
    """The last `mig` of them are in MIG mode, with seven instances each."""
    return Inventory(tuple(
        Gpu(f"{name}-{row}", row, model, GPU_MIB, mig=row >= count - mig, instances=tuple(
            MigInstance(f"{name}-{row}-{at}", "1g.10gb", INSTANCE_MIB, at, 0) for at in range(7 * (row >= count - mig))
        ))
        for row in range(count)
    ))  # fmt: skip


def share(random: np.random.Generator) -> GpuRequest:
    mib, gpus = SIZES[int(random.integers(len(SIZES)))]
    return GpuRequest("main", "share", gpus, mib=mib)


def labelled() -> Scene:
    """A tenth of the nodes has a label, and a tenth of the pods selects it."""
    selected = NodeConstraints(((Term((LabelRequirement("network", "In", ("infiniband",)),)),),))

    def pod(random: np.random.Generator) -> Pod:
        restricted, request = random.random() < 0.09, share(random)
        return Pod(PodRequest((request,)), selected if restricted else ANYWHERE, request.gpus * request.mib, restricted)

    nodes = [
        Node(f"n{at:03}", gpus(f"n{at}", 4), {"network": "infiniband"} if at % 10 == 0 else {}) for at in range(NODES)
    ]
    return Scene(nodes, NODES * 4 * GPU_MIB, pod)


def tainted() -> Scene:
    """Half of the nodes is tainted, and half of the pods does not tolerate it."""
    tolerating = NodeConstraints(tolerations=(Toleration("dedicated", "Equal", "batch"),))

    def pod(random: np.random.Generator) -> Pod:
        restricted, request = random.random() < 0.5, share(random)
        return Pod(
            PodRequest((request,)),
            NodeConstraints() if restricted else tolerating,
            request.gpus * request.mib,
            restricted,
        )

    batch = (Taint("dedicated", "batch"),)
    nodes = [Node(f"n{at:03}", gpus(f"n{at}", 4), {}, batch if at % 2 else ()) for at in range(NODES)]
    return Scene(nodes, NODES * 4 * GPU_MIB, pod)


def instances() -> Scene:
    """Two models offer MIG instances of one profile; a fifth of the GPUs is of the model that a fifth of the pods names."""

    def pod(random: np.random.Generator) -> Pod:
        restricted, count = random.random() < 0.19, int(random.integers(1, 4))
        models = frozenset({"h200"}) if restricted else frozenset[str]()
        return Pod(
            PodRequest((GpuRequest("main", "mig", count, profile="1g.10gb"),), models=models),
            ANYWHERE,
            count,
            restricted,
        )

    nodes = [Node(f"n{at:03}", gpus(f"n{at}", 2, ("h100", "h200")[at % 5 == 0], mig=2), {}) for at in range(NODES)]
    return Scene(nodes, NODES * 2 * 7, pod)


def beside_instances() -> Scene:
    """A fifth of the nodes has a GPU in MIG mode, and some pods request a share and an instance."""

    def pod(random: np.random.Generator) -> Pod:
        restricted, request = random.random() < 0.15, share(random)
        request = replace(request, gpus=1) if restricted else request
        beside = (GpuRequest("beside", "mig", 1, profile="1g.10gb"),) if restricted else ()
        return Pod(PodRequest((request, *beside)), ANYWHERE, request.gpus * request.mib, restricted)

    nodes = [Node(f"n{at:03}", gpus(f"n{at}", 4 + (at % 5 == 0), mig=int(at % 5 == 0)), {}) for at in range(NODES)]
    return Scene(nodes, NODES * 4 * GPU_MIB, pod)


SCENES: Final[Mapping[str, Callable[[], Scene]]] = {
    "label": labelled, "taint": tainted, "MIG instances": instances, "shares beside MIG instances": beside_instances,
}  # fmt: skip


def arriving(scene: Scene, seed: int) -> Iterator[Pod]:
    random, requested = np.random.default_rng(seed), 0
    while requested < ARRIVE * scene.units:
        pod = scene.pod(random)
        requested += pod.units
        yield pod


def run(scene: Scene, seed: int, *, learns: bool) -> list[tuple[Pod, bool]]:
    """Each pod, and whether it was placed. `learns`: constraints of nodes and MIG instances, too."""
    fleet, placed = Fleet(), list[tuple[Pod, bool]]()
    for node in scene.nodes:
        fleet.set_node(node.name, node.inventory)
        fleet.set_labels(node.name, node.labels, node.taints)
    names, columns = list(fleet.column), np.array(list(fleet.column.values()))
    for pod in arriving(scene, seed):
        if learns:
            fleet.record(pod.request, pod.constraints)
        elif shares := tuple(part for part in pod.request.containers if part.kind != "mig"):
            fleet.record(replace(pod.request, containers=shares))
        met = fleet.pools.meets([pod.constraints], columns)[0]
        found = place(
            fleet,
            replace(pod.request, policy="fragmentation"),
            [name for name, is_met in zip(names, met, strict=True) if is_met],
        )
        if isinstance(found, Placement):
            for assigned in found.assignment.held():
                fleet.debit(found.node, assigned)
        placed.append((pod, isinstance(found, Placement)))
    return placed


def percent(placed: Sequence[tuple[Pod, bool]]) -> float:
    """Of what these pods requested."""
    return 100 * sum(pod.units for pod, is_placed in placed if is_placed) / sum(pod.units for pod, _ in placed)


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(prog="pools", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    seeds = range(FIRST_SEED, FIRST_SEED + parser.parse_args().seeds)
    rows = []
    for name, scene in SCENES.items():
        runs = {learns: [run(scene(), seed, learns=learns) for seed in seeds] for learns in (True, False)}
        some = {learns: [[one for one in each if one[0].restricted] for each in runs[learns]] for learns in runs}
        figures = [statistics.fmean(map(percent, of[learns])) for of in (some, runs) for learns in (True, False)]
        rows.append([name, len(seeds), sum(map(len, some[True])), *(f"{each:.2f}" for each in figures)])
        print(*rows[-1], flush=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)


if __name__ == "__main__":
    main()
