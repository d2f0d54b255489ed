"""One grant directory: its socket, its grant, its ledger and the processes connected to it.

A directory belongs to a set of device IDs, so it may serve one pod after another. A grant that names another pod or container
ends the connections of the one before; the same grant with other limits changes the ledger in place. A grant that cannot be
read leaves what is leased as it is and turns new processes away with the reason.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from arbiter import host, overlimit
from arbiter.complaints import tell_of_report
from arbiter.connection import BAD_PACKET, NO_GRANT, TOO_MANY, Connection, Gone, bound_socket, peer_pid, socket_folder
from arbiter.contexts import Contexts, Measuring, Waiting
from arbiter.files import is_spare
from arbiter.grant_file import read_grant, same_place, uuid_bytes
from arbiter.identity import Identity, named
from arbiter.meter import Reading
from arbiter.page import Page
from arbiter.spared import Spared
from arbiter.stillness import Stillness
from vgpu import wire
from vgpu.contract import GRANT, SOCKET
from vgpu.enforcement import Reason, reported
from vgpu.errors import BadDocument
from vgpu.grant import Grant
from vgpu.guard import Lookout
from vgpu.holding import Denied, Event, Granted, Wanted
from vgpu.ledger import RECALLS, Ledger
from vgpu.names import CLASSES

MIB: Final = 2**20
PACKETS_A_TURN: Final = 16
"""Packets read from one process before the others have theirs. Guessed."""
QUIET_S: Final = 1.0
"""A tenant that sends garbage fills its own metric and not the log."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Limits:
    """How a container's ledger behaves; from the settings."""

    recall_wait_s: float = 0.05
    grant_wait_s: float = 2.0
    grace_s: float = 1.0
    connections: int = 1024
    mount_needed: bool = False
    """Is only who has the grant directory mounted served?"""
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
        self.ledger = Ledger([])
        self.connections: dict[int, Connection] = {}
        self.contexts = Contexts()
        self.lookout = Lookout()
        self.bad_packets = 0
        self.kills = 0
        self._trouble = ""
        """Why the grant file as it is now cannot be used."""
        self._limits, self._clock, self._opens_at_s = limits, clock, opens_at_s
        self._measuring = measuring
        self._page = Page(limits.wait_ms)
        self._numbers = 0
        self._quiet_until_s = 0.0
        self._gone: list[Connection] = []
        self._leaving: deque[int] = deque()
        self._dropping = False
        self._unwelcomed: set[int] = set()
        """Numbers of those that said HELLO and wait for the grant."""
        self._handed_over: list[Connection] = []
        self.spared = Spared()
        self._still = Stillness()
        self._contexts_moved = False
        self._sockets = sockets
        self.listener = self.bind()
        self.load()

    def bind(self) -> socket.socket:
        """A listener on the directory's socket. Raises OSError."""
        path = socket_folder(self.folder, self._sockets) / SOCKET
        return bound_socket(path, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK, 0o666)

    @property
    def unreachable(self) -> bool:
        """Did somebody remove the socket? Where it lies beside the grant, a directory without one is being removed, the grant first."""
        if self._sockets is not None:
            return not (self._sockets / self.folder.name / SOCKET).exists()
        return not (self.folder / SOCKET).exists() and (self.folder / GRANT).exists()

    def load(self) -> None:
        """Read the grant again. Never raises for what the file holds."""
        path = self.folder / GRANT
        try:
            grant = read_grant(path)
            uuids = [uuid_bytes(card.uuid) for card in grant.cards]
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
        self._still.moved()
        before, self.grant = self.grant, grant
        limits_bytes = [card.mib * MIB for card in grant.cards]
        if before is not None and same_place(before, grant):
            self._tell(self.ledger.set_limits(limits_bytes, self._clock()))
        else:
            for connection in [c for c in self.connections.values() if c.welcomed]:
                self._drop(connection)
            self.ledger = Ledger(
                limits_bytes,
                self._opens_at_s,
                self._limits.recall_wait_s,
                self._may_answer,
                self._limits.context_room_bytes,
            )
            self.contexts, self.lookout = Contexts(), Lookout(self._measuring.slack_bytes)
        self._uuids = uuids
        _log.info("grant read", pod=f"{grant.namespace}/{grant.pod}", container=grant.container, grant=self.folder.name)
        self._answer_waiting()
        self._show()

    def _answer_waiting(self) -> None:
        for connection in [self.connections[number] for number in self._unwelcomed]:
            self._answer_hello(connection)

    def accept(self) -> Connection | None:
        """The next process that connects; None when there is none, or it is one too many. Raises OSError when it is short of files."""
        try:
            sock, _ = self.listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        sock.setblocking(False)
        self._still.moved()
        self._numbers += 1
        until_s = self._clock() + self._limits.grant_wait_s
        connection = Connection(sock, self._numbers, peer_pid(sock), until_s)
        self.connections[connection.number] = connection
        grants, key, needed = self.folder.parent.name, self.folder.name, self._limits.mount_needed
        uid = self.grant.uid if self.grant is not None else ""
        if why := host.stranger(connection.pid, grants, key, mount_needed=needed, uid=uid):
            self._refuse(connection, NO_GRANT, why)
            return None
        if len(self.connections) > self._limits.connections:
            self._refuse(connection, TOO_MANY, f"more than {self._limits.connections} processes of one container")
            return None
        if is_spare(sock.fileno()):
            self._refuse(connection, TOO_MANY, "more processes on this node than the arbiter may have files open")
            return None
        return connection

    def serve(self, connection: Connection) -> None:
        """Read what a process sent and do it."""

        def turn() -> None:
            for _ in range(PACKETS_A_TURN):
                if connection.number not in self.connections:  # dropped, or handed over with what it sends next
                    return
                received = connection.receive()
                if received is None:
                    return
                self._handle(connection, *received)

        self._still.moved()
        self._attempt(connection, turn)
        self._show()

    def expire(self, now_s: float) -> None:
        """Time passed: answer who has waited long enough. What was said before `now_s` has been read, PACKETS_A_TURN of each."""
        self._still.moved()
        self._tell(self.ledger.expire(now_s))
        for connection in [self.connections[number] for number in self._unwelcomed]:
            if now_s >= connection.hello_until_s:
                self._refuse(connection, NO_GRANT, "the grant of this container has not been written")
        self._show()

    def deadline_s(self) -> float | None:
        """When `expire` has something to do, or None."""
        waiting = [self.connections[number].hello_until_s for number in self._unwelcomed]
        ledger = self.ledger.deadline_s()
        return min(waiting if ledger is None else [*waiting, ledger], default=None)

    def take(self, reading: Reading) -> bool:
        """NVML was read: charge contexts, answer who waits for it, see who is over the limit. Answers whether there was anything to do."""
        if self.grant is None:
            return False
        uuids = [card.uuid for card in self.grant.cards]
        if self._still.lasts(reading, uuids) and not self.contexts.restless and not self.lookout.excesses:
            return False
        self._tell(self.contexts.measure(self.ledger, uuids, self._welcomed(), reading, self._clock()))
        for waiting in self.contexts.answered(reading):
            self._measured(waiting, uuids[waiting.card] in reading.cards)
        self.spared.take(uuids, reading)
        held = self.contexts.held(self.folder.name, self.ledger, uuids, self._welcomed(), reading)
        self._charge_unconnected()
        for kill in overlimit.look(self.lookout, self.grant, reading, held):
            self.kills += 1
            self._measuring.kills.add(kill, self._clock())
        self._show()
        return True

    def _charge_unconnected(self) -> None:
        """What processes hold that cannot come back, or that go around the library, is lent to nobody else."""
        for card, of in enumerate(self.grant.cards if self.grant is not None else ()):
            self._tell(self.ledger.charge_unconnected(card, self.contexts.unconnected_bytes(of.uuid), self._clock()))

    def _welcomed(self) -> list[Connection]:
        """Asked anew after each thing said, since who cannot be told is dropped."""
        return [connection for connection in self.connections.values() if connection.welcomed]

    def gone(self) -> list[Connection]:
        """Connections that ended since this was asked last. Their sockets are still open, for the poller to forget."""
        gone, self._gone = self._gone, []
        return gone

    def handed_over(self) -> list[Connection]:
        """Connections for turns that were welcomed since this was asked last: not ours any more."""
        handed_over, self._handed_over = self._handed_over, []
        return handed_over

    def newly_spared(self) -> dict[int, str] | None:
        """Processes that are never suspended, by host pid, and why, when they are others than when this was asked last."""
        return self.spared.changed(self.connections.values())

    def begun_contexts(self) -> dict[tuple[Identity, int], float] | None:
        """Since when each process has had a context on each card, where that is otherwise than when this was asked last."""
        if not self._contexts_moved:
            return None
        self._contexts_moved = False
        return {
            (named(c.pid, c.pid_in_container), card): since
            for c in self.connections.values()
            for card, since in c.contexts_s.items()
        }

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
        """Hang up on everybody."""
        for connection in list(self.connections.values()):
            self._drop(connection)
        self.listener.close()
        self._page.close()

    def _handle(self, connection: Connection, seq: int, message: wire.Message) -> None:
        now_s, process = self._clock(), connection.number
        if isinstance(message, wire.Hello):
            connection.pid_in_container = message.pid
            connection.for_turns = bool(message.flags & wire.FOR_TURNS)
            connection.for_context = bool(message.flags & wire.FOR_CONTEXT)
            self._hello(connection)
            return
        if not connection.welcomed:
            raise BadDocument(f"{type(message).__name__.upper()} before WELCOME: HELLO comes first")
        match message:
            case wire.Lease(card, need, want):
                self._tell(self.ledger.ask(process, card, seq, need, want, now_s))
            case wire.Return(card, amount):
                given = self.ledger.give_back(process, card, amount, seq, now_s)
                self._tell(given if seq & RECALLS else [*given, Granted(process, card, seq, 0)])
            case wire.Usage(card, used, leased):
                self.ledger.state(process, card, used, leased)
            case wire.Report(reason, active):
                self._report(connection, reason, active=active)
            case wire.Context(card, step, estimate):
                self._context(connection, card, step, estimate, seq)
            case wire.Hold():
                self._hold(process, seq, message)
            case wire.Drop(card, held, space, amount, key):
                made = held == wire.Held.MADE
                events = self.ledger.drop(process, card, bytes((space,)) + key, amount, now_s, made=made)
                self._tell([*events, Granted(process, card, seq, 0)])
            case wire.Processes(card):
                listed = self.contexts.listed(self.ledger, card, self._uuid(card), self._welcomed())
                connection.send(seq, wire.ProcessList(card, tuple(listed[: wire.PROCESSES_LIMIT])))
            case _:
                raise BadDocument(f"{type(message).__name__.upper()} is sent by the arbiter only")

    def _report(self, connection: Connection, number: int, *, active: bool) -> None:
        """Its reasons end with the connection, which says them anew after each WELCOME."""
        if active == (number in connection.reported):
            return
        connection.reported ^= {number}
        tell_of_report(self.folder.name, connection.pid, reported(number), active=active)
        if reported(number) is Reason.NO_THREAD:
            self.spared.moved = True
            self._tell(self.ledger.leases_exactly(connection.number, self._clock(), exact=active))

    def _hold(self, process: int, seq: int, said: wire.Hold) -> None:
        key = bytes((said.space,)) + said.key
        match said.held:
            case wire.Held.MADE:
                self.ledger.make(process, said.card, key, said.amount)
            case wire.Held.OPENED:
                self._tell(self.ledger.hold(process, said.card, seq, key, said.amount, self._clock()))
            case wire.Held.STILL_OPEN:
                self.ledger.restate_hold(process, said.card, key, said.amount)

    def _hello(self, connection: Connection) -> None:
        if connection.greeted:
            raise BadDocument("HELLO twice on one connection")
        connection.greeted = True
        self._unwelcomed.add(connection.number)
        self._answer_hello(connection)

    def _answer_hello(self, connection: Connection) -> None:
        if self._trouble:
            self._refuse(connection, NO_GRANT, self._trouble)
        elif self.grant is not None:
            grant = self.grant
            self._attempt(connection, lambda: self._welcome(connection, grant))

    def _welcome(self, connection: Connection, grant: Grant) -> None:
        klass = CLASSES.index(grant.klass)
        cards = tuple(
            wire.WelcomeCard(uuid, card.mib * MIB, card.core_percent, klass)
            for uuid, card in zip(self._uuids, grant.cards, strict=True)
        )
        connection.welcomed = True
        self._unwelcomed.discard(connection.number)
        if connection.for_turns:
            connection.send(0, wire.Welcome(cards), self._page.fd)
            del self.connections[connection.number]
            self._handed_over.append(connection)
            return
        self.ledger.join(connection.number)
        if self.contexts.met(connection.pid):
            self._charge_unconnected()
        promised_mib = self._promise(connection) if connection.for_context and len(cards) == 1 else 0
        self._show()
        connection.send(0, wire.Welcome(cards, promised_mib), self._page.fd)

    def _promise(self, connection: Connection) -> int:
        """MiB. Where there are several cards, nobody knows on which a context will be."""
        cost_mib = -(-self._measuring.costs.get(self._uuid(0), 0) // MIB)
        return self.ledger.promise(connection.number, 0, cost_mib * MIB, self._clock()) // MIB

    def _context(self, connection: Connection, card: int, step: wire.Step, estimate_bytes: int, seq: int) -> None:
        now_s, process = self._clock(), connection.number
        if step == wire.Step.BEGIN:
            cost = self._measuring.costs.get(self._uuid(card), 0)
            events = self.ledger.begin_context(process, card, seq, cost, now_s)
            if cost == 0 and self.ledger.part_of(process, card).context_bytes == 0:
                connection.unheld.add(card)
            self._tell(events)
            return
        if step == wire.Step.GROW:
            self._grow(process, card, estimate_bytes, seq)
            return
        if step == wire.Step.GROWN:
            self.ledger.settle_bound(process, card, now_s)
            return
        made = step == wire.Step.DONE
        if made:
            connection.contexts_s.setdefault(card, now_s)
        else:
            connection.contexts_s.pop(card, None)
        self._contexts_moved = True
        self.ledger.end_context(process, card, now_s, made=made)
        if made:
            self.ledger.restate_context(process, card, estimate_bytes)
        waiting = Waiting(process, card, seq, now_s, exact=made and card in connection.unheld, made=made)
        connection.unheld.discard(card)
        if self._measuring.awaitable and self._measuring.meter is not None:
            self.contexts.wait(waiting)
            self._measuring.meter.hurry()
        else:
            self._measured(waiting, known=False)

    def _grow(self, process: int, card: int, bound_bytes: int, seq: int) -> None:
        """Where nothing is measured, no bound would ever be settled."""
        self._uuid(card)
        if self._measuring.awaitable:
            self._tell(self.ledger.bound_context(process, card, seq, bound_bytes, self._clock()))
        else:
            self._tell([Granted(process, card, seq, bound_bytes)])

    def _measured(self, waiting: Waiting, known: bool) -> None:
        connection = self.connections.get(waiting.process)
        if connection is None:
            return
        part = self.ledger.part_of(waiting.process, waiting.card)
        known = known and part.measured_bytes is not None
        if known and waiting.made and part.context_bytes > 0:  # 0: it died before it was looked at
            self._measuring.learn(self._uuid(waiting.card), part.context_bytes)
        unleased = self.ledger.unleased_bytes(waiting.card)
        self._page.show(waiting.card, unleased)
        answer = wire.Measured(waiting.card, known, part.context_bytes, unleased)
        self._attempt(connection, lambda: connection.send(waiting.seq, answer))

    def _uuid(self, card: int) -> str:
        cards = self.grant.cards if self.grant is not None else ()
        if card >= len(cards):
            raise BadDocument(f"packet names card {card}: this container has {len(cards)}, from 0")
        return cards[card].uuid

    def _may_answer(self, process: int) -> bool:
        connection = self.connections.get(process)
        return connection is not None and connection.pid != 0 and host.runs(connection.pid)

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            connection = self.connections.get(event.process)
            if connection is not None:
                self._attempt(connection, lambda c=connection, e=event: self._tell_one(c, e))  # type: ignore[misc]

    def _tell_one(self, connection: Connection, event: Event) -> None:
        unleased = self.ledger.unleased_bytes(event.card)
        self._page.show(event.card, unleased)  # before the answer: who has read it sees the page in step
        match event:
            case Granted(_, card, seq, granted):
                connection.send(seq, wire.Leased(card, False, granted, unleased))
            case Denied(_, card, seq):
                connection.send(seq, wire.Leased(card, True, 0, unleased))
            case Wanted(_, card, recall, missing):
                connection.send(recall, wire.Recall(card, missing))

    def _attempt(self, connection: Connection, step: Callable[[], None]) -> None:
        """A step whose failure ends this connection and touches no other."""
        try:
            step()
        except Gone:
            self._drop(connection)
        except BadDocument as error:
            self.bad_packets += 1
            if self._clock() >= self._quiet_until_s:
                self._quiet_until_s = self._clock() + QUIET_S
                count = self.bad_packets
                _log.warning("bad packet", grant=self.folder.name, pid=connection.pid, reason=str(error), count=count)
            self._refuse(connection, BAD_PACKET, str(error))

    def _refuse(self, connection: Connection, code: int, text: str) -> None:
        connection.refuse(code, text)
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        if self.connections.pop(connection.number, None) is None:
            return
        self._gone.append(connection)
        self._still.moved()
        self.spared.moved = True
        self._contexts_moved |= bool(connection.contexts_s)
        self._unwelcomed.discard(connection.number)
        self.contexts.forget(connection.number)
        if connection.welcomed:
            self._leaving.append(connection.number)
        if (
            self._dropping
        ):  # what one leaves is another's, who may be gone too: no call within the call, however many there are
            return
        self._dropping = True
        try:
            while self._leaving:
                self._tell(self.ledger.leave(self._leaving.popleft(), self._clock()))
        finally:
            self._dropping = False

    def _show(self) -> None:
        if self.grant is not None:
            for card in range(len(self.grant.cards)):
                self._page.show(card, self.ledger.unleased_bytes(card))
