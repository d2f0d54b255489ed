"""How much a container can ever have of a GPU, whatever others do. Pure.

Its limit in all is not the only bound. What it has above its guarantee must have room in the host pool, or it could not be moved. And no GPU has more
than it has for containers. A request beyond that fails at once: it would wait for nothing. Bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

MIB: Final = 2**20


class RefusedBy(IntEnum):
    """Why a lease is refused. Specified: `refused` of LEASED in protocol.md."""

    NOTHING = 0
    """It is granted."""
    LIMIT = 1
    """The container's own limits, or nothing became free in time."""
    POOL = 2
    GPU = 3


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The most that a container can have of a GPU in all."""

    bytes: int
    by: RefusedBy
    size_bytes: int
    """Of the host pool, or of the GPU's memory for containers."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that the container's limits allow, and that can never be granted."""

    need_bytes: int
    used_bytes: int
    """By all processes of the container."""
    guarantee_bytes: int
    ceiling: Ceiling

    @property
    def text(self) -> str:
        """For the log."""
        has = f"{self.need_bytes // MIB} MiB more than the {self.used_bytes // MIB} MiB that the container has"
        size_mib = self.ceiling.size_bytes // MIB
        if self.ceiling.by is RefusedBy.GPU:
            return f"{has} are more than the {size_mib} MiB that the GPU has for containers"
        return (
            f"{has} are more than its guarantee of {self.guarantee_bytes // MIB} MiB and all {size_mib} MiB of the GPU's host pool: "
            "what is above the guarantee needs room there (burst.hostPool)"
        )


def ceiling(guarantee_bytes: int, pool_bytes: int | None, gpu_bytes: int | None) -> Ceiling | None:
    """The lower of the two bounds; None: neither is known. `pool_bytes`: the whole pool of the GPU, None while it is not ready; `gpu_bytes`: what the GPU
    has for containers if nothing else uses it, None before that was read. Never below the guarantee: placement answers for that."""
    bounds = [Ceiling(guarantee_bytes + pool_bytes, RefusedBy.POOL, pool_bytes)] if pool_bytes is not None else []
    bounds += [Ceiling(max(guarantee_bytes, gpu_bytes), RefusedBy.GPU, gpu_bytes)] if gpu_bytes is not None else []
    return min(bounds, key=lambda one: one.bytes, default=None)
