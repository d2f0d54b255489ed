"""A node and which pod has what there, as arrays: made once, and read by every search for victims until something there changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.names import CLASSES, Kind
from vgpu.api.overcommit import bound_mib, limit_of, withheld_mib
from vgpu.api.request import FULL_CORE_PERCENT, PodRequest
from vgpu.scheduling.mig_stock import free_on
from vgpu.scheduling.victims.eligibility import AllocatedPod

RANKS: Final = {service_class: at for at, service_class in enumerate(CLASSES)}
"""0 latency-critical, 1 standard, 2 best-effort."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class NodeView:
    """`allocated_pods` must name all pods with an allocation on the node: what they leave is what is free.

    Per pod, in the order of `pods`: `priority`, `rank` of its class, `started`, `evictable` (may it be evicted?). Per share, that is what one pod
    has of one GPU: `owner` (pod), `row` (GPU), `mib`, `percent`; a whole GPU counts as all of it.
    """

    __slots__ = (
        "_index",
        "_requests",
        "bounds",
        "budgeted",
        "budgets",
        "evictable",
        "inventory",
        "mib",
        "mig",
        "name",
        "overcommit",
        "owner",
        "percent",
        "pods",
        "priority",
        "rank",
        "row",
        "shareable",
        "spans",
        "started",
        "total_mib",
        "whole_only",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        inventory: Inventory,
        allocated_pods: Sequence[AllocatedPod],
        overcommit: float | None = None,
    ) -> None:
        """`overcommit` as `Fleet`'s."""
        self.overcommit = overcommit
        self.name, self.inventory, self.pods = name, inventory, tuple(allocated_pods)
        gpus = {gpu.uuid: (row, gpu.mib) for row, gpu in enumerate(inventory.gpus)}
        owner, rows, mib, percent = list[int](), list[int](), list[int](), list[int]()
        mig = list[tuple[int, AssignedGpu]]()
        for at, one in enumerate(self.pods):
            for assigned in one.held:
                if assigned.kind == "mig":
                    mig.append((at, assigned))
                elif assigned.uuid in gpus:
                    row, gpu_mib = gpus[assigned.uuid]
                    whole = assigned.kind == "whole"
                    owner.append(at)
                    rows.append(row)
                    mib.append(gpu_mib if whole else assigned.mib)
                    percent.append(FULL_CORE_PERCENT if whole else assigned.core_percent)
        self.owner, self.row, self.mib, self.percent = map(_ints, (owner, rows, mib, percent))
        self.mig = tuple(mig)
        self.priority = _ints([one.priority for one in self.pods])
        self.rank = _ints([RANKS.get(one.service_class, 1) for one in self.pods])
        self.started = _ints([one.started for one in self.pods])
        self.evictable = np.array([not one.protected for one in self.pods], np.bool_)
        self.budgeted = tuple((at, one.budgets) for at, one in enumerate(self.pods) if one.budgets)
        self.budgets = frozenset[str]().union(*(one.budgets for one in self.pods))
        self.bounds: dict[tuple[object, frozenset[str]], Any] = {}
        """What `bound_cache` keeps here."""
        self.spans = len(set(owner)) < len(owner)
        """Has a pod shares of several GPUs?"""
        self.shareable = np.array([gpu.shareable for gpu in inventory.gpus], np.bool_)
        self.whole_only = np.array([gpu.whole_only for gpu in inventory.gpus], np.bool_)
        self.total_mib: Ints = np.array([gpu.mib for gpu in inventory.gpus], np.int64)
        if overcommit is not None:
            self._count_limits(overcommit)
        self._index: Mapping[str, int] | None = None
        self._requests: dict[str, Ints] = {}

    def _count_limits(self, overcommit: float) -> None:
        """On GPUs where limits leave less than guarantees do, a share counts with its limit, and the GPU with their bound."""
        gpus = {gpu.uuid: row for row, gpu in enumerate(self.inventory.gpus)}
        held = [one for pod in self.pods for one in pod.held if one.kind != "mig" and one.uuid in gpus]
        limits = _ints(
            [mib + max(0, limit_of(one) - one.mib) for one, mib in zip(held, self.mib.tolist(), strict=True)]
        )
        for row, total_mib in enumerate(self.total_mib.tolist()):
            here = self.row == row
            free_mib = total_mib - int(self.mib[here].sum())
            excess_mib = int((limits - self.mib)[here].sum())
            if withheld_mib(total_mib, free_mib, excess_mib, overcommit):
                self.mib[here] = limits[here]
                self.total_mib[row] = bound_mib(total_mib, overcommit)

    def indices(self, uids: Set[str]) -> list[int]:
        """Of those of these pods that are there."""
        if uids and self._index is None:
            self._index = {one.uid: at for at, one in enumerate(self.pods)}
        return [self._index[uid] for uid in sorted(uids) if uid in self._index] if self._index else []

    def requests(self, resource: str) -> Ints:
        """(pods,) what each frees of a resource."""
        if resource not in self._requests:
            self._requests[resource] = np.array([one.frees(resource) for one in self.pods], np.int64)
        return self._requests[resource]

    def instances(self, profile: str) -> int:
        """How many MIG instances of a profile are offered, free or not: those that exist, and those that GPUs on demand have room for without pods."""
        gpus = self.inventory.gpus
        declared = sum(one.profile == profile for gpu in gpus for one in gpu.offered_instances)
        return declared + sum(free_on(gpu, profile) for gpu in gpus if gpu.on_demand)

    @property
    def on_demand(self) -> bool:
        """Has the node GPUs whose MIG instances are created on demand?"""
        return any(gpu.on_demand for gpu in self.inventory.gpus)

    def free_instances(self, profile: str) -> int:
        """How many of `instances` no pod has, and still fit beside what pods have."""
        taken = {assigned.uuid for _, assigned in self.mig}
        gpus = self.inventory.gpus
        free = sum(one.profile == profile and one.uuid not in taken for gpu in gpus for one in gpu.offered_instances)
        return free + sum(free_on(gpu, profile, taken) for gpu in gpus if gpu.on_demand)

    def allowed(self, request: PodRequest, only: Set[str] | None, kind: Kind) -> Bools:
        """(GPUs,) which the pod may have a share of, or as a whole: `kind`. `only`: no others than these."""
        given = self.shareable if kind == "whole" else self.shareable & ~self.whole_only
        if only is None and not (request.models or request.not_models or request.uuids or request.not_uuids):
            return given
        return given & np.array([may_have(request, gpu, only) for gpu in self.inventory.gpus], np.bool_)


def may_have(request: PodRequest, gpu: Gpu, only: Set[str] | None) -> bool:
    """May the pod have a share of this GPU, or all of it, if it is free?"""
    return gpu.shareable and request.allows(gpu.model, {gpu.uuid}) and (only is None or gpu.uuid in only)


def _ints(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, np.int64)
