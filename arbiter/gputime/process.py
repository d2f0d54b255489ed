"""One process of a container, as it says itself: whether it has work, and its channels on each GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Final

from arbiter.gputime.channels import ChannelGroup, Runs

PROCESSES_LIMIT: Final = 1024
"""Of one container with a connection for GPU time. As for leases."""
CHANNEL_GROUPS_LIMIT: Final = 128
"""Of one process, as many as the library reports. Each keeps a descriptor open here."""
ALL_CHANNEL_GROUPS_LIMIT: Final = 1024
"""Of one container."""


@dataclass(slots=True)
class Process:
    """One connection for GPU time."""

    pid: int
    pid_in_container: int = 0
    working: bool = False
    kernels_only: bool = False
    """Of what it launched since it was idle: no copy, fill or wait, which the driver's count does not show."""
    drained: bool = False
    """What it has to do waits at the gate, and nothing of it is on the GPU."""
    yields: bool = False
    began_s: float = inf
    """When its last work began."""
    worked_off: bool = False
    """Its work began when the container had been suspended for long."""
    resuming_until_s: float = -inf
    """It is about to resume its own channels, and nothing follows from its word until it has, or until then."""
    channel_groups: dict[tuple[int, int], ChannelGroup] = field(default_factory=dict)
    """By GPU of the grant and client."""

    @property
    def runs(self) -> bool:
        """May any of its channels run?"""
        return any(channel_group.runs is not Runs.OFF for channel_group in self.channel_groups.values())


def is_full(process: Process, processes: Iterable[Process]) -> bool:
    """May the process have no more channel groups, for itself or for all of its container?"""
    return (
        len(process.channel_groups) >= CHANNEL_GROUPS_LIMIT
        or sum(len(one.channel_groups) for one in processes) >= ALL_CHANNEL_GROUPS_LIMIT
    )
