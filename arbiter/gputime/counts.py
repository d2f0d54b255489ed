"""What is counted of the GPU time of all containers together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Since the start, of all containers; what only grows."""

    switches: int = 0
    failures: int = 0
    watchdog_resumes: int = 0
    held_back: int = 0
    """Times that a container had sent more messages than its budget has."""
    bad_packets: int = 0
    unreported_work: int = 0
    """Times that a container was found to do work that it did not report."""
    unreported_ends: int = 0
    """Times that a container's work ended without a report, as the driver saw none of it."""
