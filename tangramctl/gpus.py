"""This machine's GPUs by NVML, and memory on them that no run accounts for."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from nvml.errors import NvmlError
from nvml.inventory import probe
from nvml.messages import ProcessUsage
from nvml.queries import Nvml
from nvml.supervisor import supervised
from tangramctl.errors import NoGpu
from tangramctl.machine import StateRoot
from tangramctl.proc import grant_of, start_ticks
from vgpu.api.inventory import Inventory

MIB: Final = 2**20
REAL_DRIVER: Final = Path("/")
EXAMPLE: Final = Path(__file__).resolve().parents[1] / "examples/04-no-cluster/gpus"
"""A description for `--fake`, where this is a source tree."""


def driver_root(machine: StateRoot) -> Path:
    """Below it lie the driver's libraries."""
    return REAL_DRIVER if machine.programs is None else machine.root / "driver"


@contextmanager
def driver(machine: StateRoot) -> Iterator[tuple[Inventory, Nvml]]:
    """NVML is open inside, in a process of its own. Raises NoGpu, with one sentence on what to do."""
    if machine.programs is not None:
        os.environ["TANGRAM_FAKE_DRIVER"] = str(machine.driver_socket)
    try:
        with supervised(driver_root(machine)) as nvml:
            inventory = probe(nvml, unit_mib=1, access="nvidia")
            if not inventory.gpus:
                raise NoGpu("the NVIDIA driver is here and has no GPU: nothing can be shared")
            yield inventory, nvml
    except NvmlError as error:
        described = EXAMPLE if EXAMPLE.is_file() else "FILE"
        raise NoGpu(
            f"no NVIDIA GPU can be used on this machine ({error}); to try Tangram without one, give --fake {described}"
        ) from None


def usages(inventory: Inventory, nvml: Nvml) -> list[ProcessUsage]:
    """The processes on the GPUs that may be shared. Raises NvmlError."""
    return [usage for gpu in inventory.gpus if gpu.offers_shares for usage in nvml.processes(gpu.uuid)]


def foreign_mib(usages: Iterable[ProcessUsage], grants: Collection[str]) -> dict[str, int]:
    """MiB on each GPU used by processes that were started with none of these grants.

    A process that cannot be seen from here (another pid namespace) is passed over: it may be one of ours. So is one that has ended
    since the driver was queried: its run may be gone from the records.
    """
    held: Counter[str] = Counter()
    for usage in usages:
        if usage.used_bytes and grant_of(usage.pid) not in grants and start_ticks(usage.pid) is not None:
            held[usage.uuid] += usage.used_bytes
    return {uuid: -(-total // MIB) for uuid, total in held.items()}
