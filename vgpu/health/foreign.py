"""Which of the node's GPUs the device IDs of other plugins name. Pure.

NVIDIA's device plugin uses the UUID of a GPU or MIG instance as the ID, and `UUID::n` where it is shared out (time-slicing, MPS). Other forms are seen
too: the index (`0`, MIG `0:3`), as in that plugin's older versions, and `nvidia0`, `nvidia0/vgpu1`, as in the plugin of Google's clusters. NVIDIA's DRA
driver names UUIDs in the attributes of its ResourceSlices.

A UUID names a GPU whatever the resource is called. A number could be anything, so it counts for NVIDIA's own resources only. There an ID that cannot be
understood names every GPU: which one it means is not known, and two plugins must not have one GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from vgpu.api.inventory import Inventory

DRA_DRIVER: Final = "gpu.nvidia.com"
"""The name of NVIDIA's DRA driver, from its releases."""

_NVIDIA: Final = re.compile(r"nvidia\.com/(?:gpu|gpu\..+|mig-.+)\Z")
_UUID: Final = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_INDEX: Final = re.compile(r"(?:nvidia)?(\d{1,3})(?:[:/].*)?\Z")


@dataclass(frozen=True, slots=True)
class ForeignDevice:
    """A device that somebody else offers or has given away."""

    by: str
    """The resource, or the driver of a ResourceSlice."""
    id: str


def is_nvidia(resource: str) -> bool:
    """Is it a resource of GPUs of NVIDIA's device plugin?"""
    return _NVIDIA.match(resource) is not None


def may_be_gpu(device: ForeignDevice) -> bool:
    """Could `gpus_named` find a GPU for it?"""
    return is_nvidia(device.by) or _UUID.search(device.id) is not None


def gpus_named(device: ForeignDevice, inventory: Inventory) -> Iterator[str]:
    """UUIDs of the node's GPUs, perhaps some twice."""
    uuids = list(_UUID.finditer(device.id))
    for found in uuids:
        gpu = inventory.gpu(found[0])
        if gpu is not None:
            yield gpu.uuid
        elif found[1] == "MIG":  # made since the last probe: it may be on any GPU in MIG mode
            yield from (one.uuid for one in inventory.gpus if one.mig)
    if uuids or not (is_nvidia(device.by) or device.by == DRA_DRIVER):
        return
    number = _INDEX.match(device.id.partition("::")[0])
    by_index = {gpu.index: gpu.uuid for gpu in inventory.gpus}
    if number is not None and int(number[1]) in by_index:
        yield by_index[int(number[1])]
    else:
        yield from (gpu.uuid for gpu in inventory.gpus)


def offered_by_others(devices: Iterable[ForeignDevice], inventory: Inventory) -> dict[str, frozenset[str]]:
    """UUID of a GPU -> who else offers it or has given it away, as `ForeignDevice.by`."""
    found: dict[str, set[str]] = {}
    for device in devices:
        for uuid in gpus_named(device, inventory):
            found.setdefault(uuid, set()).add(device.by)
    return {uuid: frozenset(by) for uuid, by in found.items()}
