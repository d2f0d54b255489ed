"""One grant directory: its socket, its grant, and which processes it lets in.

A directory belongs to a set of device IDs, so it may serve one pod after another. A grant that names another pod or container
ends the connections of the one before; the same grant with other limits changes the ledger in place. A grant that cannot be
read leaves what is leased as it is and refuses new processes with the reason. What a process says once it is welcomed is
the concern of `arbiter.memory.leases`.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
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
from arbiter.files import is_spare
from arbiter.grant_file import read_container_id, read_grant, same_place, uuid_bytes
from arbiter.memory import over_limit as overlimit
from arbiter.memory.bypass import Bypassing
from arbiter.memory.connections import Connections, log_report
from arbiter.memory.contexts import Contexts, Measuring
from arbiter.memory.exempt_processes import ExemptProcesses
from arbiter.memory.leases import MIB, Memory
from arbiter.memory.meter import Reading, UnchangedReadings
from arbiter.page import Page
from vgpu.api.cgroup import Place
from vgpu.api.contract import CONTAINER_ID, GRANT, SOCKET
from vgpu.api.enforcement import Reason, reported
from vgpu.api.errors import BadDocument
from vgpu.api.grant import Grant
from vgpu.api.names import CLASSES
from vgpu.memory.ledger import Ledger
from vgpu.memory.over_limit import Lookout
from vgpu.protocol import wire
from vgpu.protocol.status import KillStatus

PACKETS_A_ROUND: Final = 16
"""Packets read from one process before the others have theirs. Guessed."""
PIECE_S: Final = 0.001
"""No further packet is read from a process that has been served for so long."""
HELLO_S: Final = 10.0
"""From the connection to HELLO, which the library says at once. Guessed."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Limits:
    """How a container's ledger behaves; from the settings."""

    recall_wait_s: float = 0.05
    grant_wait_s: float = 2.0
    grace_s: float = 1.0
    connections: int = 1024
    mount_needed: bool = False
    """Are only processes served that have the grant directory mounted?"""
    context_room_bytes: int = 0
    wait_ms: int = 0
    """How long a process waits, once per absence, for an arbiter that restarts; 0 = as its library does by itself."""


class Container:
    """See the module. `opens_at_s`: no lease before then, so that processes of an earlier arbiter can state theirs. `sockets`: the folder
    of all containers' sockets; None = each lies in its grant directory. Raises OSError."""

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        clock: Callable[[], float],
        opens_at_s: float,
        measuring: Measuring,
        sockets: Path | None = None,
    ) -> None:
        self.folder = folder
        self.grant: Grant | None = None
        """The last one that could be read."""
        self.inode = folder.stat().st_ino
        self.lookout = Lookout()
        self.exempt = ExemptProcesses()
        self.bypassing = Bypassing(measuring.rules)
        self.container_id = ""
        """The runtime's ID; empty while it is unknown."""
        self.kills = 0
        self._uuids: list[bytes] = []
        self._trouble = ""
        """Why the grant file as it is now cannot be used."""
        self._limits, self._clock, self._measuring, self._sockets = limits, clock, measuring, sockets
        self._page = Page(limits.wait_ms)
        self._unchanged = UnchangedReadings()
        self.connections = Connections(folder.name, clock, self._ended)
        self.memory = Memory(
            folder.name,
            self.connections,
            self._page,
            measuring,
            clock,
            opens_at_s=opens_at_s,
            recall_wait_s=limits.recall_wait_s,
            context_room_bytes=limits.context_room_bytes,
        )
        self.listener = self.bind()
        self.load()

    def bind(self) -> socket.socket:
        """A listener on the directory's socket. Raises OSError."""
        path = socket_folder(self.folder, self._sockets) / SOCKET
        return bound_socket(path, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK, 0o666)

    @property
    def unreachable(self) -> bool:
        """Was the socket removed? Where it lies beside the grant, a directory without one is being removed, the grant first."""
        if self._sockets is not None:
            return not (self._sockets / self.folder.name / SOCKET).exists()
        return not (self.folder / SOCKET).exists() and (self.folder / GRANT).exists()

    def load(self) -> None:
        """Read the grant again. Never raises for what the file contains."""
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
        if grant == self.grant:
            return
        self._adopt(grant, uuids)

    def _adopt(self, grant: Grant, uuids: list[bytes]) -> None:
        self._unchanged.moved()
        before, self.grant = self.grant, grant
        if before is not None and same_place(before, grant):
            self.memory.change(grant.gpus)
        else:
            for connection in self.connections.welcomed():
                self.connections.drop(connection)
            self.memory.begin(grant.gpus)
            self.lookout = Lookout(self._measuring.slack_bytes)
            self.bypassing = Bypassing(self._measuring.rules)
        self._uuids = uuids
        _log.info("grant read", pod=f"{grant.namespace}/{grant.pod}", container=grant.container, grant=self.folder.name)
        self._answer_waiting()
        self.memory.show()

    def _answer_waiting(self) -> None:
        for connection in self.connections.waiting():
            self._answer_hello(connection)

    def accept(self) -> Connection | None:
        """The next process that connects; None when there is none, or it is one too many. Raises OSError when it is short of files."""
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
        if strange := host.rejection_reason(connection.pid, grants, key, mount_needed=needed, uid=uid):
            self.connections.refuse(connection, NO_GRANT, strange, "grant-not-mounted")
            return None
        return connection

    def serve(self, connection: Connection) -> None:
        """Read what a process sent and do it: of one that does not read its answers nothing."""
        until_s = self._clock() + PIECE_S

        def read() -> None:
            for at in range(PACKETS_A_ROUND):
                if connection.number not in self.connections:  # dropped, or handed over with what it sends next
                    return
                connection.full = not connection.has_room()
                if connection.full or (at and self._clock() >= until_s):
                    return
                received = connection.receive()
                if received is None:
                    return
                self._handle(connection, *received)

        self._unchanged.moved()
        self.connections.attempt(connection, read)
        self.memory.show()

    def expire(self, now_s: float) -> None:
        """Time passed: answer requests that have waited long enough. What was sent before `now_s` has been read, PACKETS_A_ROUND of each."""
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
        """When `expire` has something to do, or None."""
        waiting = [connection.hello_until_s for connection in self.connections.waiting()]
        waiting += self.connections.silent_until_s()
        ledger = self.ledger.deadline_s()
        return min(waiting if ledger is None else [*waiting, ledger], default=None)

    def take(self, reading: Reading) -> bool:
        """NVML was read: charge contexts, answer requests that wait for it, see which processes are over the limit. Whether there was anything to do."""
        if self.grant is None:
            return False
        uuids = self.memory.uuids
        if self._unchanged.lasts(reading, uuids) and not self.contexts.restless and not self.lookout.excesses:
            return False
        held = self.memory.measure(reading)
        self.exempt.take(uuids, reading)
        kills = overlimit.look(self.lookout, self.grant, reading, held)
        place = Place(self.grant.uid, self.container_id)
        kills += self.bypassing.take(self.grant, reading, held, self.contexts.suspects(), self._clock(), place)
        self._remember(kills)
        self.memory.show()
        return True

    def traced(self) -> None:
        """Processes that are not connected were looked at."""
        self._remember(self.bypassing.again(self._clock()))

    def _remember(self, kills: list[KillStatus]) -> None:
        self.kills += sum(self._measuring.kills.add(kill, self._clock()) for kill in kills)

    def newly_exempt(self) -> dict[int, str] | None:
        """Processes that are never suspended, by host pid, and why, when they are others than when this was called last."""
        return self.exempt.changed(self.connections.values())

    @property
    def ledger(self) -> Ledger:
        """Of the grant that it has now."""
        return self.memory.ledger

    @property
    def contexts(self) -> Contexts:
        """Of the grant that it has now."""
        return self.memory.contexts

    @property
    def bad_packets(self) -> int:
        """Since it was first seen."""
        return self.connections.bad_packets

    @property
    def refused(self) -> Counter[str]:
        """Connections that were refused or hung up on, by reason."""
        return self.connections.refused

    @property
    def now_s(self) -> float:
        """By the clock of its ledger."""
        return self._clock()

    @property
    def readable(self) -> bool:
        """Can the grant file as it is now be used?"""
        return not self._trouble

    @property
    def page(self) -> Page:
        """What its processes may read."""
        return self._page

    def close(self) -> None:
        """Hang up on every process. `listener` is closed before: a process connects again at once, and one without descriptors has few sockets to spend."""
        self.connections.close()
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
        """Its reasons end with the connection, which says them anew after each WELCOME."""
        if active == (number in connection.reported):
            return
        connection.reported ^= {number}
        log_report(self.folder.name, connection.pid, reported(number), active=active)
        if reported(number) is Reason.NO_THREAD:
            self.exempt.moved = True
            self.memory.lease_exactly(connection, exact=active)

    def _hello(self, connection: Connection, said: wire.Hello) -> None:
        connection.pid_in_container = said.pid
        connection.for_gpu_time = bool(said.flags & wire.FOR_TURNS)
        connection.for_context = bool(said.flags & wire.FOR_CONTEXT)
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
        if connection.for_gpu_time:
            connection.send(0, wire.Welcome(gpus), self._page.fd)
            self.connections.hand_over(connection)
            return
        if self._measuring.tracer is not None:
            self._measuring.tracer.connected(connection.pid)
        self.bypassing.met(connection.pid)
        promised_mib = self.memory.join(connection)
        connection.send(0, wire.Welcome(gpus, promised_mib), self._page.fd)

    def _ended(self, connection: Connection) -> None:
        self._unchanged.moved()
        self.exempt.moved |= connection.welcomed
        self.memory.leave(connection)
