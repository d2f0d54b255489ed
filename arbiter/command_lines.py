"""Command lines of processes, for the status. A cache: each is a file of /proc, and a document is requested every 0.8 s."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from arbiter import host
from vgpu.protocol.status import ContainerStatus, ProcessStatus

COMMAND_S: Final = 10.0
"""How long a connected process's command line is cached: some programs change theirs. Guessed."""


class Commands:
    """Of connected processes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read: dict[tuple[str, int, int], tuple[float, str]] = {}
        """Container, pid and pid inside -> time of reading and command line. A pid is not reused within seconds."""

    def of(self, key: str, process: ProcessStatus) -> str:
        """The command line; empty for a process that is gone."""
        if not process.pid_in_container:
            return host.command_of(process.pid)  # not cached: the end of an unconnected process is not noticed
        at_s, identity = self._clock(), (key, process.pid, process.pid_in_container)
        read_s, command = self._read.get(identity, (-inf, ""))
        if not command or at_s - read_s >= COMMAND_S:
            command = host.command_of(process.pid)
            self._read[identity] = at_s, command
        return command

    def forget(self, containers: Iterable[ContainerStatus]) -> None:
        """Drop all processes but those of these containers."""
        there = {(one.key, process.pid, process.pid_in_container) for one in containers for process in one.processes}
        self._read = {identity: read for identity, read in self._read.items() if identity in there}
