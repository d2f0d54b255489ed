"""What the arbiter's turns count of all containers together."""

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
    unreported: int = 0
    """Times that a container was found to compute while it said it was idle."""
    decays: int = 0
    """Times that a container's work ended without a word, as the driver saw nothing of it."""
