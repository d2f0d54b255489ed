"""What one pod may use on the nodes in view, and how much of it is free, before anything is tried.

The pod's own conditions decide (models, UUIDs, a node's GPUs that a caller named), and what other pods left. Where the pod would go is not
known here: `feasibility` tries it.

Units and shapes as in `fleet`. A column is a node in view: every one that the fleet has when most are candidates, since
reading all of them is quicker than picking out many; else the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from functools import cached_property

import numpy as np

from vgpu.api.inventory import Gpu, MigInstance
from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import slot_device, slot_mib
from vgpu.api.request import FULL_CORE_PERCENT, PodRequest
from vgpu.scheduling.fleet import Bools, CandidateNodes, Columns, Fleet, Ints
from vgpu.scheduling.mig_instances import InstanceCounts, on_node
from vgpu.scheduling.mig_slots import SlotGpu, losses
from vgpu.scheduling.packing import FreeGpus


class UsableGpus:
    """The nodes in view.

    columns     which of the fleet's columns they are
    names       by node in view; longer than the arrays if the fleet has columns to spare
    is_candidate (nodes,) whether the node is a candidate: the arrays mean nothing for the others
    """

    def __init__(
        self,
        fleet: Fleet,
        request: PodRequest,
        candidates: CandidateNodes,
        only: Mapping[str, Set[str]],
        *,
        emptied: bool,
        limited: bool = True,
    ) -> None:
        """`only`: node -> the GPUs that the pod may use there. `emptied`: as if no pod had anything. `limited`: within the bound of limits."""
        self.fleet, self.request, self._only, self.emptied = fleet, request, only, emptied
        self._limited = limited and fleet.limits.overcommit is not None
        columns = candidates.columns
        self.columns: slice | Columns
        if 2 * len(columns) >= fleet.width:
            self.columns, self.names = slice(0, fleet.width), fleet.names
            self.is_candidate: Bools = np.zeros(fleet.width, np.bool_)
            self.is_candidate[columns] = True
        else:
            self.columns, self.names = columns, [fleet.names[at] for at in columns.tolist()]
            self.is_candidate = np.ones(len(columns), np.bool_)

    def in_fleet(self, nodes: Columns) -> Columns:
        """The fleet's columns of nodes in view."""
        found: Columns = nodes if isinstance(self.columns, slice) else self.columns[nodes]
        return found

    def free_gpus(self, *, untouched: bool) -> FreeGpus:
        """What is free, before the pod. Not to be written to. `untouched`: report also which GPUs no pod has any of."""
        fleet, view = self.fleet, self.columns
        whole = self._allowed()
        allowed = whole & ~fleet.whole_only[:, view] if fleet.unshared else whole
        if self.emptied:
            total = fleet.total_mib[:, view]
            return FreeGpus(total, np.full_like(total, FULL_CORE_PERCENT), allowed, whole)
        free = whole & (fleet.containers[:, view] == 0) if untouched else allowed
        free_mib = fleet.free_mib[:, view] if self._limited else self._guarantees_leave()
        return FreeGpus(free_mib, fleet.free_percent[:, view], allowed, free)

    def _guarantees_leave(self) -> Ints:
        """(GPUs, nodes) free MiB, whatever limits add up to."""
        fleet, view = self.fleet, self.columns
        if fleet.limits.overcommit is None:
            return fleet.free_mib[:, view]
        leave: Ints = fleet.free_mib[:, view] + fleet.limits.withheld_mib[:, view]
        return leave

    def instances(self, profile: str) -> InstanceCounts:
        """Instances of a profile that the pod may use."""
        request, known = self.request, self.fleet.mig.get(profile)
        if known is None:
            nothing = np.zeros((len(self.fleet.total_mib), len(self.is_candidate)), np.int32)
            return InstanceCounts(nothing, nothing)
        usable = self._models() if request.models or request.not_models else np.True_
        free = (known.offered if self.emptied else known.free)[:, self.columns] * usable
        free_mib = known.free_mib[:, self.columns] * usable
        if request.uuids:
            free[:], free_mib[:] = 0, 0
        for at in self._one_by_one:
            free[:, at], free_mib[:, at] = 0, 0
            name = self.names[at]
            rows = {gpu.uuid: row for row, gpu in enumerate(self.fleet.inventory[name].gpus)}
            for gpu, instance in self.instances_on(name, profile):
                free[rows[gpu.uuid], at] += 1
                free_mib[rows[gpu.uuid], at] += instance.mib
            for one in self.slots_on(name):
                free[one.row, at] = room = one.room(profile)
                free_mib[one.row, at] = room * slot_mib(one.gpu.mib, one.table, profile) if room else 0
        return InstanceCounts(free, free_mib, losses(self.fleet, profile, self.columns))

    @cached_property
    def _one_by_one(self) -> frozenset[int]:
        """Nodes in view on which the pod's conditions name single GPUs or instances."""
        named = {at for _, at in self._homes(self.request.uuids | self.request.not_uuids)}
        return frozenset(named | {at for at in map(self._position, self._only) if at >= 0})

    def is_narrowed(self, at: int) -> bool:
        """May the pod use only some of the GPUs of a node in view?"""
        request = self.request
        return bool(request.models or request.not_models or request.uuids) or at in self._one_by_one

    def slots_on(self, name: str) -> list[SlotGpu]:
        """GPUs on demand of one node that the pod may use some slot of."""
        stock, at, found = self.fleet.stock, self.fleet.column[name], list[SlotGpu]()
        for row, gpu in enumerate(self.fleet.inventory[name].gpus):
            state = stock.state(row, at)
            used = None if state is None else () if self.emptied else state.layout
            if state is not None and used is not None and self.request.allows_model(gpu.model):
                found.append(SlotGpu(row, gpu, state.table, used, self._slots_allowed(name, gpu)))
        return found

    def _slots_allowed(self, name: str, gpu: Gpu) -> Callable[[MigSlot], bool] | None:
        """Which slots of a GPU the pod's conditions allow; None: all."""
        if not self.request.uuids and not self.request.not_uuids and name not in self._only:
            return None
        return lambda slot: self._may_use(name, gpu, slot_device(gpu.uuid, slot))

    def instances_on(self, name: str, profile: str) -> list[tuple[Gpu, MigInstance]]:
        """Declared ones of one node."""
        found = on_node(self.fleet, name, profile, emptied=self.emptied)
        return [(gpu, instance) for gpu, instance in found if self._may_use(name, gpu, instance.uuid)]

    def _allowed(self) -> Bools:
        """(GPUs, nodes) GPUs that the pod may have a share of, or whole, when no other pod has them."""
        request, allowed = self.request, self.fleet.shareable[:, self.columns] & self.is_candidate
        if request.models or request.not_models:
            allowed &= self._models()
        if self._limited and request.limits_mib:
            allowed &= self._within_limits(request.limits_mib)
        if request.uuids:
            named = np.zeros_like(allowed)
            for row, at in self._homes(request.uuids):
                named[row, at] = True
            allowed &= named
        for row, at in self._homes(request.not_uuids):
            allowed[row, at] = False
        for name, uuids in self._only.items():
            at = self._position(name)
            for row, gpu in enumerate(self.fleet.inventory[name].gpus if at >= 0 else ()):
                allowed[row, at] &= gpu.uuid in uuids
        return allowed

    def _within_limits(self, limits_mib: tuple[int, ...]) -> Bools:
        """(GPUs, nodes) where the pod's limits keep to the bound."""
        total_mib, emptied = self.fleet.total_mib[:, self.columns], self.emptied
        free_mib = total_mib if emptied else self._guarantees_leave()
        return self.fleet.limits.allow(limits_mib, total_mib, free_mib, view=self.columns, emptied=emptied)

    def _models(self) -> Bools:
        """(GPUs, nodes) whether the pod's conditions allow the model."""
        allowed = np.zeros(
            len(self.fleet.models) + 1, np.bool_
        )  # the last one is for rows without a GPU, which have -1
        for model, code in self.fleet.models.items():
            allowed[code] = self.request.allows_model(model)
        by_gpu: Bools = allowed[self.fleet.model[:, self.columns]]
        return by_gpu

    def _homes(self, uuids: Set[str]) -> list[tuple[int, int]]:
        """(row, node in view) of the GPUs that have or carry these UUIDs."""
        found = [(row, self._position(node)) for uuid in uuids for node, row in self.fleet.homes(uuid)]
        return [(row, at) for row, at in found if at >= 0]

    def _position(self, name: str) -> int:
        """Where in view a node is, -1 when it is no candidate."""
        column = self.fleet.column.get(name, -1)
        if isinstance(self.columns, slice):
            return column if column >= 0 and self.is_candidate[column] else -1
        found = np.flatnonzero(self.columns == column)
        return int(found[0]) if len(found) else -1

    def _may_use(self, name: str, gpu: Gpu, instance: str) -> bool:
        """Do the pod's conditions and `only` allow an instance or slot? It answers to its own UUID or name, and to its GPU's."""
        known = {gpu.uuid, instance}
        return self.request.allows(gpu.model, known) and (
            name not in self._only or not known.isdisjoint(self._only[name])
        )
