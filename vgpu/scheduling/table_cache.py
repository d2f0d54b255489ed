"""Tables of every node of a fleet, kept for the next pod that requests the same, and brought up to date where nodes changed since.

Between two pods of one template few nodes change. Of a pod that requests one share all that a policy reads of a node follows from that node's own
columns, so those of the others are still right. What depends on the whole cluster (how scarce pools are, the mix of requests) is no part of a table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from vgpu.api.request import PodRequest
from vgpu.scheduling.arrays import Columns, FollowedGpus, GpuArrays, GpusOfNodes
from vgpu.scheduling.feasibility import FeasibilityTable, gpus_of
from vgpu.scheduling.fleet import Bools, CandidateNodes, Fleet
from vgpu.scheduling.policies.registry import Order

KEPT: Final = 16
"""Tables with a fleet, those used last: 0.6 MiB each for 10,000 nodes with 8 GPUs. As many as `node_cache.KINDS`."""


def table_of_all(fleet: Fleet, request: PodRequest, order: Order) -> FeasibilityTable | None:
    """For this pod. Not to be used once the fleet has changed. None for pods whose tables are not kept."""
    part = request.containers[0] if len(request.containers) == 1 else None
    if part is None or part.kind != "share" or order != "tightest" or request.uuids or request.not_uuids:
        return None
    known: CachedTable | None = fleet.kept.pop(request, None)
    if known is None or not known.renewed():
        known = CachedTable(fleet, request)
    fleet.kept[request] = known
    if len(fleet.kept) > KEPT:
        del fleet.kept[next(iter(fleet.kept))]
    return known


@dataclass(frozen=True, slots=True)
class Empty:
    """Where a pod would fit if no other pod had an allocation, of every column of a fleet."""

    stocked: int
    width: int
    fits: Bools
    fits_mig: Bools
    fits_largest: Bools
    """A GPU for the largest part of the pod, were it the only one. Such a node lacks GPUs, not size."""


def empty_of_all(fleet: Fleet, request: PodRequest) -> Empty:
    """For this pod. Worked out anew when a node has come, gone or changed its GPUs."""
    known: Empty | None = fleet.kept_empty.pop(request, None)
    if known is None or (known.stocked, known.width) != (fleet.stocked, fleet.width):
        known = empty_of(fleet, request, CandidateNodes(np.arange(fleet.width), ()))
    fleet.kept_empty[request] = known
    if len(fleet.kept_empty) > KEPT:
        del fleet.kept_empty[next(iter(fleet.kept_empty))]
    return known


def empty_of(fleet: Fleet, request: PodRequest, nodes: CandidateNodes) -> Empty:
    """The same of some nodes, in the order of a table of them."""
    table = FeasibilityTable(fleet, request, nodes, emptied=True)
    return Empty(fleet.stocked, fleet.width, table.fits, table.fits_mig, _fits_largest(table, nodes))


def _fits_largest(empty: FeasibilityTable, nodes: CandidateNodes) -> Bools:
    if empty.fits.all():
        return empty.fits
    shares = [replace(part, gpus=1) for part in empty.request.containers if part.kind == "share"]
    whole = [replace(part, gpus=1) for part in empty.request.containers if part.kind == "whole"]
    if shares and not any(part.init for part in shares):  # else they all lie on one GPU
        shares = [max(shares, key=lambda part: part.mib)]
    alone = replace(empty.request, containers=tuple(shares or whole[:1]))
    return FeasibilityTable(empty.fleet, alone, nodes, emptied=True).fits if alone else empty.fits


class CachedTable(FeasibilityTable):
    """Of every node."""

    def __init__(self, fleet: Fleet, request: PodRequest) -> None:
        super().__init__(fleet, request, CandidateNodes(np.arange(fleet.width), ()))
        self._moment, self._shape = fleet.moment, _shape(fleet)
        self._node_free_mib = self._free_after()
        self._stocked, self._gpu_mib = -1, 1.0

    def renewed(self) -> bool:
        """Bring it up to date. False where it has to be made anew."""
        if self._shape != _shape(self.fleet):
            return False
        changed = np.flatnonzero(self.fleet.changed[: self.fleet.width] > self._moment)
        if 2 * len(changed) >= self.fleet.width:
            return False
        if len(changed):
            self._copy(FeasibilityTable(self.fleet, self.request, CandidateNodes(changed, ())), changed)
        self._moment = self.fleet.moment
        self.names = self.view.names = self.fleet.names
        return True

    def _copy(self, some: FeasibilityTable, at: Columns) -> None:
        """Copy another table's values for its nodes."""
        self.fits[at] = some.fits
        self._loosest_mib[at] = some._loosest_mib
        self._share_rows[:, at] = some._share_rows
        if (
            self._node_free_mib is not None and self._left is not None and some._left is not None
        ):  # as of one share they are
            self._node_free_mib[at] = some._free_after()
            self._left[:, at] = some._left

    def _before_and_after(self) -> tuple[GpusOfNodes, GpusOfNodes]:
        """As they are now."""
        fleet = self.fleet
        if self._stocked != fleet.stocked:
            self._stocked, self._gpu_mib = fleet.stocked, gpus_of(fleet, slice(0, fleet.width)).gpu_mib
        changed, cpu = fleet.changed[: fleet.width], fleet.free_cpu_milli[: fleet.width]
        return (
            FollowedGpus(self._moment, changed, self._before, cpu, self._gpu_mib),
            FollowedGpus(self._moment, changed, self._then, cpu - np.int32(self.request.cpu_milli), self._gpu_mib),
        )

    def _before(self, nodes: Columns) -> GpuArrays:
        return gpus_of(self.fleet, nodes)

    def _then(self, nodes: Columns) -> GpuArrays:
        return self._with_share(gpus_of(self.fleet, nodes), self._share_rows[:, nodes])


def _shape(fleet: Fleet) -> tuple[int, ...]:
    return (*fleet.total_mib.shape, fleet.width)
