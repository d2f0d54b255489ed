"""What this node offers now: the inventory, with the health of each GPU, as device IDs.

Has the one copy from which the gRPC streams, the ledger, the annotation and the CDI spec are made, and notifies them when it changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Final, Protocol

from vgpu.api.contract import Device, devices
from vgpu.api.inventory import Gpu, GpuCondition, Inventory, Orphan, without_copiers
from vgpu.api.names import Names

EVERY: Final = "*"
"""Each MIG profile is offered."""


class SlotsOnDemand(Protocol):
    """MIG instances that are made when pods request them (`deviceplugin.mig.on_demand`)."""

    def shown(self, gpu: Gpu) -> Gpu:
        """The GPU as the inventory has it."""

    def devices(self, gpu: Gpu) -> Mapping[str, tuple[str, ...]]:
        """Profile -> names of the slots that it offers now."""


class Offer:
    """Begins empty: a node without GPUs offers nothing. `context_mib`: memory of each GPU that the host pool's copier takes, and no pod gets.

    `profiles`: MIG profiles that are offered. kube-scheduler reads at its start which resources are Tangram's: a pod with another would reach a node without an assignment.
    """

    def __init__(
        self, names: Names, unit_mib: int, *, context_mib: int = 0, profiles: Collection[str] = (EVERY,)
    ) -> None:
        self.names = names
        self.version = 0
        self.slots: SlotsOnDemand | None = None
        """Asked at each change; whoever knows that its answer changed calls `refresh`."""
        self.unlisted: Callable[[str], object] = bool
        """Called once with each MIG profile that the node has and does not offer."""
        self._profiles, self._unlisted = frozenset(profiles), set[str]()
        self.probed = False
        """Has NVML answered once?"""
        self._context_mib = context_mib
        self._reported = self._inventory = Inventory((), unit_mib)
        self._conditions: Mapping[str, tuple[GpuCondition, ...]] = {}
        self._orphans: tuple[Orphan, ...] = ()
        self._devices: dict[str, tuple[Device, ...]] = {}
        self._slots: dict[str, tuple[Device, ...]] = {}
        self._changed = asyncio.Event()

    def inventory(self) -> Inventory:
        """The node's GPUs, each with its health."""
        return self._inventory

    @property
    def reported(self) -> Inventory:
        """As NVML reported last: with the memory that copiers take."""
        return self._reported

    def resources(self) -> tuple[str, ...]:
        """Every resource that the node offers or has offered since the start: those that are gone have no devices."""
        return tuple(self._devices)

    def devices(self, resource: str) -> tuple[Device, ...]:
        """The devices of a resource."""
        return self._devices.get(resource, ())

    def set_inventory(
        self, inventory: Inventory, conditions: Mapping[str, tuple[GpuCondition, ...]] | None = None
    ) -> None:
        """NVML answered again. `conditions`: as of `set_conditions`; None = as before."""
        self.probed = True
        self._set(inventory, self._conditions if conditions is None else dict(conditions))

    def set_conditions(self, conditions: Mapping[str, tuple[GpuCondition, ...]]) -> None:
        """What is wrong with GPUs, by UUID; all others are as NVML reported last."""
        self._set(self._reported, dict(conditions))

    def set_orphans(self, orphans: tuple[Orphan, ...]) -> None:
        """Pods that the API lacks and whose processes run on, by UID."""
        self._orphans = orphans
        self.refresh()

    def refresh(self) -> None:
        """Slots on demand may have changed."""
        if self.probed:
            self._set(self._reported, self._conditions)

    async def changed_since(self, version: int) -> int:
        """Return the present version as soon as it is not `version`."""
        while self.version == version:
            await self._changed.wait()
        return self.version

    def _set(self, reported: Inventory, conditions: Mapping[str, tuple[GpuCondition, ...]]) -> None:
        seen = reported.gpus if self.slots is None else tuple(map(self.slots.shown, reported.gpus))
        gpus = tuple(_with_conditions(gpu, conditions.get(gpu.uuid, ())) for gpu in seen)
        inventory = replace(reported, gpus=without_copiers(gpus, self._context_mib), orphans=self._orphans)
        self._reported, self._conditions = reported, conditions
        slots = self._slot_devices(gpus)
        if inventory == self._inventory and slots == self._slots and self.version:
            return
        self._inventory, self._slots = inventory, slots
        offered = devices(inventory, self.names) if gpus else {}
        for resource, more in slots.items():
            offered[resource] = (*offered.get(resource, ()), *more)
        self._devices = dict.fromkeys(self._devices, ()) | self._listed(offered)
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _listed(self, offered: Mapping[str, tuple[Device, ...]]) -> dict[str, tuple[Device, ...]]:
        if EVERY in self._profiles:
            return dict(offered)
        mig = {resource: self.names.mig_profile(resource) for resource in offered}
        for profile in mig.values():
            if profile and profile not in self._profiles | self._unlisted:
                self._unlisted.add(profile)
                self.unlisted(profile)
        return {resource: ids for resource, ids in offered.items() if mig[resource] in (None, *self._profiles)}

    def _slot_devices(self, gpus: tuple[Gpu, ...]) -> dict[str, tuple[Device, ...]]:
        found: dict[str, tuple[Device, ...]] = {}
        for gpu in gpus if self.slots is not None else ():
            for profile, names in self.slots.devices(gpu).items() if self.slots is not None else ():
                more = tuple(Device(name, name, gpu.healthy, gpu.numa) for name in names)
                found[self.names.mig(profile)] = (*found.get(self.names.mig(profile), ()), *more)
        return found


def _with_conditions(gpu: Gpu, conditions: tuple[GpuCondition, ...]) -> Gpu:
    fit = all(one.state == "degraded" for one in conditions)
    return replace(gpu, healthy=gpu.healthy and fit, conditions=conditions)
