"""What the swap policy orders. The arbiter carries it out and reports back by events (`vgpu.memory.swap.events`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grant:
    """The GPU has the memory: lease it. Counted as used from now on."""

    id: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request fails as the driver fails when it is out of memory."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Pause the container on all its GPUs, and move so many bytes of each GPU named to host memory. It ends a `SwapIn` that is not complete."""

    name: str
    gpus: dict[str, int]


@dataclass(frozen=True, slots=True)
class CancelSwapOut:
    """Nothing more of the present `SwapOut` needs to leave. `SwappedOut` follows when nothing more does."""

    name: str


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Bring all that is away back, on all GPUs, as the memory becomes free: `SwapPolicy.room_bytes` says how much may be made now."""

    name: str


@dataclass(frozen=True, slots=True)
class OverLimit:
    """The container is above its guarantee and did not give way, while another waits for memory within that other's guarantee."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stranded:
    """The container's memory cannot come back: the guarantees of others leave no room."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """For the container's status: why it does not swap."""

    name: str
    reason: str


Action = Grant | Refuse | SwapOut | CancelSwapOut | SwapIn | OverLimit | Stranded | Report
