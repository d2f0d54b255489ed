"""How much room for the requests to come a GPU takes with it: more where those requests can go nowhere else.

A request fits some number of times into what is free, over all models that it allows and that are large enough. When a GPU is taken, a
part of these times is gone. Each request counts with the GPUs that it asks for, and the sum is scaled so that all free GPUs together
displace as many GPUs as they are. So a GPU displaces

    1          on average, and on every model where requests can run anywhere
    more       where its model is scarce for those that allow little else
    less       where whoever can run on it can run elsewhere, too

A model that only large requests need is scarce by the same rule: small GPUs do not count for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from vgpu.capacity import Capacity, Floats
from vgpu.request import FULL_CORE_PERCENT

MOST: Final = 512
"""Different requests that count, those for most GPUs first. Guessed: bounds the work, some 50 us for 16 models."""


@dataclass(frozen=True, slots=True, order=True)
class Need:
    """What one GPU must have for a request."""

    mib: int
    """-1: it must be whole."""
    percent: int
    models: tuple[str, ...]
    """Allowed; empty: any."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests as arrays. R requests, M models by the fleet's code."""

    gpus: Floats
    """(R,) asked for by all requests of this need that were seen."""
    mib: Floats
    """(R,) 0 where the GPU must be whole."""
    most_on_a_gpu: Floats
    """(R,) times that compute time allows on one GPU."""
    allowed: npt.NDArray[np.bool_]
    """(R, M)"""

    @classmethod
    def of(cls, seen: Mapping[Need, int], models: Mapping[str, int]) -> Demand:
        """`seen`: GPUs asked for by need. `models`: code by name."""
        needs = sorted(seen, key=lambda need: (-seen[need], need))[:MOST]
        whole = FULL_CORE_PERCENT
        percent = [whole if need.mib < 0 else need.percent for need in needs]
        return cls(
            np.array([seen[need] for need in needs], float),
            np.array([max(need.mib, 0) for need in needs], float),
            np.array([whole / each if each else np.inf for each in percent]),
            np.array([[not need.models or model in need.models for model in models] for need in needs], bool).reshape(
                len(needs), len(models)
            ),
        )

    def displaced(self, capacity: Capacity) -> Floats:
        """(M,) GPUs of room that one free GPU of each model takes with it. `capacity` has the same models."""
        size, free = capacity.gpu_mib(), capacity.free_gpus()
        allowed = self.allowed & (size >= np.maximum(self.mib, 1)[:, np.newaxis])
        by_memory = size / np.maximum(self.mib, 1)[:, np.newaxis]
        by_memory[self.mib == 0] = np.inf
        times = np.where(allowed, np.minimum(np.minimum(by_memory, self.most_on_a_gpu[:, np.newaxis]), size), 0.0)
        left = times @ free
        possible = left > 0
        gpus = self.gpus[possible]
        lost = (gpus * (allowed[possible] @ free) / left[possible] ** 2) @ times[possible]
        total: Floats = lost * free
        return lost * (free.sum() / total.sum()) if total.sum() > 0 else np.ones(len(size))
