"""The free part of every GPU in the cluster, as arrays: what is free, which model it is, which pods may have it. `placement` chooses.

Units and shapes
    mib      memory, MiB (2**20 bytes), int32
    percent  compute time, percent of one GPU, int32
    arrays   (GPUs, nodes): reducing over a node's GPUs walks whole rows, 1.7 times faster than (nodes, GPUs)

A node is a column; its GPUs are rows by index. A node that leaves frees its column for the next one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import AccessMode, Gpu, Inventory
from vgpu.api.mig_device import slot_of_device
from vgpu.api.request import FULL_CORE_PERCENT, PodRequest
from vgpu.scheduling.demand.pool_capacity import PoolCapacity
from vgpu.scheduling.demand.pools import Pools
from vgpu.scheduling.demand.request_distribution import RequestDistribution
from vgpu.scheduling.limit_sums import LimitSums
from vgpu.scheduling.links import costs_of
from vgpu.scheduling.mig_stock import MigStock
from vgpu.scheduling.nodes.constraints import ANYWHERE, NodeConstraints, Taint
from vgpu.scheduling.nodes.labels import Labels
from vgpu.scheduling.nodes.name_index import NameIndex, Quoted
from vgpu.scheduling.nodes.nodes_by_column import NodesByColumn, NodesOfColumns, side_by_side

Ints: TypeAlias = npt.NDArray[np.int32]
Bools: TypeAlias = npt.NDArray[np.bool_]
Columns: TypeAlias = npt.NDArray[np.intp]

UNKNOWN_CPU: Final = np.int32(np.iinfo(np.int32).max)
"""Free CPU of a node that does not report it: no request exceeds it."""

FIRST_CAPACITY: Final = (8, 64)
"""(GPUs, nodes) to begin with; both double when full. Guessed."""


@dataclass(frozen=True, slots=True, eq=False)
class CandidateNodes:
    """Names of a call, looked up."""

    columns: Columns
    """Of those that are known, in the order of the call."""
    unknown: Sequence[str]
    """Those that are not."""


class Fleet:
    """Free memory and compute of every GPU of every node.

    `debit` and `credit` are O(1) in the size of the fleet. A column never describes a GPU that the inventory lacks:
    rows beyond a node's GPUs are not `shareable`.
    """

    def __init__(self, overcommit: float | None = None) -> None:
        """`overcommit`: what limits may add up to, times a GPU's memory; None = no bound."""
        gpus, nodes = FIRST_CAPACITY
        self.limits = LimitSums(overcommit, FIRST_CAPACITY)
        self.total_mib: Ints = np.zeros((gpus, nodes), np.int32)
        self.free_mib: Ints = np.zeros((gpus, nodes), np.int32)
        self.free_percent: Ints = np.zeros((gpus, nodes), np.int32)
        self.containers: Ints = np.zeros((gpus, nodes), np.int32)
        self.shareable: Bools = np.zeros((gpus, nodes), np.bool_)
        self.whole_only: Bools = np.zeros((gpus, nodes), np.bool_)
        """(GPUs, nodes) GPUs of which pods get no shares."""
        self.heat: Ints = np.zeros((gpus, nodes), np.int32)
        """(GPUs, nodes) number of the GPU's class in `HEAT_CLASSES`."""
        self.model: Ints = np.full((gpus, nodes), -1, np.int32)
        self.pool: Ints = np.full((gpus, nodes), -1, np.int32)
        """(GPUs, nodes) number of the GPU's pool, -1 where there is no GPU."""
        self.free_cpu_milli: Ints = np.full(nodes, UNKNOWN_CPU, np.int32)
        """(nodes,) the node's free CPU, where it is known. It is for policies: it never keeps a pod out."""
        self.capacity = PoolCapacity()
        """Of the GPUs that may be shared out, by pool."""
        self.distribution = RequestDistribution()
        """What the cluster's pods request, for policies. The watch of pods reports them (`saw`)."""
        self.column: dict[str, int] = {}
        self.labels = Labels(self.column)
        """Of the nodes, for pods with preferences. The watch of nodes reports them."""
        self.labels.grew(nodes)
        self.pools = Pools(self.labels, nodes)
        self.names: list[str] = [""] * nodes
        self.models: dict[str, int] = {}
        self.inventory: dict[str, Inventory] = {}
        self.links: dict[str, Ints] = {}
        """Node -> costs of its links, (GPUs, GPUs), as far as they were looked up (`links`)."""
        self.withdrawn: set[str] = set()
        """Nodes with a withdrawn GPU that `node.gpus` selects."""
        self.in_mig_mode: dict[str, int] = {}
        """Node -> MiB of the largest GPU in MIG mode that is offered: neither shared nor given whole."""
        self.unshared: dict[str, int] = {}
        """Node -> MiB of the largest GPU that is offered as a whole only."""
        self.stock = MigStock(FIRST_CAPACITY)
        """MIG instances and slots."""
        self.mig_containers, self.mig = self.stock.containers, self.stock.by_profile
        self.moment = 0
        """Another number whenever a column changes."""
        self.changed: npt.NDArray[np.int64] = np.zeros(nodes, np.int64)
        """(nodes,) the moment at which each column changed last: its GPUs, what is free of them, its CPU. MIG instances do not count."""
        self.stocked = 0
        """The moment at which a node was added, removed or had other GPUs."""
        self.kept: dict[Hashable, Any] = {}
        self.kept_empty: dict[Hashable, Any] = {}
        """What `table_cache` keeps with the fleet."""
        self.width = 0
        """Columns from here on were never used."""
        self._free_columns: list[int] = list(range(nodes - 1, -1, -1))
        self._name_index: NameIndex | None = None
        """Of the nodes there are; None until it is read, and whenever one was added or removed: made in 4 ms for 10,000 (measured)."""
        self._nodes = NodesOfColumns()
        self._homes: dict[str, list[tuple[str, int]]] | None = None

    def __len__(self) -> int:
        return len(self.column)

    def __contains__(self, node: str) -> bool:
        return node in self.column

    def look_up(self, names: Sequence[str]) -> CandidateNodes:
        """Which of these nodes are known, and where. Raises as `Quoted` does."""
        if isinstance(names, Quoted) and not names.names_few and (found := self._listed().find(names)) is not None:
            return CandidateNodes(found.columns, found.unknown)
        try:
            return CandidateNodes(np.fromiter(map(self.column.__getitem__, names), np.intp, len(names)), ())
        except KeyError:
            known = [self.column[name] for name in names if name in self.column]
            return CandidateNodes(np.array(known, np.intp), [name for name in names if name not in self.column])

    def all_if_most(self, names: Quoted) -> CandidateNodes | None:
        """Every node there is, when a text is long enough to name half of them or more."""
        name_index = self._listed()
        return CandidateNodes(name_index.columns, ()) if name_index.are_mostly_in(names) else None

    def _listed(self) -> NameIndex:
        if self._name_index is None:
            self._name_index = NameIndex(self.column)
            self.names = side_by_side(self.names)
            self._nodes.renamed()
        return self._name_index

    @property
    def column_names(self) -> tuple[str, ...]:
        """The name of each column now, empty where there is no node. Another tuple once a node was added or removed."""
        return self._nodes.every(self.names)

    def known(self, names: Sequence[str]) -> NodesByColumn:
        """Those of these nodes that are known, each once, by column, for a caller that keeps them: nothing of the text they were read from."""
        return self._nodes.sharing(self.look_up(names).columns, self.names)  # the look-up may make `names` anew

    def homes(self, uuid: str) -> Sequence[tuple[str, int]]:
        """(node, row) of every GPU with this UUID, or that carries the MIG instance with it, or the slot on demand of this name.

        Written down at the first question, and kept from then on: 0.3 s once and 22 MiB for 80,000 GPUs and 56,000 MIG
        instances (measured), which few clusters ever need.
        """
        if self._homes is None:
            self._homes = {}
            for node, inventory in self.inventory.items():
                self._settle(node, inventory)
        slot = slot_of_device(uuid)
        return self._homes.get(uuid if slot is None else slot[0], ())

    def _settle(self, node: str, inventory: Inventory) -> None:
        """Write down where the node's UUIDs are."""
        if self._homes is not None:
            for row, gpu in enumerate(inventory.gpus):
                for uuid in (gpu.uuid, *(instance.uuid for instance in gpu.instances)):
                    self._homes.setdefault(uuid, []).append((node, row))

    def _unsettle(self, node: str) -> None:
        """Forget them."""
        if self._homes is not None and node in self.inventory:
            for row, gpu in enumerate(self.inventory[node].gpus):
                for uuid in (gpu.uuid, *(instance.uuid for instance in gpu.instances)):
                    self._homes[uuid].remove((node, row))
                    if not self._homes[uuid]:
                        del self._homes[uuid]

    def set_node(self, name: str, inventory: Inventory, held: Iterable[AssignedGpu] = ()) -> None:
        """Add a node, or replace what is known of it. `held` is what all its pods occupy: nothing else is kept."""
        at = self.column[name] if name in self.column else self._new_column(name)
        if self.inventory.get(name) is not inventory:
            self.links.pop(name, None)
            self._unsettle(name)
            self._settle(name, inventory)
        while len(inventory.gpus) > len(self.total_mib):
            self._grow(axis=0)
        self._clear(at)
        self.inventory[name] = inventory
        missed = any(gpu.withdrawn and gpu.selected for gpu in inventory.gpus)
        (self.withdrawn.add if missed else self.withdrawn.discard)(name)
        _note(self.in_mig_mode, name, [gpu.mib for gpu in inventory.gpus if gpu.mig and gpu.offered])
        _note(self.unshared, name, [gpu.mib for gpu in inventory.gpus if gpu.shareable and gpu.whole_only])
        for row, gpu in enumerate(inventory.gpus):
            self._set_gpu(row, at, gpu)
        self.stock.set_node(name, at, inventory)
        self.pools.change(name)
        for assigned in held:
            self.debit(name, assigned)

    def remove_node(self, name: str) -> None:
        """Forget a node. Unknown names are ignored: a watch may report a deletion twice."""
        at = self.column.pop(name, None)
        if at is None:
            return
        self._name_index = None
        self._nodes.renamed()
        self._unsettle(name)
        self.links.pop(name, None)
        self.withdrawn.discard(name)
        self.in_mig_mode.pop(name, None)
        self.unshared.pop(name, None)
        del self.inventory[name], self.mig_containers[name]
        self.names[at], self.free_cpu_milli[at] = "", UNKNOWN_CPU
        self._clear(at)
        self.labels.leave(at)
        self.pools.leave(at)
        self._free_columns.append(at)

    def debit(self, node: str, assigned: AssignedGpu) -> None:
        """A pod now has this part of a GPU. A node or GPU that is not known is passed over: `set_node` counts its pods anew."""
        self._apply(node, assigned, 1)

    def credit(self, node: str, assigned: AssignedGpu) -> None:
        """A pod no longer has this part of a GPU. The reverse of `debit`."""
        self._apply(node, assigned, -1)

    def is_free(self, node: str, name: str) -> bool:
        """May a pod be given this MIG instance or slot of a node that is there?"""
        return self.stock.is_free(node, self.column[node], self.inventory[node], name)

    def link_costs(self, nodes: Iterable[str]) -> Ints:
        """(GPUs, GPUs, nodes) costs between GPUs, worked out at the first question about a node."""
        rows = len(self.total_mib)
        found = []
        for node in nodes:
            if node not in self.links or len(self.links[node]) != rows:
                self.links[node] = costs_of(self.inventory[node], rows)
            found.append(self.links[node])
        return np.stack(found, axis=-1)

    def set_cpu(self, node: str, free_milli: int) -> None:
        """Set a node's free CPU. Kept when its inventory changes."""
        at, free = self.column[node], min(free_milli, int(UNKNOWN_CPU))
        if self.free_cpu_milli[at] != free:
            self.free_cpu_milli[at] = free
            self._change(at)

    def set_labels(self, node: str, labels: Mapping[str, str] | None, taints: Iterable[Taint] = ()) -> None:
        """A node has these labels and taints; None: it is gone. Kept when its inventory changes."""
        if self.labels.set(node, labels) and node in self.column:
            self.pools.change(node)
        self.pools.taint(node, taints)

    def record(self, request: PodRequest, constraints: NodeConstraints = ANYWHERE) -> None:
        """A pod requested this: policies that go by the cluster's own requests count it."""
        self.distribution.record(request, self.models, constraints)

    def join(self, row: int, at: int) -> None:
        """A GPU belongs to the pool of its model on its node."""
        self.pool[row, at] = pool = self.pools.pool(int(self.model[row, at]), at)
        self.capacity.know(pool)
        if self.shareable[row, at]:
            total_mib = int(self.total_mib[row, at])
            self.capacity.add(pool, total_mib)
            self.capacity.debit(pool, total_mib - int(self.free_mib[row, at]))

    def quit(self, at: int) -> None:
        """The GPUs of a column belong to no pool."""
        for row in np.flatnonzero(self.shareable[:, at]).tolist():
            self.capacity.remove(int(self.pool[row, at]), int(self.total_mib[row, at]), int(self.free_mib[row, at]))
        self.pool[:, at] = -1

    def access(self, node: str) -> AccessMode:
        """How containers of this node get their devices."""
        return self.inventory[node].access

    def overcommitted(self) -> list[tuple[str, str, int, int]]:
        """(node, UUID, free MiB, free percent) of every GPU and MIG instance with less than nothing left: I1 is broken."""
        broken = np.argwhere((self.free_mib < 0) | (self.free_percent < 0)).tolist()
        gpus = [(self.names[c], self.inventory[self.names[c]].gpus[r].uuid, int(self.free_mib[r, c]), int(self.free_percent[r, c])) for r, c in broken]  # fmt: skip
        return gpus + list(self.stock.overcommitted(self.column, self.inventory))

    def snapshot(self) -> Mapping[str, Ints]:
        """Copies of what changes, by name: for tests and for a snapshot that a bug report can carry."""
        return {
            "free_mib": self.free_mib.copy(),
            "free_percent": self.free_percent.copy(),
            "containers": self.containers.copy(),
            **{f"free {profile}": instances.free.copy() for profile, instances in self.mig.items()},
        }

    def _apply(self, node: str, assigned: AssignedGpu, sign: int) -> None:
        at = self.column.get(node)
        if at is None:
            return
        if assigned.kind == "mig":
            self.stock.change(node, at, self.inventory[node], assigned, sign)
            return
        row = self._row(node, assigned)
        if row is None:
            return
        whole = assigned.kind == "whole"
        mib = sign * (int(self.total_mib[row, at]) if whole else assigned.mib)
        if self.limits.overcommit is not None:
            mib += self.limits.change((row, at), self.total_mib, self.free_mib, mib, assigned)
        self.free_mib[row, at] -= mib
        if self.shareable[row, at]:
            self.capacity.debit(int(self.pool[row, at]), mib)
        self.free_percent[row, at] -= sign * (FULL_CORE_PERCENT if whole else assigned.core_percent)
        self.containers[row, at] += sign
        self._change(at)

    def _change(self, at: int) -> None:
        self.changed[at] = self.moment = self.moment + 1

    def _row(self, node: str, assigned: AssignedGpu) -> int | None:
        gpus = self.inventory[node].gpus
        if 0 <= assigned.index < len(gpus) and gpus[assigned.index].uuid == assigned.uuid:
            return assigned.index
        return next((row for row, gpu in enumerate(gpus) if gpu.uuid == assigned.uuid), None)

    def _set_gpu(self, row: int, at: int, gpu: Gpu) -> None:
        self.total_mib[row, at] = self.free_mib[row, at] = gpu.mib
        self.free_percent[row, at] = FULL_CORE_PERCENT
        self.shareable[row, at], self.heat[row, at] = gpu.shareable, gpu.heat_number
        self.whole_only[row, at] = gpu.whole_only
        self.model[row, at] = self.models.setdefault(gpu.model, len(self.models))
        self.join(row, at)

    def _clear(self, at: int) -> None:
        self.quit(at)
        self._change(at)
        self.stocked = self.moment
        for array in (self.total_mib, self.free_mib, self.free_percent, self.containers, self.heat):
            array[:, at] = 0
        self.stock.clear(at)
        self.limits.clear(at)
        self.shareable[:, at] = self.whole_only[:, at] = False
        self.model[:, at] = -1

    def _new_column(self, name: str) -> int:
        if not self._free_columns:
            self._grow(axis=1)
        self._name_index = None
        self._nodes.renamed()
        at = self._free_columns.pop()
        self.column[name], self.names[at] = at, name
        self.labels.settle(name)
        self.width = max(self.width, at + 1)
        return at

    def _grow(self, axis: int) -> None:
        before = self.total_mib.shape[axis]
        for field in ("total_mib", "free_mib", "free_percent", "containers", "heat", "shareable", "whole_only"):
            setattr(self, field, _doubled(getattr(self, field), axis))
        self.limits.grow(axis)
        self.stock.grow(axis)
        self.model = np.concatenate([self.model, np.full_like(self.model, -1)], axis=axis)
        self.pool = np.concatenate([self.pool, np.full_like(self.pool, -1)], axis=axis)
        if axis == 1:
            self.free_cpu_milli = np.concatenate([self.free_cpu_milli, np.full(before, UNKNOWN_CPU, np.int32)])
            self.changed = np.concatenate([self.changed, np.zeros(before, np.int64)])
            self.names.extend([""] * before)
            self.labels.grew(2 * before)
            self.pools.grew(2 * before)
            self._free_columns.extend(range(2 * before - 1, before - 1, -1))


def _note(largest: dict[str, int], name: str, mib: Sequence[int]) -> None:
    """Write down the largest of a node's GPUs of one kind, or that it has none."""
    largest.pop(name, None)
    if mib:
        largest[name] = max(mib)


def _doubled(array: Any, axis: int) -> Any:
    return np.concatenate([array, np.zeros_like(array)], axis=axis)
