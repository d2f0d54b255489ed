"""What changed between two inventories of a node, in sentences for its operator. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from vgpu.api.inventory import CORDONED, NOT_RELEASED, RELEASED, TESTING, Gpu, GpuCondition, HealthState, Inventory

ADDED: Final = "GpuAdded"
REMOVED: Final = "GpuRemoved"
MOVED: Final = "GpuMoved"
CORDON_REASONS: Final[dict[str, str]] = {
    CORDONED: "GpuCordoned", NOT_RELEASED: "GpuNotReleased", RELEASED: "GpuReleased", TESTING: "GpuSelfTest", "": "GpuUncordoned",
}  # fmt: skip
_CORDON_TEXTS: Final[dict[str, str]] = {
    CORDONED: "is cordoned: it gets no new pods",
    NOT_RELEASED: "is not released: no pod has it, but NVML cannot leave it out, as this node does not show the PCI addresses of its GPUs. To reset it, release all GPUs of the node",
    RELEASED: "is released: no pod has it, and no process of Tangram has it open",
    TESTING: "is tried before pods get it again",
    "": "may be used by pods again",
}
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
        if gpu.cordon != (earlier.cordon if earlier is not None else "") and _worth_a_note(gpu):
            yield Note(
                uuid, CORDON_REASONS[gpu.cordon], f"{_named(gpu)} {_CORDON_TEXTS[gpu.cordon]}",
                "Warning" if gpu.cordon == NOT_RELEASED else "Normal",
            )  # fmt: skip
        yield from _of_health(earlier, gpu)


def _of_health(before: Gpu | None, gpu: Gpu) -> Iterator[Note]:
    """A state that changed, or new conditions of the same state."""
    known = before.conditions if before is not None else ()
    state = before.state if before is not None else "healthy"
    reasons = {one.reason for one in known}
    fresh = [one for one in gpu.conditions if one.reason not in reasons]
    if (gpu.state == state and not fresh) or (not gpu.conditions and _closed(gpu, known)):
        return
    if gpu.state == "healthy":
        yield Note(gpu.uuid, STATE_REASONS["healthy"], f"{_named(gpu)} is healthy again", "Normal")
        return
    why = (
        "; ".join(f"{one.reason}: {one.message}" for one in (fresh or gpu.conditions))
        or "it did not answer the last probe"
    )
    yield Note(gpu.uuid, STATE_REASONS[gpu.state], f"{_named(gpu)} is {gpu.state}: {why}")


def _worth_a_note(gpu: Gpu) -> bool:
    """A GPU that failed its self-test is no longer tried, and pods do not get it: its health says why."""
    return gpu.cordon in CORDON_REASONS and (bool(gpu.cordon) or gpu.healthy)


def _closed(gpu: Gpu, known: tuple[GpuCondition, ...]) -> bool:
    """Does NVML leave it out, or will or did so until it is opened anew? That is no trouble of the GPU."""
    return gpu.cordon == RELEASED or (bool(gpu.cordon) and not known)


def _named(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.uuid}, {gpu.model}{f', {gpu.pci}' if gpu.pci else ''})"
