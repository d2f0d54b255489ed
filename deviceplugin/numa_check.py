"""Whether NUMA nodes explain that the kubelet chose devices of other GPUs than a container was assigned."""

from __future__ import annotations

from collections.abc import Iterable

from vgpu.api.inventory import Inventory
from vgpu.api.mig_device import slot_of_device


def misaligned(inventory: Inventory, given: Iterable[str], assigned: Iterable[str]) -> str:
    """A sentence about the NUMA nodes of the GPUs given and assigned, both UUIDs; empty if they are of the same ones, or those are not known.

    Slots on demand name no NUMA node to the kubelet: it never chooses them by one.
    """
    given, assigned = tuple(given), tuple(assigned)
    if any(map(slot_of_device, (*given, *assigned))):
        return ""
    there, expected = _numa_nodes(inventory, given), _numa_nodes(inventory, assigned)
    if not there or not expected or there == expected:
        return ""
    return (
        f"the kubelet's TopologyManager aligned the container to {_spelled(there)}, and what it was assigned is of {_spelled(expected)}: "
        "CPUs or devices changed hands since the pod was placed, or the kubelet's configuration did"
    )


def _numa_nodes(inventory: Inventory, uuids: Iterable[str]) -> set[int]:
    found = {gpu.numa if (gpu := inventory.gpu(uuid)) is not None else -1 for uuid in uuids}
    return set() if -1 in found else found


def _spelled(nodes: set[int]) -> str:
    return f"NUMA node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, sorted(nodes)))}"
