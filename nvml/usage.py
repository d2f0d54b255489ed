"""Which processes hold memory of which card, as the driver counts it. Reads, and decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvml.binding import nv
from nvml.messages import ProcessUsage
from nvml.naming import naming


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
