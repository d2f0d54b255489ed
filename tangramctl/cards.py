"""What NVML says of this machine's cards, and of memory on them that no run accounts for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from nvml.errors import NvmlError
from nvml.probe import probe
from nvml.session import opened
from nvml.usage import processes
from tangramctl.errors import NoGpu
from tangramctl.machine import Machine
from tangramctl.proc import grant_of, start_ticks
from vgpu.inventory import Card, Inventory

MIB: Final = 2**20
REAL_DRIVER: Final = Path("/")
EXAMPLE: Final = Path(__file__).resolve().parents[1] / "examples/04-no-cluster/cards"
"""A description for `--fake`, where this is a source tree."""


@contextmanager
def driver(machine: Machine) -> Iterator[Inventory]:
    """NVML is open inside. Raises NoGpu, in one sentence that says what to do."""
    root = REAL_DRIVER
    if machine.programs is not None:
        os.environ["TANGRAM_FAKE_DRIVER"] = str(machine.driver_socket)
        root = machine.root / "driver"
    try:
        with opened(root):
            inventory = probe(unit_mib=1, access="nvidia")
            if not inventory.cards:
                raise NoGpu("the NVIDIA driver is here and has no GPU: nothing can be shared")
            yield inventory
    except NvmlError as error:
        described = EXAMPLE if EXAMPLE.is_file() else "FILE"
        raise NoGpu(
            f"no NVIDIA GPU can be used on this machine ({error}); to try Tangram without one, give --fake {described}"
        ) from None


def foreign_mib(inventory: Inventory, machine: Machine) -> dict[str, int]:
    """MiB on each card held by processes that belong to no run of this machine's book.

    A process that cannot be seen from here (another pid namespace) is passed over: it may be one of ours.
    """
    ours = str(machine.grants)
    return {card.uuid: _foreign_mib(card, ours) for card in inventory.cards if card.shareable}


def _foreign_mib(card: Card, ours: str) -> int:
    total = 0
    for process in processes(card.uuid):
        grant = grant_of(process.pid)
        if process.used_bytes and start_ticks(process.pid) is not None and not (grant or "").startswith(ours):
            total += process.used_bytes
    return -(-total // MIB)
