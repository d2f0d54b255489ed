"""One grant directory: its socket, its grant, and which processes it accepts.

The device plugin makes a directory for one container of one pod and never uses it again. New limits in its grant change the
ledger in place. A grant that names another pod, container or GPU ends all connections, so that no process keeps the leases of
another container. If a grant cannot be read, existing leases stay and the arbiter rejects new processes with the reason.
`arbiter.memory.container_memory` handles the messages of a process after WELCOME.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from arbiter import host
from arbiter.connection import (
    BAD_PACKET,
    NO_GRANT,
    SEND_BUFFER_BYTES,
    TOO_MANY,
    Connection,
    bound_socket,
    socket_folder,
)
from arbiter.grant_file import read_burst, read_container_id, read_grant, same_place, uuid_bytes
from arbiter.memory import over_limit as overlimit
from arbiter.memory.bypass import BypassEnforcement
from arbiter.memory.connections import Connections, log_report
from arbiter.memory.container_memory import MIB, ContainerMemory
from arbiter.memory.contexts import Contexts, NodeMemory
from arbiter.memory.exempt_processes import ExemptProcesses
from arbiter.memory.giving_way import Excess, KnownProcess, kill_container
from arbiter.memory.meter import MemoryReading, UnchangedReadings
from arbiter.memory.node_share import NodeShare, Swapping
from arbiter.open_files import is_spare
from arbiter.page import ContainerPage
from vgpu.api.burst import BurstLimits
from vgpu.api.cgroup import CgroupOwner
from vgpu.api.contract import BURST, CONTAINER_ID, GRANT, SOCKET
from vgpu.api.enforcement import Reason, reported
from vgpu.api.errors import BadDocument
from vgpu.api.grant import Grant
from vgpu.api.names import CLASSES
from vgpu.memory.ledger import Ledger
from vgpu.memory.over_limit import OverLimitDetector
from vgpu.protocol import wire
from vgpu.protocol.status import KillStatus

PACKETS_A_ROUND: Final = 16
"""Packets read from one process before the next process is served. Guessed."""
PIECE_S: Final = 0.001
"""After this time no further packet is read from the process in this round."""
HELLO_S: Final = 10.0
"""Time-out from the connection to HELLO, which the library sends at once. Guessed."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ContainerOptions:
    """How a container's ledger behaves; from the settings."""

    recall_wait_s: float = 0.05
    grant_wait_s: float = 2.0
    grace_s: float = 1.0
    connections: int = 1024
    mount_needed: bool = False
    """Whether only processes with the grant directory mounted are served."""
    context_room_bytes: int = 0
    wait_ms: int = 0
    """How long a process waits, once per absence, for an arbiter that restarts; 0 = the library's default."""


class ServedContainer:
    """See the module. `opens_at_s`: no lease before then, so that processes of an earlier arbiter can state their leases. `sockets`: the folder
    of all containers' sockets; None = each socket is in its grant directory. `swapping`: where containers of the node may burst. `siblings`: as in
    `host.rejection_reason`. Raises OSError."""

    def __init__(
        self,
        folder: Path,
        limits: ContainerOptions,
        clock: Callable[[], float],
        opens_at_s: float,
        node_memory: NodeMemory,
        sockets: Path | None = None,
        swapping: Swapping | None = None,
        siblings: Callable[[ServedContainer], Mapping[str, str]] = lambda _: {},
    ) -> None:
        self.folder = folder
        self.grant: Grant | None = None
        """The last readable grant."""
        self.burst: BurstLimits | None = None
        """What the container may use above it."""
        self.inode = folder.stat().st_ino
        self.over_limit = OverLimitDetector()
        self.exempt = ExemptProcesses()
        self.bypass = BypassEnforcement(node_memory.rules)
        self.container_id = ""
        """The runtime's ID; empty while it is unknown."""
        self.kills = 0
        self._uuids: list[bytes] = []
        self._trouble = ""
        """Why the present grant file cannot be used."""
        self._limits, self._clock, self._node_memory, self._sockets = limits, clock, node_memory, sockets
        self._serves_bursts, self._siblings = swapping is not None, siblings
        self._page = ContainerPage(limits.wait_ms, bursts=self._serves_bursts)
        self._unchanged = UnchangedReadings()
        self.connections = Connections(folder.name, clock, self._ended)
        self.memory = ContainerMemory(
            folder.name,
            self.connections,
            self._page,
            node_memory,
            clock,
            opens_at_s=opens_at_s,
            recall_wait_s=limits.recall_wait_s,
            context_room_bytes=limits.context_room_bytes,
            share=NodeShare(folder.name, swapping, node_memory.highest),
        )
        self.listener = self.bind()
        self.load()

    def bind(self) -> socket.socket:
        """A listener on the directory's socket. Raises OSError."""
        path = socket_folder(self.folder, self._sockets) / SOCKET
        return bound_socket(path, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK, 0o666)

    @property
    def unreachable(self) -> bool:
        """Whether the socket was removed. If it is beside the grant, a directory without a grant is being removed, the grant first."""
        if self._sockets is not None:
            return not (self._sockets / self.folder.name / SOCKET).exists()
        return not (self.folder / SOCKET).exists() and (self.folder / GRANT).exists()

    def load(self) -> None:
        """Read the grant again. Never raises for the file's content."""
        path = self.folder / GRANT
        self.container_id = read_container_id(self.folder / CONTAINER_ID)
        try:
            grant = read_grant(path)
            uuids = [uuid_bytes(gpu.uuid) for gpu in grant.gpus]
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError, BadDocument) as error:
            self._trouble = f"grant {path} cannot be read: {error}"
            _log.error("grant refused", grant=str(path), reason=str(error))
            self._answer_waiting()
            return
        self._trouble = ""
        burst = self._read_burst(grant)
        if (grant, burst) == (self.grant, self.burst):
            return
        self._adopt(grant, burst, uuids)

    def _read_burst(self, grant: Grant) -> BurstLimits | None:
        """A file that cannot be used gives the guarantee alone."""
        try:
            return read_burst(self.folder / BURST, grant)
        except (OSError, UnicodeDecodeError, BadDocument) as error:
            _log.error("the container has its guarantee alone", grant=self.folder.name, reason=str(error))
            return None

    def _adopt(self, grant: Grant, burst: BurstLimits | None, uuids: list[bytes]) -> None:
        self._unchanged.moved()
        before, self.grant, self.burst = self.grant, grant, burst
        if before is not None and same_place(before, grant):
            self.memory.change(grant, burst)
        else:
            for connection in self.connections.welcomed():
                self.connections.drop(connection)
            self.memory.begin(grant, burst)
            self.over_limit = OverLimitDetector(self._node_memory.slack_bytes)
            self.bypass = BypassEnforcement(self._node_memory.rules)
        self._uuids = uuids
        _log.info("grant read", pod=f"{grant.namespace}/{grant.pod}", container=grant.container, grant=self.folder.name)
        self._answer_waiting()
        self.memory.show()

    def _answer_waiting(self) -> None:
        for connection in self.connections.waiting():
            self._answer_hello(connection)

    def accept(self) -> Connection | None:
        """The next connecting process; None if there is none, or if it exceeds the limit. Raises OSError if no file descriptor is free."""
        try:
            sock, _ = self.listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        sock.setblocking(False)
        self._unchanged.moved()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        now_s = self._clock()
        connection = self.connections.add(sock, now_s + HELLO_S, now_s + self._limits.grant_wait_s)
        if len(self.connections) > self._limits.connections:
            why = f"more than {self._limits.connections} processes of one container"
            self.connections.refuse(connection, TOO_MANY, why, "connections")
            return None
        if is_spare(sock.fileno()):
            why = "more processes on this node than the arbiter may have files open"
            self.connections.refuse(connection, TOO_MANY, why, "files")
            return None
        grants, key, needed = self.folder.parent.name, self.folder.name, self._limits.mount_needed
        uid = self.grant.uid if self.grant is not None else ""
        strange = host.rejection_reason(
            connection.pid, grants, key, mount_needed=needed, uid=uid, siblings=self._siblings(self)
        )
        if strange:
            self.connections.refuse(connection, NO_GRANT, strange, "grant-not-mounted")
            return None
        return connection

    def serve(self, connection: Connection) -> None:
        """Read and handle a process's messages; none if the process does not read its answers."""
        until_s = self._clock() + PIECE_S

        def read() -> None:
            for at in range(PACKETS_A_ROUND):
                if connection.number not in self.connections:  # dropped, or handed over with its next messages
                    return
                connection.full = not connection.has_room()
                if connection.full or (at and self._clock() >= until_s):
                    return
                received = connection.receive()
                if received is None:
                    return
                try:
                    self._handle(connection, *received)
                finally:
                    connection.close_passed()

        self._unchanged.moved()
        self.connections.attempt(connection, read)
        self.memory.show()

    def expire(self, now_s: float) -> None:
        """Answer requests that have waited long enough. Messages sent before `now_s` have been read, PACKETS_A_ROUND of each process."""
        self._unchanged.moved()
        self.memory.expire(now_s)
        for connection in self.connections.waiting():
            if now_s >= connection.hello_until_s:
                why = "the grant of this container has not been written"
                self.connections.refuse(connection, NO_GRANT, why, "no-grant")
        for connection in self.connections.silent(now_s):
            self.connections.refuse(connection, BAD_PACKET, f"no HELLO within {HELLO_S:g} s", "no-hello")
        self.memory.show()

    def deadline_s(self) -> float | None:
        """When `expire` is to be called next, or None."""
        waiting = [connection.hello_until_s for connection in self.connections.waiting()]
        waiting += self.connections.silent_until_s()
        memory = self.memory.deadline_s()
        return min(waiting if memory is None else [*waiting, memory], default=None)

    def evaluate(self, reading: MemoryReading) -> bool:
        """Evaluate a reading of NVML: charge contexts, answer requests that wait for it, and check the limit. Returns whether there was anything to do."""
        if self.grant is None:
            return False
        uuids = self.memory.uuids
        if self._unchanged.lasts(reading, uuids) and not self.contexts.restless and not self.over_limit.excesses:
            return False
        held = self.memory.measure(reading)
        self.exempt.evaluate(uuids, reading)
        limits = self.memory.lawful_bytes(self.grant, self.burst)
        kills = overlimit.evaluate(self.over_limit, self.grant, limits, reading, held)
        place = CgroupOwner(self.grant.uid, self.container_id)
        kills += self.bypass.evaluate(self.grant, limits, reading, held, self.contexts.suspects(), self._clock(), place)
        self._remember(kills)
        self.memory.show()
        return True

    def traced(self) -> None:
        """Unconnected processes were examined."""
        self._remember(self.bypass.again(self._clock()))

    def _remember(self, kills: list[KillStatus]) -> None:
        self.kills += sum(self._node_memory.kills.add(kill, self._clock()) for kill in kills)

    def end(self, excess: Excess, reason: str) -> None:
        """It did not give way: kill its processes."""
        if self.grant is None:
            return
        gpu, known = self.memory.uuids.index(excess.gpu), self.connections.welcomed()
        connected = [KnownProcess(c.pid, c.started, self.ledger.part_of(c.number, gpu).leased_bytes) for c in known]
        place = CgroupOwner(self.grant.uid, self.container_id)
        kill = kill_container(self.grant, place, connected, excess, reason)
        self._remember([kill] if kill is not None else [])

    def newly_exempt(self) -> dict[int, str] | None:
        """Processes that are never suspended, by host pid, and why; None if they are the same as at the last call."""
        return self.exempt.changed(self.connections.values())

    @property
    def ledger(self) -> Ledger:
        """The ledger of the present grant."""
        return self.memory.ledger

    @property
    def contexts(self) -> Contexts:
        """The contexts of the present grant."""
        return self.memory.contexts

    @property
    def bad_packets(self) -> int:
        """Bad packets since the directory was first found."""
        return self.connections.bad_packets

    @property
    def refused(self) -> Counter[str]:
        """Number of connections that the arbiter rejected or closed, by reason."""
        return self.connections.refused

    @property
    def now_s(self) -> float:
        """The time on the ledger's clock."""
        return self._clock()

    @property
    def readable(self) -> bool:
        """Whether the present grant file can be used."""
        return not self._trouble

    @property
    def page(self) -> ContainerPage:
        """The page that its processes may read."""
        return self._page

    def close(self) -> None:
        """Close every connection. The caller closes `listener` before: a process connects again at once, and each attempt costs it one of its few sockets."""
        self.connections.close()
        self.memory.end()
        self._page.close()

    def _handle(self, connection: Connection, seq: int, message: wire.Message) -> None:
        if isinstance(message, wire.Hello):
            self._hello(connection, message)
        elif not connection.welcomed:
            raise BadDocument(f"{type(message).__name__.upper()} before WELCOME: HELLO comes first")
        elif isinstance(message, wire.Report):
            self._report(connection, message.reason, active=message.active)
        else:
            self.memory.handle(connection, seq, message)

    def _report(self, connection: Connection, number: int, *, active: bool) -> None:
        """A process's reasons end with its connection; the library reports them again after each WELCOME."""
        if active == (number in connection.reported):
            return
        connection.reported ^= {number}
        log_report(self.folder.name, connection.pid, reported(number), active=active)
        if reported(number) is Reason.NO_THREAD:
            self.exempt.moved = True
            self.memory.lease_exactly(connection, exact=active)

    def _hello(self, connection: Connection, hello: wire.Hello) -> None:
        connection.for_burst = bool(hello.flags & wire.FOR_BURST)
        if connection.for_burst and not self._serves_bursts:
            raise BadDocument("HELLO for bursts: this arbiter's page does not show that it serves them")
        connection.pid_in_container = hello.pid
        connection.for_gpu_time = bool(hello.flags & wire.FOR_GPU_TIME)
        connection.for_context = bool(hello.flags & wire.FOR_CONTEXT)
        self.connections.greet(connection)
        self._answer_hello(connection)

    def _answer_hello(self, connection: Connection) -> None:
        if self._trouble:
            self.connections.refuse(connection, NO_GRANT, self._trouble, "no-grant")
        elif self.grant is not None:
            grant = self.grant
            self.connections.attempt(connection, lambda: self._welcome(connection, grant))

    def _welcome(self, connection: Connection, grant: Grant) -> None:
        service_class = CLASSES.index(grant.service_class)
        gpus = tuple(
            wire.WelcomeGpu(uuid, gpu.mib * MIB, gpu.core_percent, service_class)
            for uuid, gpu in zip(self._uuids, grant.gpus, strict=True)
        )
        self.connections.welcome(connection)
        connection.started = host.lives_since(connection.pid) if connection.pid > 0 else 0
        if connection.for_gpu_time or connection.for_burst:
            connection.send(0, wire.Welcome(gpus), self._page.fd)
            self.connections.hand_over(connection)
            return
        if self._node_memory.tracer is not None:
            self._node_memory.tracer.connected(connection.pid)
        self.bypass.met(connection.pid)
        promised_mib = self.memory.join(connection)
        connection.send(0, wire.Welcome(gpus, promised_mib), self._page.fd)

    def _ended(self, connection: Connection) -> None:
        self._unchanged.moved()
        self.exempt.moved |= connection.welcomed
        self.memory.leave(connection)
