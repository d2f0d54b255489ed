"""How much capacity for future requests a GPU takes with it: more if those requests fit nowhere else.

A request fits some number of times into the free capacity, over all pools that it can use (`pools`) and whose GPUs are large enough. When a GPU is taken, a
part of these times is gone. Each request counts with the GPUs that it requests, and the sum is scaled so that all free GPUs together
displace as many GPUs as they are. So a GPU displaces

    1          on average, and in every pool where requests can run anywhere
    more       where its pool is scarce for those that can use little else
    less       where the requests that fit it fit other pools, too

A model that only large requests need is scarce by the same rule: small GPUs do not count for them. MIG instances of one profile are
weighed in the same way, each as a GPU that is requested whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from vgpu.api.request import FULL_CORE_PERCENT
from vgpu.scheduling.demand.pool_capacity import Floats, PoolCapacity
from vgpu.scheduling.nodes.constraints import ANYWHERE, NodeConstraints
from vgpu.scheduling.nodes.selectors import Bools

MOST: Final = 512
"""Different requests that count, those for most GPUs first. Guessed: bounds the work, 0.1 ms for 256 pools."""


@dataclass(frozen=True, slots=True, order=True)
class GpuNeed:
    """What one GPU must have for a request."""

    mib: int
    """-1: it must be whole."""
    percent: int
    models: tuple[str, ...] = ()
    """Allowed; empty: any."""
    constraints: NodeConstraints = ANYWHERE
    """Of its node."""


INSTANCE: Final = GpuNeed(-1, FULL_CORE_PERCENT)
"""What a MIG instance is counted as."""


@dataclass(slots=True)
class _Fit:
    """How often requests fit on GPUs of these sizes. Sizes change rarely, and what is free with every pod."""

    size: Floats
    times: Floats
    """(R, P) on one GPU."""
    usable: Floats
    """(R, P) 1 where the GPU is allowed and large enough."""


@dataclass(slots=True)
class Demand:
    """Requests as arrays. R requests, P pools."""

    gpus: Floats
    """(R,) requested by all requests of this need that were seen."""
    mib: Floats
    """(R,) 0 where the GPU must be whole."""
    most_on_a_gpu: Floats
    """(R,) times that compute time allows on one GPU."""
    allowed: Bools
    """(R, P)"""
    _fit: _Fit | None = field(default=None, repr=False)

    @classmethod
    def of(cls, seen: Mapping[GpuNeed, int], pools: int, allows: Callable[[GpuNeed], Bools]) -> Demand:
        """`seen`: GPUs requested by need. `allows`: (pools,) which pools a need can use, if their GPUs are large enough."""
        needs = sorted(seen, key=lambda need: (-seen[need], need))[:MOST]
        whole = FULL_CORE_PERCENT
        percent = [whole if need.mib < 0 else need.percent for need in needs]
        return cls(
            np.array([seen[need] for need in needs], float),
            np.array([max(need.mib, 0) for need in needs], float),
            np.array([whole / each if each else np.inf for each in percent]),
            np.array([allows(need) for need in needs], bool).reshape(len(needs), pools),
        )

    def displaced(self, capacity: PoolCapacity) -> Floats:
        """(P,) GPUs' worth of capacity that one free GPU of each pool takes with it. `capacity` has the same pools."""
        size, free = capacity.gpu_mib(), capacity.free_gpus()
        fit = self._fit = self._on(size)
        left = fit.times @ free
        possible = left > 0
        gpus = self.gpus[possible]
        lost = (gpus * (fit.usable[possible] @ free) / left[possible] ** 2) @ fit.times[possible]
        total: Floats = lost * free
        return lost * (free.sum() / total.sum()) if total.sum() > 0 else np.ones(len(size))

    def _on(self, size: Floats) -> _Fit:
        if self._fit is not None and np.array_equal(self._fit.size, size):
            return self._fit
        usable = self.allowed & (size >= np.maximum(self.mib, 1)[:, np.newaxis])
        by_memory = size / np.maximum(self.mib, 1)[:, np.newaxis]
        by_memory[self.mib == 0] = np.inf
        times = np.where(usable, np.minimum(np.minimum(by_memory, self.most_on_a_gpu[:, np.newaxis]), size), 0.0)
        return _Fit(size, times, usable.astype(float))
