"""Which processes of a container the arbiter never suspends, and why.

A process without the library's thread could not be resumed if the arbiter died. The work of a client of MPS runs on the server's channels,
whatever channels the client has: NVML lists those processes separately, and a server also has a known name. NVML's list for a GPU is valid
until NVML answers for that GPU again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from arbiter.connection import Connection
from arbiter.memory.meter import MemoryReading
from vgpu.api.enforcement import Reason, reported

THREADLESS: Final = (
    "a process could not start the library's helper thread, so nothing could resume it if the arbiter died"
)
MPS_CLIENT: Final = "a process is a client of an MPS server, on whose channels its work runs"


class _OnGpu(NamedTuple):
    server: bool
    clients: frozenset[int]


class ExemptProcesses:
    """The exempt processes of one container."""

    def __init__(self) -> None:
        self.moved = False
        """Whether `changed` is to be called again."""
        self._gpus: dict[str, _OnGpu] = {}
        self._pids: dict[int, str] = {}

    @property
    def mps(self) -> bool:
        """Whether an MPS server runs on one of its GPUs."""
        return any(gpu.server or gpu.clients for gpu in self._gpus.values())

    def is_mps_client(self, pid: int) -> bool:
        """Whether the process with this host pid is a client of an MPS server."""
        return any(pid in gpu.clients for gpu in self._gpus.values())

    def evaluate(self, uuids: Iterable[str], reading: MemoryReading) -> None:
        """Evaluate a reading of NVML. `uuids`: the GPUs of the grant."""
        gpus = {}
        for uuid in uuids:
            if uuid in reading.gpus:
                pids = reading.gpus[uuid]
                server = any(reading.seen[pid].mps_server for pid in pids)
                gpus[uuid] = _OnGpu(server, reading.mps_clients & pids.keys())
            elif uuid in self._gpus:
                gpus[uuid] = self._gpus[uuid]
        self._gpus = gpus
        self.moved = True

    def changed(self, connections: Iterable[Connection]) -> dict[int, str] | None:
        """Host pids and why; None if they are the same as at the last call."""
        if not self.moved:
            return None
        self.moved = False
        pids = {}
        for connection in connections:
            if Reason.NO_THREAD in map(reported, connection.reported):
                pids[connection.pid] = THREADLESS
            elif self.is_mps_client(connection.pid):
                pids[connection.pid] = MPS_CLIENT
        if pids == self._pids:
            return None
        self._pids = pids
        return pids
