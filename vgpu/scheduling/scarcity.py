"""How scarce each pool of the fleet is now: what a GPU or MIG instance of it displaces of the requests to come (`displacement`).

It brings the pools of the fleet up to date first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vgpu.scheduling.demand.pool_capacity import PoolCapacity
from vgpu.scheduling.demand.request_distribution import Weights
from vgpu.scheduling.nodes.selectors import Bools, Columns

if TYPE_CHECKING:
    from vgpu.scheduling.fleet import Fleet

Tenths = npt.NDArray[np.int64]


def of_gpus(fleet: Fleet) -> tuple[Weights, Tenths | None]:
    """(pools + 1,) twice: GPUs displaced by each MiB of a GPU, by its pool; and the same in tenths of its model's average, None where each
    model is one pool. The last is 0, for rows without a GPU.
    """
    regroup(fleet)
    weights = fleet.distribution.displaced(fleet.pools, fleet.capacity)
    models = np.array(fleet.pools.models, np.intp)
    if len(np.unique(models)) == len(models):
        return weights, None
    free = np.maximum(np.array(fleet.capacity.free_mib, float), 0)
    average = np.bincount(models, free * weights[:-1]) / np.maximum(np.bincount(models, free), 1)
    tenths = np.rint(10 * weights[:-1] / np.where(average > 0, average, 1)[models])
    return weights, np.append(tenths, 0).astype(np.int64)


def of_instances(fleet: Fleet, profile: str) -> Weights:
    """(pools + 1,) instances displaced by one of a MIG profile, by the pool of its GPU; the last is 0."""
    regroup(fleet)
    return fleet.distribution.displaced_instances(profile, fleet.pools, lambda: _instances(fleet, profile))


def regroup(fleet: Fleet) -> None:
    """Bring the pools up to date with nodes and requests."""
    moved = fleet.pools.classify(fleet.distribution.constraints(), _Offered(fleet))
    if moved is None:
        fleet.pool, shared = fleet.pools.regroup(fleet.model), fleet.shareable
        fleet.capacity.count(len(fleet.pools), fleet.pool[shared], fleet.total_mib[shared], fleet.free_mib[shared])
        return
    for at in moved:
        fleet.quit(at)
        for row in np.flatnonzero(fleet.model[:, at] >= 0).tolist():
            fleet.join(row, at)


@dataclass(frozen=True, slots=True)
class _Offered:
    fleet: Fleet

    def offers(self, profile: str, columns: Columns) -> Bools:
        known = self.fleet.mig.get(profile)
        if known is None:
            return np.zeros(len(columns), np.bool_)
        return _any(known.offered[:, columns] > 0)

    def shares(self, columns: Columns) -> Bools:
        return _any(self.fleet.shareable[:, columns])


def _any(of_gpus: Bools) -> Bools:
    """(nodes,)"""
    found: Bools = np.logical_or.reduce(of_gpus, axis=0)
    return found


def _instances(fleet: Fleet, profile: str) -> PoolCapacity:
    """Of a MIG profile, by pool. An instance counts as a GPU of 1 MiB."""
    counted, known = PoolCapacity(), fleet.mig[profile]
    here = known.offered > 0
    counted.count(len(fleet.pools), fleet.pool[here], known.offered[here], known.free[here])
    counted.gpus = list(counted.total_mib)
    return counted
