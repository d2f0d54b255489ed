"""The status socket: the arbiter sends one document (`vgpu.protocol.status`) to each reader that connects, and closes the connection.

It has its own thread, so that a slow reader delays no lease: the loop's lock covers the copying of numbers only; command lines are
looked up and bytes sent without it. A slow reader does not delay another: `Readers` sends to several at once.
In a flood of readers 20 documents of each kind are made a second, and a reader waits for the next one: none is older than its connection.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Final

import structlog
from msgspec import structs

from arbiter import host
from arbiter.budget import MessageBudget
from arbiter.command_lines import Commands
from arbiter.connection import Connection, bound_socket
from arbiter.enforcement import enforcements
from arbiter.memory.attribution import Ungranted
from arbiter.memory.container import ServedContainer
from arbiter.node_swapping import NodeSwapping
from arbiter.server import ArbiterServer
from vgpu.api.burst import core_limit_percent
from vgpu.api.enforcement import TABLE, Enforcement
from vgpu.memory.ledger import Ledger
from vgpu.protocol.status import (
    BRIEF,
    ContainerStatus,
    GpuStatus,
    GpuTimeStatus,
    ProcessGpu,
    ProcessStatus,
    StatusDocument,
    UnenforcedStatus,
    UngrantedStatus,
    encode_status,
)

SEND_S: Final = 2.0
"""The connection of a reader that takes longer for one document is closed. Guessed."""
READERS: Final = 8
"""Readers that have not finished their document. For a further one, the oldest connection is closed. Guessed: the device plugin is one reader."""
DOCUMENTS_A_SECOND: Final = 20.0
DOCUMENTS_AT_ONCE: Final = 100.0
"""Guessed: the device plugin reads it every 0.8 s."""
AT_ONCE: Final = 64
"""Readers that are accepted before sending continues. Guessed."""
CHECK_S: Final = 1.0
"""Period of the check that the socket exists, while no client connects."""
AGAIN_S: Final = 1.0
"""Pause after a failed accept, for example because too many files are open. Guessed."""
_log = structlog.get_logger()


class StatusSocket:
    """Serves `path` until `close`. Only the arbiter's own user may connect."""

    def __init__(self, path: Path, server: ArbiterServer) -> None:
        self._path, self._server = path, server
        self._bind()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and remove the socket unless it belongs to another arbiter by now."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _bind(self) -> None:
        """Raises OSError."""
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._listener = bound_socket(self._path, socket.SOCK_STREAM, 0o600)
        self._listener.setblocking(False)
        self._inode = self._path.stat().st_ino

    def _put_back(self) -> None:
        """Restore a removed socket: without it no reader would learn which limits are not enforced. Raises OSError."""
        if not self._path.exists():
            lost = self._listener
            self._bind()
            lost.close()
            _log.warning("the status socket was missing and is put back", path=str(self._path))

    def _serve(self) -> None:
        documents, readers, waiting = Documents(self._server), Readers(), PendingReaders()
        while not self._closing.is_set():
            try:
                if readers.wait(None if waiting.full else self._listener, documents.wait_s(waiting.kinds, CHECK_S)):
                    waiting.add(_accepted(self._listener))
                elif not waiting.kinds:
                    self._put_back()
            except OSError as error:
                if self._closing.wait(AGAIN_S):
                    break
                _log.error("the status cannot be served now", reason=str(error))
                continue
            for brief in waiting.kinds:
                if (document := documents.get(brief=brief)) is not None:
                    for reader in waiting.take(brief=brief):
                        readers.add(reader, document)
        waiting.close()
        readers.close()


def _accepted(listener: socket.socket) -> Iterator[tuple[socket.socket, object]]:
    """The readers that have connected meanwhile. Raises OSError if the first cannot be accepted."""
    for number in range(AT_ONCE):
        try:
            yield listener.accept()
        except BlockingIOError:
            return
        except OSError:
            if number == 0:
                raise
            return


def _hung_up(reader: socket.socket) -> bool:
    """Whether the reader has closed its end. Then it gets no document."""
    poll = select.poll()
    poll.register(reader, 0)
    return bool(poll.poll(0))


class PendingReaders:
    """Readers that have connected and wait for a document."""

    def __init__(self) -> None:
        self._kinds: dict[socket.socket, bool] = {}

    @property
    def kinds(self) -> frozenset[bool]:
        """The kinds of documents for which they wait: whether brief."""
        return frozenset(self._kinds.values())

    @property
    def full(self) -> bool:
        """Whether no further reader is accepted: others wait in the listener's queue."""
        return len(self._kinds) >= AT_ONCE

    def add(self, accepted: Iterable[tuple[socket.socket, object]]) -> None:
        """Add connected readers. Raises the errors of `accepted`."""
        for reader, name in accepted:
            if _hung_up(reader):
                reader.close()
            else:
                self._kinds[reader] = is_brief(name)

    def take(self, *, brief: bool) -> list[socket.socket]:
        """Remove and return the readers of one kind."""
        found = [reader for reader, kind in self._kinds.items() if kind == brief]
        for reader in found:
            del self._kinds[reader]
        return found

    def close(self) -> None:
        """Close all connections."""
        for reader in self._kinds:
            reader.close()


class Documents:
    """Encodes documents of the moment of the request, at a bounded rate."""

    def __init__(self, server: ArbiterServer, clock: Callable[[], float] = time.monotonic) -> None:
        self._server, self._clock, self._commands = server, clock, Commands()
        self._budgets = {
            brief: MessageBudget(clock(), DOCUMENTS_A_SECOND, DOCUMENTS_AT_ONCE, again=1.0) for brief in (False, True)
        }

    def get(self, *, brief: bool) -> bytes | None:
        """None = too early for another document."""
        if not self._budgets[brief].may(self._clock()):
            return None
        self._budgets[brief].spend(1)
        return encode_status(status_of(self._server, self._commands, brief=brief))

    def wait_s(self, kinds: Iterable[bool], most_s: float) -> float:
        """The time until a document of one of these kinds can be made."""
        now_s = self._clock()
        return min([most_s, *(self._budgets[brief].again_s(now_s) - now_s for brief in kinds)])


class Readers:
    """Readers that have not finished their document, in order of their start."""

    def __init__(self) -> None:
        self._sending: dict[socket.socket, tuple[memoryview, float]] = {}

    def wait(self, listener: socket.socket | None, wait_s: float) -> bool:
        """Send to the readers for `wait_s`, or until a reader connects. Returns whether one did."""
        poll = select.poll()
        if listener is not None:
            poll.register(listener, select.POLLIN)
        by_fd = {reader.fileno(): reader for reader in self._sending}
        for fd in by_fd:
            poll.register(fd, select.POLLOUT)
        ready = [fd for fd, _ in poll.poll(ceil(1000 * (min(wait_s, SEND_S / 10) if by_fd else wait_s)))]
        for fd in ready:
            if fd in by_fd:
                self._send(by_fd[fd])
        late_s = time.monotonic() - SEND_S
        for reader in [one for one, (_, since_s) in self._sending.items() if since_s < late_s]:
            self._drop(reader, f"did not read its document in {SEND_S:g} s")
        return listener is not None and listener.fileno() in ready

    def add(self, reader: socket.socket, document: bytes) -> None:
        """Send the document to a reader."""
        if len(self._sending) >= READERS:
            self._drop(next(iter(self._sending)), f"is one of more than {READERS} that do not read")
        reader.setblocking(False)
        self._sending[reader] = memoryview(document), time.monotonic()
        self._send(reader)

    def close(self) -> None:
        """Close all connections."""
        for reader in list(self._sending):
            self._drop(reader, "waits while the arbiter ends")

    def _send(self, reader: socket.socket) -> None:
        rest, since_s = self._sending[reader]
        try:
            rest = rest[reader.send(rest, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(reader, str(error))
            return
        if rest:
            self._sending[reader] = rest, since_s
        else:
            del self._sending[reader]
            reader.close()

    def _drop(self, reader: socket.socket, why: str) -> None:
        del self._sending[reader]
        reader.close()
        _log.debug("a reader of the status is gone", reason=why)


def is_brief(name: object) -> bool:
    """Whether a brief document is enough for the reader with this socket name."""
    return isinstance(name, bytes) and name.startswith(BRIEF.encode())


def status_of(server: ArbiterServer, commands: Commands | None = None, *, brief: bool = False) -> StatusDocument:
    """The present state of all containers that have a grant; `brief`: only those with something to report."""
    with server.lock:
        found = enforcements(server)
        keys = sorted(_to_report(server, found) if brief else server.containers)
        scheduler = server.scheduler.statuses() if server.scheduler is not None and keys else {}
        containers = [
            _container(key, server.containers[key], scheduler.get(key), found[key], server.swapping) for key in keys
        ]
        kills = server.killed()
        ungranted = server.attributor.ungranted
        unlisted = server.unlisted_memory.statuses(server.containers)
    commands = commands if commands is not None else Commands()
    known = [container for container in containers if container is not None]
    if not brief:
        commands.forget(known)
    return StatusDocument(
        tuple(_with_commands(container, commands) for container in known),
        kills=kills,
        ungranted=tuple(map(_ungranted, ungranted)),
        unlisted=unlisted,
        sensors=() if brief or server.sensors is None else server.sensors.statuses(),
    )


def _ungranted(one: Ungranted) -> UngrantedStatus:
    return UngrantedStatus(one.uuid, one.pid, host.command_of(one.pid), one.held_bytes, one.pod)


def _to_report(server: ArbiterServer, found: Mapping[str, Enforcement]) -> set[str]:
    to_report = server.scheduler.to_report() if server.scheduler is not None else set()
    return {
        key
        for key, container in server.containers.items()
        if found[key].findings
        or container.over_limit.excesses
        or container.bypass.status()
        or key in to_report
        or server.swapping.to_report(key)
    }


def _container(
    key: str, container: ServedContainer, gpu_time: GpuTimeStatus | None, found: Enforcement, swapping: NodeSwapping
) -> ContainerStatus | None:
    grant, ledger = container.grant, container.ledger
    if grant is None:
        return None
    swap, swaps = swapping.status(key)
    gpus = tuple(
        GpuStatus(
            uuid=gpu.uuid,
            limit_bytes=container.memory.limits_bytes[number],
            guarantee_bytes=gpu.mib * 2**20,
            away_bytes=swaps[gpu.uuid].away_bytes if gpu.uuid in swaps else 0,
            elastic_bytes=swaps[gpu.uuid].elastic_bytes if gpu.uuid in swaps else 0,
            core_percent=gpu.core_percent,
            core_limit_percent=core_limit_percent(gpu, container.burst),
            leased_bytes=ledger.leased_bytes(number),
            used_bytes=ledger.used_bytes(number),
            context_bytes=ledger.context_bytes(number),
            shared_bytes=ledger.shared_bytes(number),
        )
        for number, gpu in enumerate(grant.gpus)
    )
    uuids = [gpu.uuid for gpu in grant.gpus]
    connected = [_connected(c, ledger, uuids) for c in container.connections.values() if c.welcomed]
    return ContainerStatus(
        key=key,
        pod=f"{grant.namespace}/{grant.pod}",
        uid=grant.uid,
        container=grant.container,
        service_class=grant.service_class,
        level=grant.level,
        over_limit_action=grant.over_limit_action,
        over=bool(container.over_limit.excesses),
        gpus=gpus,
        processes=(*connected, *_unconnected(container.contexts.unconnected_usage)),
        gpu_time=gpu_time,
        memory_state=found.memory,
        gpu_time_state=found.gpu_time,
        unenforced=tuple(
            UnenforcedStatus(one.reason, tuple(sorted(TABLE[one.reason].limits)), one.pids) for one in found.findings
        ),
        bypasses=container.bypass.status(),
        swap=swap,
    )


def _connected(connection: Connection, ledger: Ledger, uuids: list[str]) -> ProcessStatus:
    parts = [ledger.part_of(connection.number, number) for number in range(len(uuids))]
    gpus = (
        ProcessGpu(uuid, part.used_bytes, part.context_bytes, part.measured_bytes, part.managed_bytes)
        for uuid, part in zip(uuids, parts, strict=True)
    )
    return ProcessStatus(connection.pid, connection.pid_in_container, "", tuple(gpus))


def _unconnected(held: Mapping[str, Mapping[int, int]]) -> Iterator[ProcessStatus]:
    """Processes of the container that never connected: none of their memory is explained."""
    for pid in sorted({pid for by_pid in held.values() for pid in by_pid}):
        gpus = (ProcessGpu(uuid, 0, 0, by_pid[pid]) for uuid, by_pid in held.items() if pid in by_pid)
        yield ProcessStatus(pid, 0, "", tuple(gpus))


def _with_commands(container: ContainerStatus, commands: Commands) -> ContainerStatus:
    processes = (
        structs.replace(
            process,
            command=commands.of(container.key, process),
            pid_in_container=process.pid_in_container or host.pid_inside(process.pid),
        )
        for process in container.processes
    )
    return structs.replace(container, processes=tuple(processes))
