"""Which MIG instances this plugin made, on the node's disk: so that no other one is touched, and none is left over after a crash.

A slot is entered before its instance is made or removed, and again afterwards. What is in the driver and not here was made by somebody else. A record
that cannot be read says nothing about any instance: then none is made and none removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from deviceplugin.grants import checked_file as sealed
from deviceplugin.grants.atomic_file import make_folder
from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import slot_of_device
from vgpu.api.sealed import UNREADABLE
from vgpu.mig.on_demand import Recorded, Step

FILE: Final = "mig-on-demand.json"
WHAT: Final = "record of MIG instances"


class SlotRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One instance."""

    device: str
    """Name of the slot (`vgpu.api.mig_device`)."""
    step: Step
    uuid: str = ""
    """Of the instance, once it is made."""
    answered: str = ""
    """The UUID that the kubelet was answered with. It keeps that for the container's restarts, also where the instance is made again."""


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    boot: str
    slots: tuple[SlotRecord, ...]


_documents = msgspec.json.Decoder(_Document)


class MigRecord:
    """In `folder`. `boot` is the present boot ID: no instance outlives a boot."""

    def __init__(self, folder: Path, boot: str) -> None:
        self.damaged = ""
        """Why the record cannot be read; empty when it can."""
        self._path, self._boot = folder / FILE, boot
        self._slots: dict[str, SlotRecord] = {}

    def load(self) -> None:
        """After a start. What is wrong with the record is in `damaged`."""
        try:
            make_folder(self._path.parent)
            found = sealed.read(self._path, WHAT)
            document = _documents.decode(found.body) if found is not None else _Document(self._boot, ())
            wrong = [one.device for one in document.slots if slot_of_device(one.device) is None]
        except (OSError, BadDocument, NewerVersion, *UNREADABLE) as error:
            self.damaged = f"{self._path} cannot be read: {str(error)[:300]}"
            return
        if wrong:
            self.damaged = f"{self._path} names {wrong[0][:80]!r}: it must be a MIG slot"
            return
        same = document.boot == self._boot
        slots = document.slots if same else tuple(map(_after_boot, document.slots))
        self._slots = {one.device: one for one in slots}

    def get(self, device: str) -> SlotRecord | None:
        """What is recorded of a slot."""
        return self._slots.get(device)

    def all(self) -> tuple[SlotRecord, ...]:
        """Of all GPUs."""
        return tuple(self._slots.values())

    def of_gpu(self, gpu: str) -> Mapping[MigSlot, Recorded]:
        """Slot -> what is recorded, of one GPU."""
        found = {}
        for one in self.all():
            parsed = slot_of_device(one.device)
            if parsed is not None and parsed[0] == gpu:
                found[parsed[1]] = Recorded(one.step, one.uuid)
        return found

    def enter(self, slot: SlotRecord) -> None:
        """On the disk when this returns, also after a loss of power. Raises OSError."""
        self._write({**self._slots, slot.device: slot})

    def remove(self, device: str) -> None:
        """Raises OSError."""
        self._write({key: one for key, one in self._slots.items() if key != device})

    def _write(self, slots: dict[str, SlotRecord]) -> None:
        make_folder(self._path.parent)
        sealed.write(self._path, _Document(self._boot, tuple(slots.values())), durable=True)
        self._slots = slots


def _after_boot(slot: SlotRecord) -> SlotRecord:
    return SlotRecord(slot.device, "lost", answered=slot.answered)
