"""Whether all MIG instances of a pod fit a node together, and which it then gets.

Declared instances come first: they are of use to no other profile. Slots of GPUs on demand (`mig_slots`) are for the rest.

Units and shapes as in `fleet`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vgpu.api.grant import AssignedGpu
from vgpu.api.mig_device import slot_device, slot_mib
from vgpu.api.request import FULL_CORE_PERCENT
from vgpu.scheduling.fleet import Bools
from vgpu.scheduling.mig_instances import InstanceCounts, choose
from vgpu.scheduling.mig_slots import fit_together, slots_for
from vgpu.scheduling.mig_stock import NONE
from vgpu.scheduling.usable_gpus import UsableGpus


def fits_mig(view: UsableGpus, wanted: Mapping[str, int], counts: Mapping[str, InstanceCounts]) -> Bools:
    """(nodes,) whether all instances fit. `wanted`: profile -> instances."""
    fits = view.is_candidate.copy()
    for profile, instances in wanted.items():
        fits &= counts[profile].enough(instances)
    if len(wanted) < 2 or not view.fleet.stock.on_demand:
        return fits
    number = view.fleet.stock.number[:, view.columns]
    declared = {profile: np.where(number == NONE, counts[profile].free, 0).sum(axis=0) for profile in wanted}
    needs = sum((declared[profile] < instances).astype(np.int32) for profile, instances in wanted.items())
    for at in np.flatnonzero(fits & (needs > 1)).tolist():
        lacking = {profile: max(0, instances - int(declared[profile][at])) for profile, instances in wanted.items()}
        lacking = {profile: count for profile, count in lacking.items() if count}
        if view.is_narrowed(at):
            fits[at] = slots_for(view.fleet, view.slots_on(view.names[at]), lacking) is not None
        else:
            there = [one for one in number[:, at].tolist() if one != NONE]
            numbers = [view.fleet.stock.emptied(one) for one in there] if view.emptied else there
            fits[at] = fit_together(view.fleet, numbers, lacking)
    return fits


def assigned_mig(view: UsableGpus, node: str, wanted: Mapping[str, int]) -> dict[str, list[AssignedGpu]]:
    """Profile -> instances and slots, on a node on which they fit."""
    found, lacking = dict[str, list[AssignedGpu]](), dict[str, int]()
    for profile, instances in wanted.items():
        found[profile] = [
            AssignedGpu(instance.uuid, gpu.index, instance.mib, FULL_CORE_PERCENT, "mig", profile)
            for gpu, instance in choose(view.instances_on(node, profile), instances)
        ]
        if len(found[profile]) < instances:
            lacking[profile] = instances - len(found[profile])
    for one, slot in (slots_for(view.fleet, view.slots_on(node), lacking) or ()) if lacking else ():
        mib = slot_mib(one.gpu.mib, one.table, slot.profile)
        name = slot_device(one.gpu.uuid, slot)
        found[slot.profile].append(AssignedGpu(name, one.gpu.index, mib, FULL_CORE_PERCENT, "mig", slot.profile))
    return found
