"""Counters of the GPU time of all containers together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class GpuTimeCounters:
    """Totals of all containers since the start; they never decrease."""

    switches: int = 0
    failures: int = 0
    watchdog_resumes: int = 0
    delayed_reads: int = 0
    """Times that a container sent more messages than its budget allows."""
    bad_packets: int = 0
    unreported_work: int = 0
    """Times that the arbiter detected unreported work of a container."""
    unreported_ends: int = 0
    """Times that a container's work ended without a report, because the driver counted none of it."""
