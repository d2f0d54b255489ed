"""What one container got of the GPUs' time, and what it waited for. Filled by `vgpu.gputime.scheduler`. Seconds since it joined."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Usage:
    """See the module."""

    on_s: float = 0.0
    """On with work: what is paid for."""
    off_s: float = 0.0
    """Off with work and credit: it waited for others."""
    capped_s: float = 0.0
    """Off with work and without credit: it waited for its own cap."""
    clearing_s: float = 0.0
    """Running with work beside a container that was being suspended for it: it waited for the switch."""
    suspended_s: float = 0.0
    """Off, with work or without."""
    suspends: int = 0
    arrivals: int = 0
    """Times that work came after idleness."""
