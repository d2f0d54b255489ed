"""How much memory of a GPU is in use, and which processes hold it, as the driver counts both. Reads, and decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvml.binding import nv
from nvml.messages import ProcessUsage
from nvml.naming import naming


def processes(uuid: str) -> tuple[ProcessUsage, ...]:
    """Every process with a context on the GPU, compute, MPS and graphics, by pid. Pids are the host's. Raises NvmlError."""
    with naming(f"processes of GPU {uuid}"):
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


def used_bytes(uuid: str) -> int | None:
    """Memory of the GPU or MIG instance that is in use, without what the driver reserves for itself; None where the driver does not tell.

    Version 2 of the call, which drivers have from R510 on, counts both apart; version 1 counts them as one on some drivers and not on others, so it is
    not asked. Where the GPU's memory is a NUMA node of the machine (Grace Hopper), the kernel's own use of it is in the number: that is no answer
    either.
    """
    with naming(f"used memory of GPU {uuid}"):
        handle = nv.nvmlDeviceGetHandleByUUID(uuid)
    if _is_numa_node(handle):
        return None
    try:
        return int(nv.nvmlDeviceGetMemoryInfo(handle, version=nv.nvmlMemory_v2).used)
    except nv.NVMLError:
        return None


def _is_numa_node(handle: Any) -> bool:
    try:
        nv.nvmlDeviceGetNumaNodeId(handle)
    except nv.NVMLError:
        return False
    return True


def _listed(listing: Callable[[Any], list[Any]], handle: Any) -> list[Any]:
    try:
        return listing(handle)
    except nv.NVMLError_NotSupported:
        return []
