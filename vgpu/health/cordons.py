"""What becomes of a cordoned GPU: which state it is in, and whether NVML may have it open. Pure.

cordoned       an operator cordoned it. Pods that have it stay
released       nobody has it, and no process of Tangram has it open: it may be reset or taken out
not-released   nobody has it, and NVML cannot leave it out: the node does not show its PCI address
testing        it is no longer cordoned, or no longer unhealthy, and is tried before pods get it. Not one that `node.gpus` does not select
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from vgpu.api.cordon import Cordon
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import CORDONED, NOT_RELEASED, RELEASED, TESTING, CordonState, Inventory


@dataclass(frozen=True, slots=True)
class Opened:
    """Which cordoned GPUs processes of Tangram have open."""

    closed: frozenset[str] = frozenset()
    """UUIDs of those that none has open."""
    stuck: frozenset[str] = frozenset()
    """UUIDs of those that NVML cannot leave out."""

    def state(self, uuid: str) -> CordonState:
        """Of a cordoned GPU that nobody has."""
        return RELEASED if uuid in self.closed else NOT_RELEASED if uuid in self.stuck else CORDONED


@dataclass(frozen=True, slots=True)
class CordonPlan:
    """For the GPUs of a node."""

    states: Mapping[str, CordonState]
    """By UUID, also of GPUs that are away now; others are offered as their health allows."""
    withheld: frozenset[str]
    """UUIDs of GPUs of the inventory that nothing of ours may have open."""


def held_gpus(inventory: Inventory, held: Iterable[AssignedGpu]) -> frozenset[str]:
    """UUIDs of the GPUs that these parts lie on. Those that the node does not have are left out."""
    found = (inventory.gpu(one.uuid) for one in held)
    return frozenset(gpu.uuid for gpu in found if gpu is not None)


def plan(
    inventory: Inventory,
    cordons: Mapping[str, Cordon],
    held: Collection[str],
    opened: Opened,
    *,
    known: bool,
    withdrawn: Collection[str] = (),
) -> CordonPlan:
    """`held`: GPUs that pods, or processes of pods that are gone, have. `known`: are the pods known? `withdrawn`: what had a state before: a GPU that is
    away keeps one, so that no pod gets it between its return and its self-test."""
    here = {gpu.uuid for gpu in inventory.gpus}
    states: dict[str, CordonState] = dict.fromkeys(set(withdrawn) - here, TESTING) | dict.fromkeys(cordons, CORDONED)
    for gpu in inventory.gpus:
        if gpu.uuid in cordons:
            free = known and gpu.uuid not in held
            states[gpu.uuid] = opened.state(gpu.uuid) if free else CORDONED
        elif gpu.selected and (
            gpu.cordon or (gpu.withdrawn and gpu.uuid in withdrawn)
        ):  # others are no business of the self-test: it would not be made
            states[gpu.uuid] = TESTING
    withheld = frozenset(uuid for uuid in here if uuid in cordons and known and uuid not in held)
    return CordonPlan(states, withheld)


def recovered(before: Inventory, after: Inventory) -> frozenset[str]:
    """UUIDs of GPUs that were unhealthy and are not, or are away: these are tried when they are back."""
    has = {gpu.uuid: gpu for gpu in after.gpus}
    was = (gpu.uuid for gpu in before.gpus if gpu.state == "unhealthy")
    return frozenset(uuid for uuid in was if uuid not in has or has[uuid].healthy)


def not_shown(withdrawn: Iterable[str], shown: Iterable[Inventory] | None) -> frozenset[str]:
    """UUIDs of `withdrawn` for which some of these inventories does not say that the GPU is to be tried before pods get it; None = any inventory may stand."""
    if shown is None:
        return frozenset(withdrawn)
    says = [frozenset(gpu.uuid for gpu in one.gpus if gpu.cordon or gpu.state == "unhealthy") for one in shown]
    return frozenset(uuid for uuid in withdrawn if not all(uuid in of for of in says))
