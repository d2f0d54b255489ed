"""The GPUs of many nodes at one moment, as policies evaluate them. Units and shapes as in `fleet`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int32]
Columns: TypeAlias = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class GpuArrays:
    """The GPUs of the nodes in view at one moment."""

    free_mib: Ints
    free_percent: Ints
    total_mib: Ints
    """(GPUs, nodes); 0 where there is no GPU that may be shared."""
    model: Ints
    """(GPUs, nodes) the fleet's code, -1 where there is no GPU."""
    cpu_milli: Ints
    """(nodes,) the node's free CPU."""

    @property
    def gpu_mib(self) -> float:
        """Mean memory of a GPU that may be shared; 1 where there is none."""
        there = int(np.count_nonzero(self.total_mib > 0))
        return float(self.total_mib.sum()) / there if there else 1.0


@dataclass(frozen=True, slots=True)
class FollowedGpus:
    """The same of every node of a fleet, where only those are evaluated that changed since the last evaluation."""

    moment: int
    """Now (`Fleet.moment`)."""
    changed: npt.NDArray[np.int64]
    """(nodes,) the moment at which each changed last."""
    at: Callable[[Columns], GpuArrays]
    """Of some nodes."""
    cpu_milli: Ints
    """(nodes,) as in `GpuArrays`."""
    gpu_mib: float
    """As in `GpuArrays`."""

    @property
    def free_mib(self) -> Ints:
        """As in `GpuArrays`: reads every node."""
        return self.at(np.arange(len(self.changed))).free_mib

    @property
    def total_mib(self) -> Ints:
        """As in `GpuArrays`: reads every node."""
        return self.at(np.arange(len(self.changed))).total_mib


GpusOfNodes: TypeAlias = GpuArrays | FollowedGpus
