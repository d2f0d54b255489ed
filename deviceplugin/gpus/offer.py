"""What this node offers now: the inventory, with the health and heat class of each GPU, as device IDs.

Has the one copy from which the gRPC streams, the ledger, the annotation and the CDI spec are made, and notifies them when it changes.

A GPU may be withdrawn, for a reason that has nothing to do with its health: new pods do not get it. Then the kubelet sees those of its device IDs that
containers have, as healthy as the GPU is, and no others. An ID in use that left the list, or was Unhealthy there, would cost a running pod.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from vgpu.api.contract import Device, devices
from vgpu.api.inventory import (
    NORMAL,
    Gpu,
    GpuCondition,
    HeatClass,
    Inventory,
    Orphan,
    Withdrawal,
    withdraw,
    without_copiers,
)
from vgpu.api.names import Names

CORDONS: Final = "cordons"
"""Who withdraws GPUs that an operator cordoned, and GPUs that are to be tried: of `Offer.set_withdrawn`."""

NOT_OURS: Final = frozenset({Withdrawal.NOT_SELECTED, Withdrawal.CLASH, Withdrawal.UNKNOWN})
"""The GPU is somebody else's, or may be."""
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
        self.names_numa = False
        """Does each device name its GPU's NUMA node to the kubelet?"""
        self._context_mib = context_mib
        self._reported = self._inventory = Inventory((), unit_mib)
        self._conditions: Mapping[str, tuple[GpuCondition, ...]] = {}
        self._withdrawn: dict[str, Mapping[str, GpuCondition]] = {}
        self._orphans: tuple[Orphan, ...] = ()
        self._heat: Mapping[str, HeatClass] = {}
        self._devices: dict[str, tuple[Device, ...]] = {}
        self._changed = asyncio.Event()
        self.in_use: Callable[[str], Collection[str]] = lambda _: ()
        """Resource -> device IDs that containers have: these stay while their GPU is withdrawn."""
        self.hold_back: Callable[[Inventory, Inventory], Mapping[str, GpuCondition]] = lambda _, __: {}
        """Inventory before, and now -> GPUs that are withdrawn by `CORDONS` from now on, as they were unhealthy and are to be tried first."""

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

    def set_withdrawn(self, by: str, withdrawn: Mapping[str, GpuCondition]) -> None:
        """GPUs that new pods do not get, by UUID, as one part of the program decides: `by` names it. Replaces what it said before."""
        if withdrawn == self._withdrawn.get(by, {}):
            return
        self._withdrawn[by] = dict(withdrawn)
        if self.probed:
            self._set(self._reported, self._conditions)

    def withdrawn_by(self, by: str) -> Mapping[str, GpuCondition]:
        """What `set_withdrawn` said last."""
        return self._withdrawn.get(by, {})

    def set_orphans(self, orphans: tuple[Orphan, ...]) -> None:
        """Pods that the API lacks and whose processes run on, by UID."""
        self._orphans = orphans
        self.refresh()

    def refresh(self) -> None:
        """Slots on demand may have changed, or containers have ended: IDs of withdrawn GPUs that nobody has leave the list."""
        if self.probed:
            self._set(self._reported, self._conditions)

    def set_heat(self, classes: Mapping[str, HeatClass]) -> None:
        """Heat classes by UUID; all others are normal."""
        self._heat = dict(classes)
        if self.probed:
            self._set(self._reported, self._conditions)

    def name_numa(self, named: bool) -> None:
        """As of `names_numa`."""
        if named != self.names_numa:
            self.names_numa = named
            self._notify()

    async def changed_since(self, version: int) -> int:
        """Return the present version as soon as it is not `version`."""
        while self.version == version:
            await self._changed.wait()
        return self.version

    def _set(self, reported: Inventory, conditions: Mapping[str, tuple[GpuCondition, ...]]) -> None:
        inventory = self._made(reported, conditions)
        if held_back := self.hold_back(self._inventory, inventory):
            self._withdrawn[CORDONS] = {**held_back, **self._withdrawn.get(CORDONS, {})}
            inventory = self._made(reported, conditions)
        self._reported, self._conditions = reported, conditions
        changed = inventory != self._inventory or not self.version
        self._inventory = inventory
        self._list(inventory, always=changed)

    def _made(self, reported: Inventory, conditions: Mapping[str, tuple[GpuCondition, ...]]) -> Inventory:
        """As NVML reported it, with what is wrong and what is withdrawn."""
        seen = reported.gpus if self.slots is None else tuple(map(self.slots.shown, reported.gpus))
        gpus = tuple(
            replace(
                withdraw(_with_conditions(gpu, conditions.get(gpu.uuid, ())), *self._reasons(gpu.uuid)),
                heat=self._heat.get(gpu.uuid, NORMAL),
            )
            for gpu in seen
        )
        return replace(reported, gpus=without_copiers(gpus, self._context_mib), orphans=self._orphans)

    def _reasons(self, uuid: str) -> list[GpuCondition]:
        """A self-test that waits until a GPU is nobody else's is no reason yet: it would be named for as long as the other has the GPU."""
        found = [of[uuid] for of in self._withdrawn.values() if uuid in of]
        if any(one.reason in NOT_OURS for one in found):
            return [one for one in found if one.reason != Withdrawal.TESTING]
        return found

    def _list(self, inventory: Inventory, *, always: bool = False) -> None:
        """Make the device IDs anew, and notify if they changed, or `always`."""
        listed = dict.fromkeys(self._devices, ()) | self._offered(inventory)
        if listed == self._devices and not always:
            return
        self._devices = listed
        self._notify()

    def _notify(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _offered(self, inventory: Inventory) -> dict[str, tuple[Device, ...]]:
        """Resource -> its device IDs. A resource that only withdrawn GPUs have is left out, unless containers have some of it."""
        offered = self._devices_of(inventory, [gpu for gpu in inventory.gpus if not gpu.withdrawn])
        for resource, ids in self._devices_of(inventory, [gpu for gpu in inventory.gpus if gpu.withdrawn]).items():
            used = frozenset(self.in_use(resource))
            if kept := tuple(one for one in ids if one.id in used):
                offered[resource] = offered.get(resource, ()) + kept
        return self._listed(offered)

    def _devices_of(self, inventory: Inventory, gpus: Sequence[Gpu]) -> dict[str, tuple[Device, ...]]:
        """Shares, whole GPUs, MIG instances and slots of these GPUs."""
        found = devices(replace(inventory, gpus=tuple(gpus)), self.names) if gpus else {}
        for gpu in gpus if self.slots is not None else ():
            for profile, names in self.slots.devices(gpu).items() if self.slots is not None else ():
                more = tuple(
                    Device(name, name, gpu.healthy, -1) for name in names
                )  # which IDs are free is not predicted
                found[self.names.mig(profile)] = (*found.get(self.names.mig(profile), ()), *more)
        return found

    def _listed(self, offered: dict[str, tuple[Device, ...]]) -> dict[str, tuple[Device, ...]]:
        """Without the MIG profiles that are not offered, which are reported once."""
        if EVERY in self._profiles:
            return offered
        mig = {resource: self.names.mig_profile(resource) for resource in offered}
        for profile in mig.values():
            if profile and profile not in self._profiles | self._unlisted:
                self._unlisted.add(profile)
                self.unlisted(profile)
        return {resource: ids for resource, ids in offered.items() if mig[resource] in (None, *self._profiles)}


def _with_conditions(gpu: Gpu, conditions: tuple[GpuCondition, ...]) -> Gpu:
    fit = all(one.state == "degraded" for one in conditions)
    return replace(gpu, healthy=gpu.healthy and fit, conditions=conditions)
