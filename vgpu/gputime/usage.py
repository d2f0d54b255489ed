"""The GPU time of one container, and its waiting time by reason. Filled by `vgpu.gputime.scheduler`. Seconds since it joined."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class GpuTimeUsage:
    """See the module."""

    on_s: float = 0.0
    """Running with work: the time that it pays for."""
    burst_s: float = 0.0
    """The part of it above its guarantee."""
    off_s: float = 0.0
    """Suspended with work and credit: it waited for others."""
    capped_s: float = 0.0
    """Suspended with work and without credit: it waited for its own cap."""
    clearing_s: float = 0.0
    """Running with work beside a container that was being suspended for it: it waited for the switch."""
    suspended_s: float = 0.0
    """Suspended, with work or without."""
    suspends: int = 0
    arrivals: int = 0
    """Times that work arrived after idleness."""
