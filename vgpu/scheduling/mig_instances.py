"""Which MIG instances of a profile a pod would take, on many nodes at once.

They come from the GPUs that have least of them left, so that whole GPUs of instances stay together. Counting is done for all
nodes in arrays; which instances exactly matters for the one node that is chosen, and is looked up there (`choose`).

Units and shapes as in `fleet`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vgpu.api.inventory import Gpu, MigInstance
from vgpu.api.quantity import LARGEST_GPU_MIB
from vgpu.scheduling.fleet import Bools, Columns, Fleet, Ints

Floats = npt.NDArray[np.float32]

_LAST: Final = np.inf
"""Sorts behind every GPU that has instances left."""

LOSSES: Final = 10_000
"""Losses of a GPU that are told apart, as parts of it. Guessed."""


@dataclass(frozen=True, slots=True)
class InstanceCounts:
    """Instances of one profile that a pod may take: declared ones, and as many as still fit GPUs on demand."""

    free: Ints
    """(GPUs, nodes)"""
    free_mib: Ints
    """(GPUs, nodes) their memory together."""
    lost: Floats | None = None
    """(GPUs, nodes) what the best place loses of a GPU on demand, as a part of it; None where the fleet has no such GPU."""

    def at(self, columns: Columns) -> InstanceCounts:
        """Of these nodes only."""
        lost = None if self.lost is None else self.lost[:, columns]
        return InstanceCounts(self.free[:, columns], self.free_mib[:, columns], lost)

    def enough(self, wanted: int) -> Bools:
        """(nodes,) whether there are so many."""
        enough: Bools = self.free.sum(axis=0) >= wanted
        return enough

    def take(self, wanted: int) -> tuple[Ints, Ints]:
        """Of nodes that have enough: (GPUs, nodes) how many instances are taken of each GPU, and the MiB left on it after that."""
        order = np.where(self.free > 0, self._rank(), _LAST).argsort(axis=0, kind="stable")
        free = np.take_along_axis(self.free, order, axis=0)
        before = free.cumsum(axis=0, dtype=np.int32) - free
        taken = np.zeros_like(self.free)
        np.put_along_axis(taken, order, (np.int32(wanted) - before).clip(0, free), axis=0)
        each_mib = self.free_mib // np.maximum(self.free, 1)
        return taken, self.free_mib - taken * each_mib

    def _rank(self) -> npt.NDArray[Any]:
        """(GPUs, nodes) the lowest is taken first: what is lost counts before the memory that is left. Declared instances lose nothing."""
        if self.lost is None:
            return self.free_mib
        return np.rint(self.lost * LOSSES).astype(np.float64) * np.float64(LARGEST_GPU_MIB) + self.free_mib


def choose(free: list[tuple[Gpu, MigInstance]], wanted: int) -> list[tuple[Gpu, MigInstance]]:
    """`wanted` of the free instances of one node, in order of its GPUs."""
    left: dict[str, int] = {}
    for gpu, instance in free:
        left[gpu.uuid] = left.get(gpu.uuid, 0) + instance.mib
    return sorted(free, key=lambda found: left[found[0].uuid])[:wanted]


def on_node(fleet: Fleet, name: str, profile: str, *, emptied: bool) -> list[tuple[Gpu, MigInstance]]:
    """Every declared instance of a profile that may be given on a node, in order of GPUs; `emptied`: as if no pod used any."""
    taken = {} if emptied else fleet.mig_containers[name]
    return [
        (gpu, instance)
        for gpu in fleet.inventory[name].gpus
        for instance in gpu.offered_instances
        if instance.profile == profile and instance.uuid not in taken
    ]
