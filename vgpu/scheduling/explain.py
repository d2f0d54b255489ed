"""Report of each node what its best GPU lacks for a pod, and where only the sum of a node's GPUs is enough.

Pure: a `Snapshot` and a request in, a row per node out. Whether a node takes the pod, and the reason when not, is decided by `placement`;
what is added is the GPU that comes nearest, which a user can act on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vgpu.api.burst import Burst
from vgpu.api.request import FULL_CORE_PERCENT, PodRequest, peak
from vgpu.scheduling.bursts import explain_with_limits
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import TOO_FEW
from vgpu.scheduling.snapshot import Snapshot, fleet_of
from vgpu.scheduling.usable_gpus import UsableGpus


@dataclass(frozen=True, slots=True)
class Nearest:
    """The GPU of a node that comes nearest to what a pod requests of one GPU; of several GPUs, the last that would be taken."""

    uuid: str
    index: int
    model: str
    mib: int
    free_mib: int
    free_percent: int
    lacks_mib: int
    lacks_percent: int


@dataclass(frozen=True, slots=True)
class NodeExplanation:
    """One node."""

    node: str
    reason: str
    """Empty when the pod fits."""
    nearest: Nearest | None
    """None where no GPU may be shared with this pod at all, and for MIG instances."""
    lacks_gpus: int = 0
    """How many more GPUs the node would need, of those that are large enough and allowed. 0 where that is not what it lacks."""
    models: tuple[str, ...] = ()
    """Of the GPUs that the node shares, whether the pod may have them or not."""
    largest_mib: int = 0
    """Of the largest GPU that the pod may have; 0 where it may have none, and for MIG instances."""


def explain_nodes(
    snapshot: Snapshot, request: PodRequest, bursts: Mapping[str, Burst] | None = None
) -> list[NodeExplanation]:
    """Every node: first those that fit, then by how much the best GPU lacks, then by name. `bursts`: container -> its limits."""
    fleet, bursts = fleet_of(snapshot), bursts or {}
    names = tuple(node.name for node in snapshot.nodes)
    excluded = {node.name: node.excluded for node in snapshot.nodes if node.excluded}
    reasons = explain_with_limits(fleet, request, bursts, names) | excluded
    rows = [_row(fleet, name, request, reasons.get(name, "")) for name in names]
    return sorted(rows, key=lambda row: (row.reason != "", row.nearest is None, _distance(row.nearest), row.node))


@dataclass(frozen=True, slots=True)
class Scattered:
    """A node whose GPUs have enough free for a pod together. `free` is their sum, `most` what the GPU has that comes nearest."""

    node: str
    gpus: int
    """With something free, of those that the pod may have."""
    free_mib: int
    free_percent: int
    most_mib: int
    most_percent: int


def scattered(fleet: Fleet, request: PodRequest, names: Sequence[str]) -> Scattered | None:
    """Of nodes that do not fit, one that would if its GPUs were one: that whose best GPU lacks least, then the smallest name.

    None where there is none, and for pods that request whole GPUs or MIG instances: those do not add up.
    """
    need = need_of(request)
    if need is None or any(part.kind != "share" for part in request.containers):
        return None
    view = UsableGpus(fleet, request, fleet.look_up(names), {}, emptied=False)
    free_gpus = view.free_gpus(untouched=False)
    mib = np.where(free_gpus.allowed, np.maximum(free_gpus.free_mib, 0), 0)
    percent = np.where(free_gpus.allowed, np.maximum(free_gpus.free_percent, 0), 0)
    wanted = [peak(request.containers, lambda part: part.mib * part.gpus)]
    wanted += [peak(request.containers, lambda part: part.core_percent * part.gpus)]
    enough = view.is_candidate & (mib.sum(axis=0) >= wanted[0]) & (percent.sum(axis=0) >= wanted[1])
    if not enough.any():
        return None
    lacks = np.maximum(need[0] - mib, 0) / max(need[0], 1) + np.maximum(need[1] - percent, 0) / FULL_CORE_PERCENT
    lacks[~free_gpus.allowed] = np.inf
    least = np.where(enough, lacks.min(axis=0), np.inf)
    at = min(np.flatnonzero(least == least.min()).tolist(), key=view.names.__getitem__)
    row = int(lacks[:, at].argmin())
    sums = int(np.count_nonzero(mib[:, at])), int(mib[:, at].sum()), int(percent[:, at].sum())
    return Scattered(view.names[at], *sums, int(mib[row, at]), int(percent[row, at]))


def need_of(request: PodRequest) -> tuple[int, int] | None:
    """(MiB, percent) that a pod requests of one GPU: of the container that requests most. None when that is not in these terms."""
    shares = [part for part in request.containers if part.kind == "share"]
    if any(part.init for part in shares):  # they all lie on the same GPUs
        return peak(shares, lambda part: part.mib), peak(shares, lambda part: part.core_percent)
    return max(((part.mib, part.core_percent) for part in shares), default=None)


def gpus_of(request: PodRequest) -> int:
    """GPUs that a pod needs side by side for the container that requests most of them, or for all its whole ones."""
    wholes = peak([part for part in request.containers if part.kind == "whole"], lambda part: part.gpus)
    return max([wholes, *(part.gpus for part in request.containers if part.kind == "share")])


def _row(fleet: Fleet, node: str, request: PodRequest, reason: str) -> NodeExplanation:
    gpus = fleet.inventory[node].gpus if node in fleet else ()
    models = tuple(sorted({gpu.model for gpu in gpus if gpu.shareable}))
    found, wanted = _usable(fleet, node, request), gpus_of(request)
    if not found:
        return NodeExplanation(node, reason, None, models=models)
    lacks_gpus = max(0, wanted - sum(large for _, large in found)) if reason == TOO_FEW else 0
    largest_mib = max(one.mib for one, _ in found)
    return NodeExplanation(node, reason, found[min(wanted, len(found)) - 1][0], lacks_gpus, models, largest_mib)


def _usable(fleet: Fleet, node: str, request: PodRequest) -> list[tuple[Nearest, bool]]:
    """The GPUs that the pod may have, nearest first, each with whether it would be large enough were it empty."""
    whole = any(part.kind == "whole" for part in request.containers)
    need = need_of(request)
    if node not in fleet or (need is None and not whole):
        return []
    at, found = fleet.column[node], []
    for row, gpu in enumerate(fleet.inventory[node].gpus):
        if (gpu.shareable if whole else gpu.offers_shares) and request.allows(gpu.model, {gpu.uuid}):
            mib, percent = (gpu.mib, FULL_CORE_PERCENT) if whole else need or (0, 0)
            free_mib, free_percent = int(fleet.free_mib[row, at]), int(fleet.free_percent[row, at])
            lacks = max(0, mib - free_mib), max(0, percent - free_percent)
            one = Nearest(gpu.uuid, gpu.index, gpu.model, gpu.mib, free_mib, free_percent, *lacks)
            found.append((one, mib <= gpu.mib))
    return sorted(found, key=lambda item: (_distance(item[0]), item[0].index))


def _distance(one: Nearest | None) -> float:
    return one.lacks_mib / one.mib + one.lacks_percent / FULL_CORE_PERCENT if one is not None else 0.0


def summary(rows: Sequence[NodeExplanation]) -> dict[str, int]:
    """Reason -> nodes, most frequent first; those that fit are left out."""
    counts: dict[str, int] = {}
    for row in rows:
        if row.reason:
            counts[row.reason] = counts.get(row.reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
