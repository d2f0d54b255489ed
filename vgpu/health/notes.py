"""What changed between two inventories of a node, in sentences for its operator. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from vgpu.api.coherent import why_whole_only
from vgpu.api.inventory import RELEASED, WITHDRAWN, Gpu, GpuCondition, HealthState, Inventory, Withdrawal

ADDED: Final = "GpuAdded"
REMOVED: Final = "GpuRemoved"
MOVED: Final = "GpuMoved"
GPU_WITHDRAWN: Final = "GpuWithdrawn"
GPU_OFFERED: Final = "GpuOffered"
GPU_WHOLE_ONLY: Final = "GpuWholeOnly"
GPU_UNCORDONED: Final = "GpuUncordoned"
SILENT: Final = frozenset({Withdrawal.NOT_SELECTED})
"""The operator's own choice is no news."""
CORDON_NOTES: Final[dict[str, tuple[str, str]]] = {
    Withdrawal.CORDONED: ("GpuCordoned", "is cordoned: it gets no new pods"),
    Withdrawal.NOT_RELEASED: (
        "GpuNotReleased",
        "is not released: no pod has it, but NVML cannot leave it out, as this node does not show the PCI addresses of its GPUs. To reset it, release all GPUs of the node",
    ),
    Withdrawal.RELEASED: ("GpuReleased", "is released: no pod has it, and no process of Tangram has it open"),
    Withdrawal.TESTING: ("GpuSelfTest", "is tried before pods get it again"),
}
"""Reason of a withdrawal -> reason of the Event, and what it says."""
STATE_REASONS: Final[dict[HealthState, str]] = {
    "healthy": "GpuHealthy",
    "degraded": "GpuDegraded",
    "unhealthy": "GpuUnhealthy",
    "unmonitored": "GpuUnmonitored",
}


@dataclass(frozen=True, slots=True)
class Note:
    """One change of one GPU. `reason` is the Event's."""

    uuid: str
    reason: str
    text: str
    level: Literal["Normal", "Warning"] = "Warning"


def changes(before: Inventory | None, after: Inventory) -> Iterator[Note]:
    """By GPU. `before` is None at the start of the program: then only what is wrong is worth a note."""
    had = {gpu.uuid: gpu for gpu in before.gpus} if before is not None else {}
    has = {gpu.uuid: gpu for gpu in after.gpus}
    for uuid, gpu in had.items():
        if uuid not in has:
            yield Note(
                uuid,
                REMOVED,
                f"{_named(gpu)} is no longer in this node: containers that have a share of it cannot use it",
            )
    for uuid, gpu in has.items():
        earlier = had.get(uuid)
        if before is not None and earlier is None:
            yield Note(uuid, ADDED, f"{_named(gpu)} was added to this node", "Normal")
        if earlier is not None and earlier.pci != gpu.pci:
            yield Note(uuid, MOVED, f"{_named(gpu)} was at {earlier.pci or 'an unknown address'} before", "Normal")
        if gpu.whole_only and (earlier is None or earlier.coherent != gpu.coherent):
            yield Note(uuid, GPU_WHOLE_ONLY, _of_coherent(gpu))
        yield from _of_withdrawal(earlier, gpu)
        yield from _of_health(earlier, gpu)


def _of_coherent(gpu: Gpu) -> str:
    remedy = ". In the driver's CDMM mode it is shared" if gpu.coherent == "numa" else ""
    return f"{_named(gpu)} is given whole only, and not shared: {why_whole_only(gpu.coherent)}, so no memory limit is enforced on it{remedy}"


def _of_withdrawal(before: Gpu | None, gpu: Gpu) -> Iterator[Note]:
    """New reasons, new words of a reason (another plugin offers it too), or none any more."""
    had = before.withdrawn if before is not None else ()
    known = {(one.reason, one.message) for one in had}
    for one in gpu.withdrawn:
        if one.reason not in SILENT and (one.reason, one.message) not in known:
            yield _of_reason(gpu, one)
    if had and gpu.offered:  # of one that failed its self-test its health says why pods do not get it
        if all(one.reason in CORDON_NOTES for one in had):
            yield Note(gpu.uuid, GPU_UNCORDONED, f"{_named(gpu)} may be used by pods again", "Normal")
        else:
            yield Note(gpu.uuid, GPU_OFFERED, f"{_named(gpu)} is offered to new pods", "Normal")


def _of_reason(gpu: Gpu, one: GpuCondition) -> Note:
    level: Literal["Normal", "Warning"]
    if one.reason in CORDON_NOTES:
        event, says = CORDON_NOTES[one.reason]
        level = "Warning" if one.reason == Withdrawal.NOT_RELEASED else "Normal"
        return Note(gpu.uuid, event, f"{_named(gpu)} {says}{f' ({one.message})' if one.message else ''}", level)
    level = "Normal" if one.reason == Withdrawal.MIG_CONFIG else "Warning"
    return Note(gpu.uuid, GPU_WITHDRAWN, f"{_named(gpu)} is not offered to new pods: {one}", level)


def _of_health(before: Gpu | None, gpu: Gpu) -> Iterator[Note]:
    """A state that changed, or new conditions of the same state."""
    known = [one for one in before.conditions if one.state != WITHDRAWN] if before is not None else []
    standing = [one for one in gpu.conditions if one.state != WITHDRAWN]
    state = before.state if before is not None else "healthy"
    reasons = {one.reason for one in known}
    fresh = [one for one in standing if one.reason not in reasons]
    if (gpu.state == state and not fresh) or (not standing and _closed(gpu, known)):
        return
    if gpu.state == "healthy":
        yield Note(gpu.uuid, STATE_REASONS["healthy"], f"{_named(gpu)} is healthy again", "Normal")
        return
    why = "; ".join(map(str, fresh or standing)) or "it did not answer the last probe"
    yield Note(gpu.uuid, STATE_REASONS[gpu.state], f"{_named(gpu)} is {gpu.state}: {why}")


def _closed(gpu: Gpu, known: Collection[GpuCondition]) -> bool:
    """Does NVML leave it out, or will or did so until it is opened anew? That is no trouble of the GPU."""
    may_be = bool(gpu.cordon) or any(one.reason == Withdrawal.MIG_CONFIG for one in gpu.withdrawn)
    return gpu.cordon == RELEASED or (may_be and not known)


def _named(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.uuid}, {gpu.model}{f', {gpu.pci}' if gpu.pci else ''})"
