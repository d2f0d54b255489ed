"""Memory above the guarantee: how much it is, what of it is in host memory and why, for `ps`, `top` and `explain`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from vgpu.protocol.status import SwapStatus

GIB: Final = 2**30


class GpuSizes(Protocol):
    """A container's memory on one GPU. Bytes."""

    @property
    def leased_bytes(self) -> int | None:
        """What it has, in host memory or not; None = unknown."""

    @property
    def away_bytes(self) -> int:
        """The part in host memory."""


class GpuCharges(Protocol):
    """What is charged to a container on one GPU. Bytes."""

    @property
    def leased_bytes(self) -> int: ...

    @property
    def context_bytes(self) -> int: ...

    @property
    def shared_bytes(self) -> int: ...

    @property
    def guarantee_bytes(self) -> int | None: ...


def excess_of(gpu: GpuCharges) -> int | None:
    """What a container has above its guarantee, on the GPU or in host memory; None = no arbiter reports the guarantee."""
    if gpu.guarantee_bytes is None:
        return None
    return max(0, gpu.leased_bytes + gpu.context_bytes + gpu.shared_bytes - gpu.guarantee_bytes)


def state_of(name: str, swap: SwapStatus | None, gpus: Sequence[GpuSizes]) -> list[str]:
    """Lines on a container that is paused, or cannot be."""
    if swap is None:
        return []
    lines = []
    if swap.paused:
        lines.append(f"{name} is paused for {clock(swap.paused_s)}: {paused_text(swap, gpus)}")
    if swap.unable:
        lines.append(f"{name} gets no memory above its guarantee: {swap.unable}")
    elif swap.no_pool:
        lines.append(f"{name} gets no memory above its guarantee: the host pool is not ready: {swap.no_pool}")
    if swap.waiting and not swap.paused:
        requests = "1 request waits" if swap.waiting == 1 else f"{swap.waiting} requests wait"
        lines.append(
            f"{name}: {requests} for memory: {swap.pool_full}"
            if swap.pool_full
            else f"{name}: {requests} for memory of other containers"
        )
    return lines


def ends_of(name: str, swap: SwapStatus | None) -> list[str]:
    """Lines on a container that is over its limit, or stranded."""
    if swap is None:
        return []
    lines = []
    if swap.over_limit:
        lines.append(f"! {name} is over its limit: {swap.over_limit} (burst.overLimit: {swap.over_limit_action})")
    if swap.stranded:
        lines.append(f"! {name}: its memory cannot come back: {swap.stranded} (burst.stranded: {swap.stranded_action})")
    return lines


def paused_text(swap: SwapStatus, gpus: Sequence[GpuSizes]) -> str:
    """`11.8 of 14.9 GiB are in host memory; waits for its turn`."""
    away_bytes = sum(gpu.away_bytes for gpu in gpus)
    if not away_bytes:
        return swap.why
    all_bytes = sum(gpu.leased_bytes or 0 for gpu in gpus)
    return f"{away_bytes / GIB:.1f} of {all_bytes / GIB:.1f} GiB are in host memory; {swap.why}"


def clock(seconds: float) -> str:
    """Time for a person: `12.3s`, `4m05s`, `7h03m`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    if seconds < 3600:
        return f"{int(seconds) // 60}m{int(seconds) % 60:02}s"
    return f"{int(seconds) // 3600}h{int(seconds) % 3600 // 60:02}m"
