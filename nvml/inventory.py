"""What GPUs this machine has: an inventory, gathered GPU by GPU.

All GPUs are described side by side. If that fails, as one of them hangs, each is a call of its own, so that one that does not answer keeps no other away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Final

from nvml.errors import NvmlAway, NvmlError
from nvml.queries import Nvml
from vgpu.api.inventory import AccessMode, Gpu, Inventory
from vgpu.health.presence import bus_address, present

FUNCTION_NOT_FOUND: Final = 13
"""NVML_ERROR_FUNCTION_NOT_FOUND, from nvml.h."""


def probe(
    nvml: Nvml,
    *,
    unit_mib: int,
    access: AccessMode,
    last: Inventory | None = None,
    reopened: bool = False,
    on_bus: Collection[str] | None = None,
    withheld: Collection[str] = (),
) -> Inventory:
    """Everything NVML reports of this machine's GPUs. `reopened`, `on_bus`: as `vgpu.health.presence.present` has them. `withheld`: PCI addresses that are
    not open.

    A GPU that does not answer now and did in `last` stands as it was, unhealthy, while it is in the machine. One that never answered is left out. Raises
    NvmlError when no GPU answers and none did before, or NVML as a whole does not.
    """
    counted = nvml.count()
    before = [gpu for gpu in last.gpus if bus_address(gpu.pci) not in withheld] if last and not reopened else []
    gpus: list[Gpu] = []
    silent: list[NvmlError] = []
    had = {at if withheld else gpu.index: gpu.uuid for at, gpu in enumerate(before)}
    known = {index: had.get(index, "") for index in range(counted.count)}
    for index, found in _described(nvml, known):
        if isinstance(found, Gpu):
            gpus.append(found)
        elif found.code == FUNCTION_NOT_FOUND and not known[index]:
            raise found  # the driver is too old for every GPU
        else:
            silent.append(found)
    now = present(last.gpus if last else (), gpus, silent=len(silent), reopened=reopened, on_bus=on_bus)
    if silent and not now.gpus:
        raise silent[0]
    return Inventory(
        _linked(list(now.gpus)), unit_mib=unit_mib, access=access, driver=counted.driver, cuda=counted.cuda
    )


def _described(nvml: Nvml, known: Mapping[int, str]) -> Iterator[tuple[int, Gpu | NvmlError]]:
    """By index. `known`: UUIDs as of before. Raises NvmlAway."""
    try:
        together = nvml.gpus_at(known)
    except NvmlError:
        together = {}
    yield from together.items()
    if together:
        return
    for index, uuid in known.items():
        try:
            yield index, nvml.gpu_at(index, uuid)
        except NvmlAway:
            raise
        except NvmlError as error:
            yield index, error


def _linked(gpus: list[Gpu]) -> tuple[Gpu, ...]:
    """Peers by UUID. Links that end at no GPU (NVSwitches) join every GPU that has such links."""
    by_pci = {gpu.pci: gpu.uuid for gpu in gpus if gpu.pci}
    uuids = {gpu.uuid for gpu in gpus}
    switched = {
        gpu.uuid: sum(n for peer, n in gpu.nvlinks.items() if peer not in by_pci and peer not in uuids) for gpu in gpus
    }
    linked = []
    for gpu in gpus:
        peers = {
            by_pci.get(peer, peer): links for peer, links in gpu.nvlinks.items() if peer in by_pci or peer in uuids
        }
        if switched[gpu.uuid]:
            for other in gpus:
                if other.uuid != gpu.uuid and switched[other.uuid]:
                    peers[other.uuid] = peers.get(other.uuid, 0) + min(switched[gpu.uuid], switched[other.uuid])
        linked.append(replace(gpu, nvlinks=peers))
    return tuple(linked)
