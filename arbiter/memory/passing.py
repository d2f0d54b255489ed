"""Passes elastic memory between processes of one pod: an emulated IPC handle is opened here.

A process that opens one sends OPEN. The process that has the memory is found by the key that it stated with HOLD, in a container of the same pod. It gets EXPORT, and
answers with the descriptors of its blocks, which the arbiter passes on and closes (`arbiter.descriptors` refuses what is no memory of the driver). `vgpu.memory.open_requests` decides what is a valid answer. Nothing
here blocks, and no descriptor is kept after the message that brought it was handled.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from arbiter.connection import Connection
from arbiter.memory.connections import Connections
from arbiter.open_files import SPARE, is_spare
from vgpu.api.errors import BadDocument
from vgpu.memory.open_requests import EXPORT_WAIT_S, ExportedPart, OpenRequest, OpenRequests
from vgpu.protocol import wire
from vgpu.protocol.passing_wire import PASSED_LIMIT, key_of

UNREAD_PART: Final = 16
"""One container's processes leave at most this part of the arbiter's files unread: the kernel counts descriptors on their way as the arbiter's, and passes no
more than it may have open (unix(7), ETOOMANYREFS). Guessed."""


class ProcessId(NamedTuple):
    """A connected process of the node."""

    container: str
    number: int


@dataclass(slots=True)
class Member:
    """What is known of one container. `maker`: GPU and number of the process that has the memory of a key."""

    key: str
    connections: Connections
    maker: Callable[[bytes], tuple[int, int] | None]
    uid: str = ""
    uuids: tuple[str, ...] = ()
    unread: dict[int, int] = field(default_factory=dict)
    """Descriptors that were sent to its processes and may not be read yet."""


class Passing:
    """All containers of a node."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._requests = OpenRequests()

    def add(self, member: Member) -> None:
        """A container is served."""
        self._members[member.key] = member

    def remove(self, key: str) -> None:
        """It is gone, and its connections have ended."""
        self._members.pop(key, None)

    def open(
        self, member: Member, connection: Connection, seq: int, handle: bytes, now_s: float, opens_at_s: float
    ) -> None:
        """A process opens a handle. Until `opens_at_s` processes state to a new arbiter what they have. Raises BadDocument, PeerGone."""
        request = OpenRequest(ProcessId(member.key, connection.number), seq, handle, 0, None, now_s + EXPORT_WAIT_S)
        found = self._find(member, handle)
        if found is None and now_s < opens_at_s:
            request.until_s = min(opens_at_s, request.until_s)
            self._requests.begin(request)
        else:
            self._begin(member, connection, request, found)

    def exported(self, member: Member, connection: Connection, number: int, answer: wire.Exported) -> None:
        """A process answers EXPORT, and its descriptors are in `connection.passed`. Raises BadDocument."""
        exporter = ProcessId(member.key, connection.number)
        connection.exports = self._requests.asked(exporter)
        try:
            fits = len(connection.passed) == len(answer.blocks)
            if answer.reason is None and (not fits or any(map(is_spare, connection.passed))):
                answer = _refusal(answer.gpu, wire.UnopenedReason.NO_DESCRIPTOR)
            part = ExportedPart(answer.bytes, answer.total, answer.first, answer.blocks)
            request = self._requests.answered(exporter, number, part if answer.reason is None else None)
        except BadDocument:
            self._refuse_all(self._requests.left(exporter), wire.UnopenedReason.NO_ANSWER)
            raise
        connection.exports = self._requests.asked(exporter)
        if request is not None and not self._pass_on(request, answer, connection.passed):
            self._requests.end(number)

    def left(self, member: Member, connection: Connection) -> None:
        """A connection ended."""
        member.unread.pop(connection.number, None)
        waited = self._requests.left(ProcessId(member.key, connection.number))
        self._refuse_all(waited, wire.UnopenedReason.UNKNOWN)

    def expire(self, now_s: float) -> None:
        """Refuse what has waited long enough; what waited for processes to state what they have is looked for again."""
        for request in self._requests.expired(now_s):
            member, connection = self._process(request.opener)
            found = self._find(member, request.handle) if member is not None and request.exporter is None else None
            if member is None or connection is None:
                continue
            if found is None:
                reason = wire.UnopenedReason.NO_ANSWER if request.exporter else wire.UnopenedReason.UNKNOWN
                self._refuse_all([request], reason)
            else:
                request.until_s = now_s + EXPORT_WAIT_S
                self._attempt(member, connection, partial(self._begin, member, connection, request, found))

    def due_s(self) -> float | None:
        """When `expire` is to be called next, or None."""
        return self._requests.due_s()

    def _find(self, opener: Member, handle: bytes) -> tuple[Member, int, Connection] | None:
        """The process of the same pod that has the memory, with its container and its number of the GPU."""
        key = key_of(handle)
        if key is None or not opener.uid:
            return None
        for member in self._members.values():
            made = member.maker(key) if member.uid == opener.uid else None
            if made is not None and (connection := member.connections.get(made[1])) is not None:
                return member, made[0], connection
        return None

    def _begin(
        self,
        member: Member,
        connection: Connection,
        request: OpenRequest,
        found: tuple[Member, int, Connection] | None,
    ) -> None:
        if found is None:
            connection.send(request.seq, _refusal(0, wire.UnopenedReason.UNKNOWN))
            return
        owner, gpu, exporter = found
        uuid = owner.uuids[gpu]
        if uuid not in member.uuids:
            connection.send(request.seq, _refusal(0, wire.UnopenedReason.NO_GPU))
            return
        request.gpu, request.exporter = member.uuids.index(uuid), ProcessId(owner.key, exporter.number)
        number = self._requests.begin(request) if exporter.has_room() else None
        if number is None:
            connection.send(request.seq, _refusal(request.gpu, wire.UnopenedReason.BUSY))
            return
        exporter.exports += 1
        self._attempt(owner, exporter, partial(exporter.send, number, wire.Export(request.handle)))

    def _pass_on(self, request: OpenRequest, answer: wire.Exported, fds: list[int]) -> bool:
        """Whether the process got it, and the next part may come."""
        member, connection = self._process(request.opener)
        if member is None or connection is None:
            return False
        passed = wire.Exported(request.gpu, answer.bytes, answer.total, answer.first, answer.blocks, answer.reason)
        kept = answer.reason is None and _may_send(member, len(fds))
        if answer.reason is None and not kept:
            passed = _refusal(request.gpu, wire.UnopenedReason.BUSY)
        self._attempt(member, connection, partial(connection.send_with_fds, request.seq, passed, fds if kept else []))
        if kept:
            member.unread[connection.number] = member.unread.get(connection.number, 0) + len(fds)
        return kept and connection.number in member.connections

    def _refuse_all(self, requests: list[OpenRequest], reason: wire.UnopenedReason) -> None:
        for request in requests:
            member, connection = self._process(request.opener)
            if member is not None and connection is not None:
                refusal = partial(connection.send, request.seq, _refusal(request.gpu, reason))
                self._attempt(member, connection, refusal)

    def _process(self, process: object) -> tuple[Member | None, Connection | None]:
        if not isinstance(process, ProcessId) or (member := self._members.get(process.container)) is None:
            return None, None
        return member, member.connections.get(process.number)

    @staticmethod
    def _attempt(member: Member, connection: Connection, step: Callable[[], None]) -> None:
        member.connections.attempt(connection, step)


def _refusal(gpu: int, reason: wire.UnopenedReason) -> wire.Exported:
    return wire.Exported(gpu, 0, 0, 0, (), reason)


def _may_send(member: Member, count: int) -> bool:
    """Whether this container's processes have read enough of what was sent to them."""
    for number in list(member.unread):
        connection = member.connections.get(number)
        if connection is None or connection.has_read_all():
            del member.unread[number]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sum(member.unread.values()) + count <= max(PASSED_LIMIT, (files - SPARE) // UNREAD_PART)
