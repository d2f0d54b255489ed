"""Which processes hold memory of which card, as the driver counts it. Reads, and decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvml.binding import nv
from nvml.errors import naming


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Memory of one process on one card or MIG instance. `used_bytes` is None where the driver does not tell."""

    pid: int
    uuid: str
    used_bytes: int | None
    mps: bool = False
    """It is a client of an MPS server: NVML lists those apart."""


def processes(uuid: str) -> tuple[ProcessUsage, ...]:
    """Every process with a context on the card, compute, MPS and graphics, by pid. Pids are the host's. Raises NvmlError."""
    with naming(f"processes of card {uuid}"):
        handle = nv.nvmlDeviceGetHandleByUUID(uuid)
        held: dict[int, int | None] = {}
        computing = _listed(nv.nvmlDeviceGetComputeRunningProcesses, handle)
        clients = _listed(nv.nvmlDeviceGetMPSComputeRunningProcesses, handle)
        for listed in (computing, clients, _listed(nv.nvmlDeviceGetGraphicsRunningProcesses, handle)):
            for process in listed:
                used = process.usedGpuMemory
                before = held.get(process.pid)
                held[process.pid] = used if before is None else max(before, used or 0)
    of_mps = {process.pid for process in clients}
    return tuple(ProcessUsage(pid, uuid, held[pid], pid in of_mps) for pid in sorted(held))


def _listed(listing: Callable[[Any], list[Any]], handle: Any) -> list[Any]:
    try:
        return listing(handle)
    except nv.NVMLError_NotSupported:
        return []


def used_bytes(uuid: str) -> int:
    """Memory in use on the card as a whole, the driver's own included. Raises NvmlError."""
    with naming(f"memory of card {uuid}"):
        return int(nv.nvmlDeviceGetMemoryInfo(nv.nvmlDeviceGetHandleByUUID(uuid)).used)
