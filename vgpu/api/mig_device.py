"""A MIG slot on demand by name: `<GPU UUID>-<profile>-<start>`, such as `GPU-…-1g.10gb.me-3`.

The name stands for an instance that may not exist yet. It is the kubelet's device ID, the ledger's key, and the `uuid` of an `AssignedGpu` in the
assignment. The UUID of the instance is known from Allocate on.

Units
    mib    memory of an instance, MiB: its part of the GPU's memory slices, rounded down; the driver keeps some of it
    start  first memory slice
"""

from __future__ import annotations

import re
from typing import Final

from vgpu.api.mig import MigSlot, MigTable, is_profile
from vgpu.api.uuids import UUID_LENGTH, kind_of_uuid

DEVICE_ID_LIMIT: Final = 63
"""Characters of a device ID. Specified by the kubelet's checkpoint and CDI names."""

_START = re.compile(r"(?:0|[1-9][0-9]?)\Z")


def slot_device(gpu_uuid: str, slot: MigSlot) -> str:
    """The name of this slot of a GPU. Raises ValueError when no reader would take it for one."""
    text = f"{gpu_uuid}-{slot.profile}-{slot.start}"
    if slot_of_device(text) != (gpu_uuid, slot):
        raise ValueError(f"{text[:80]!r} names no MIG slot: it must be <GPU UUID>-<profile>-<start>")
    return text


def slot_of_device(text: str) -> tuple[str, MigSlot] | None:
    """(GPU UUID, slot) that the name stands for; None when it is no such name. Whether the GPU has such a slot is not checked."""
    uuid, (profile, _, start) = text[:UUID_LENGTH], text[UUID_LENGTH + 1 :].rpartition("-")
    if len(text) > DEVICE_ID_LIMIT or text[UUID_LENGTH : UUID_LENGTH + 1] != "-" or kind_of_uuid(uuid) != "GPU":
        return None
    return (uuid, MigSlot(int(start), profile)) if is_profile(profile) and _START.match(start) else None


def slot_mib(gpu_mib: int, table: MigTable, profile: str) -> int:
    """Memory of an instance of this profile before it exists. Raises KeyError for a profile that the table does not have."""
    return gpu_mib * table.by_name[profile].memory // table.memory
