"""What the swapping of a node answers to the rest of the arbiter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vgpu.memory.swap.actions import OverLimit, Report, Stranded

Notice = OverLimit | Stranded | Report
"""Something of a container that an operator or another part of the arbiter must know."""


class Decided(NamedTuple):
    """A request that waited, and is decided now."""

    id: str
    granted: bool
    reason: str
    """Why not; empty if it is granted."""


class Stated(NamedTuple):
    """A process, by its host pid, has so much elastic memory of a GPU."""

    name: str
    pid: int
    gpu: str
    elastic_bytes: int


@dataclass(frozen=True, slots=True)
class GpuSwapStatus:
    """A container's memory on one GPU. Bytes."""

    gpu: str
    away_bytes: int
    guarantee_bytes: int
    limit_bytes: int
    """In all."""
    resident_bytes: int = 0
    """What it has that cannot be swapped."""
    elastic_bytes: int = 0
    """What it has that can be, on the GPU or away."""

    @property
    def excess_bytes(self) -> int:
        """On the GPU above the guarantee; below 0: so much less."""
        return self.present_bytes - self.guarantee_bytes

    @property
    def present_bytes(self) -> int:
        """On the GPU."""
        return self.resident_bytes + self.elastic_bytes - self.away_bytes


@dataclass(frozen=True, slots=True)
class SwapStatus:
    """A container."""

    paused: bool
    """It must not run: some of its memory is away or moves."""
    gpus: tuple[GpuSwapStatus, ...]
    direction: Literal["out", "in"] | None
    unable: str
    """Why it cannot be swapped; empty: it can, or no process has connected yet."""
    waiting: int
    """Requests that wait."""
    paused_s: float = 0.0
    """How long it has been paused."""
    why: str = ""
    """Why it is paused; empty: it is not."""
    over_limit: str = ""
    """Why it is over its limit: it did not give way. Empty: it is not."""
    stranded: str = ""
    """Why its memory cannot come back; empty: it can."""
    pool_full: str = ""
    """Why its requests wait for room in the host pool; empty: none does."""


@dataclass(frozen=True, slots=True)
class GpuSwapFacts:
    """A GPU."""

    gpu: str
    capacity_bytes: int
    """Its memory for containers."""
    ready: bool
    """Its copier takes jobs, and its host pool can be used."""
    moved_bytes: Mapping[Literal["out", "in"], int]
    """What has left it, and what is back with its content, since the arbiter's start."""
