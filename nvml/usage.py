"""What the driver counts of a GPU: memory in use, the processes that use it, and those that keep its multiprocessors busy. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from nvml import handles
from nvml.binding import nv
from nvml.messages import WHOLE, Busy, MemoryUse, ProcessUsage
from nvml.naming import naming

TRIES: Final = 3
"""Of a list of samples that grows meanwhile. Guessed."""


def processes(uuid: str) -> tuple[ProcessUsage, ...]:
    """Every process with a context on the GPU, compute, MPS and graphics, by pid. Pids are the host's. Raises NvmlError."""
    with naming(f"processes of GPU {uuid}"):
        handle = handles.of_uuid(uuid)
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


def memory(uuid: str) -> MemoryUse | None:
    """Memory of the GPU or MIG instance, without what the driver reserves for itself; None where the driver does not report it.

    Version 2 of the call, which drivers have from R510 on, counts both apart; version 1 counts them as one on some drivers and not on others, so it is
    not called. Where the GPU's memory is a NUMA node of the machine (Grace Hopper), the kernel's own use of it is in the number: that is no answer
    either.
    """
    with naming(f"used memory of GPU {uuid}"):
        handle = handles.of_uuid(uuid)
    if _is_numa_node(handle):
        return None
    try:
        info = nv.nvmlDeviceGetMemoryInfo(handle, version=nv.nvmlMemory_v2)
    except nv.NVMLError:
        return None
    return MemoryUse(int(info.used), int(info.total - info.reserved))


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


def busy(uuid: str, since_us: int, until_us: int) -> Busy:
    """The processes that computed on a GPU after `since_us`, 0 = in all that the driver remembers. Raises NvmlError.

    Samples of after `until_us` are of a clock that was set back, and left out. Empty where the driver does not count by process,
    as for a GPU in MIG mode.
    """
    with naming(f"utilisation of GPU {uuid}"):
        handle = handles.of_uuid(uuid)
        try:
            samples = _samples(handle, since_us)
        except nv.NVMLError_NotFound:
            return Busy({}, since_us)
        except nv.NVMLError_NotSupported:
            return Busy({}, since_us, by_process=False)
    fresh = [sample for sample in samples if since_us < sample.timeStamp <= until_us]
    percent = {int(s.pid): int(s.smUtil) for s in fresh if 0 < s.smUtil <= WHOLE}
    return Busy(percent, max((int(sample.timeStamp) for sample in fresh), default=since_us))


def _samples(handle: Any, since_us: int) -> Any:
    """The binding reads how many there are and then so many; there may be more by then."""
    for _ in range(TRIES - 1):
        with suppress(nv.NVMLError_InsufficientSize):
            return nv.nvmlDeviceGetProcessUtilization(handle, since_us)
    return nv.nvmlDeviceGetProcessUtilization(handle, since_us)
