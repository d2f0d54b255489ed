"""One process of a container, by its own reports: whether it has work, and its channels on each GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Final

from arbiter.gputime.channels import ChannelGroup, ChannelState

PROCESSES_LIMIT: Final = 1024
"""Processes of one container with a connection for GPU time. As for leases."""
CHANNEL_GROUPS_LIMIT: Final = 128
"""Channel groups of one process, as many as the library reports. Each keeps a descriptor open in the arbiter."""
ALL_CHANNEL_GROUPS_LIMIT: Final = 1024
"""Of one container."""


@dataclass(slots=True)
class GpuTimeProcess:
    """One connection for GPU time."""

    pid: int
    pid_in_container: int = 0
    working: bool = False
    kernels_only: bool = False
    """Since it was idle it launched no copy, fill or wait, which the driver's count does not show."""
    drained: bool = False
    """Its work waits at the gate, and none of it is on the GPU."""
    yields: bool = False
    began_s: float = inf
    """When its last work began."""
    worked_off: bool = False
    """Its work began when the container had been suspended for long."""
    resuming_until_s: float = -inf
    """It is about to resume its own channels: its reports are no evidence until it has done so, or until this time."""
    channel_groups: dict[tuple[int, int], ChannelGroup] = field(default_factory=dict)
    """By GPU of the grant and client."""

    @property
    def runs(self) -> bool:
        """Whether any of its channels may run."""
        return any(channel_group.runs is not ChannelState.OFF for channel_group in self.channel_groups.values())


def is_full(process: GpuTimeProcess, processes: Iterable[GpuTimeProcess]) -> bool:
    """Whether the process may have no more channel groups, by its own limit or its container's."""
    return (
        len(process.channel_groups) >= CHANNEL_GROUPS_LIMIT
        or sum(len(one.channel_groups) for one in processes) >= ALL_CHANNEL_GROUPS_LIMIT
    )
