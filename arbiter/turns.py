"""Carries out who may run on the node's GPUs: a thread a card that hears of work, asks the policy, and switches.

`vgpu.share` decides; this module moves what it hears to it and what it decides to the kernel driver. Each tenant's messages are
read by the thread of its first card, which also makes the switches there: from a message to the call is one wake-up. A gang's
other cards are switched by their own threads. Only bookkeeping is done under the lock, never a switch.

It fails open: a tenant that cannot be suspended stays on, and when a thread here fails everything is started and the arbiter
ends, so that a fresh one takes over.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Final

import structlog

from arbiter.connection import Connection, Gone
from arbiter.page import Page
from arbiter.tenant import Process, TenantTurns
from arbiter.timer import Timer, now_s
from vgpu import rm, wire
from vgpu.errors import BadDocument
from vgpu.grant import Grant
from vgpu.share import Decision, Settings, Share
from vgpu.status import TurnStatus
from vgpu.trace import Event, Idle, Join, Leave, Switched, Work

BEAT_S: Final = 0.2
"""How often pages say that we live. A tenant that is off goes on by itself when they have not for 0.6 s."""
GAP_S: Final = 0.5
"""Without a turn for so long, tenants may have gone on by themselves: what is to be off is switched off anew."""
PACKETS_A_TURN: Final = 16
EVENTS_KEPT: Final = 4096
"""Of the trace, which an admin may ask for. Guessed: some seconds of a busy node."""
_log = structlog.get_logger()


class Turns:
    """All tenants with channels on this node. `failed` is called, from a thread of ours, when one of them fails."""

    def __init__(self, failed: Callable[[], None], settings: Settings | None = None, spin: bool = False) -> None:
        self.lock = threading.Lock()
        self.share = Share(settings)
        self.trace: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.tenants: dict[str, TenantTurns] = {}
        self._failed, self._spin = failed, spin
        self._cards: dict[str, _Card] = {}
        self._decision = Decision(frozenset(), inf, {})
        self.switches = self.switch_failures = 0

    def adopt(self, name: str, grant: Grant, page: Page, connection: Connection) -> None:
        """A connection of a process that tells of turns; ours from here on."""
        with self.lock:
            tenant = self.tenants.get(name)
            if tenant is None:
                tenant = self.tenants[name] = TenantTurns(name, grant, page)
            tenant.processes[connection.number] = Process(connection.pid)
            uuid = grant.cards[0].uuid
            card = self._card(uuid)
            card.take(name, connection)

    def change(self, name: str, grant: Grant) -> None:
        """The same container, with other terms."""
        with self.lock:
            tenant = self.tenants.get(name)
            if tenant is not None:
                tenant.grant = grant
                self._know(tenant)
                self._decide()

    def drop(self, name: str) -> None:
        """The grant is gone, or another container's: hang up on its processes."""
        with self.lock:
            tenant = self.tenants.get(name)
            if tenant is not None:
                self._cards[tenant.grant.cards[0].uuid].hang_up(name)

    def statuses(self) -> dict[str, TurnStatus]:
        """What every tenant got, by name."""
        with self.lock:
            return {name: self._status(tenant) for name, tenant in self.tenants.items() if tenant.joined is not None}

    def _status(self, tenant: TenantTurns) -> TurnStatus:
        usage = self.share.usage(tenant.name)
        return TurnStatus(
            on=all(tenant.is_on(card) for card in tenant.on),
            working=tenant.working(),
            processes=sum(1 for process in tenant.processes.values() if process.seats),
            asked_percent=max(card.core_percent for card in tenant.grant.cards),
            on_s=usage.on_s,
            off_s=usage.off_s,
            capped_s=usage.capped_s,
            suspends=usage.suspends,
            trouble=tenant.trouble,
        )

    def close(self) -> None:
        """Start everybody and end the threads."""
        for card in list(self._cards.values()):
            card.stop()
        self._release_all()

    # Under the lock, from the cards' threads.

    def hear(self, name: str, connection: Connection, message: wire.Message, fd: int | None) -> None:
        """A message of a process. Raises BadDocument."""
        tenant = self.tenants[name]
        at_s = now_s()
        match message:
            case wire.Channels():
                if message.compute and fd is None:
                    raise BadDocument("packet CHANNELS comes without a descriptor")
                tenant.sits(connection.number, message, fd)
                tenant.trouble = ""
                self._resume_first(tenant)
                self._know(tenant)
            case wire.Activity():
                for event in tenant.says(connection.number, message, at_s):
                    self._apply(event)
                self._know(tenant)
            case _:
                raise BadDocument(f"{type(message).__name__.upper()} has no place on a connection for turns")

    def lose(self, name: str, connection: Connection) -> None:
        """A process hung up."""
        tenant = self.tenants[name]
        for event in tenant.leaves(connection.number, now_s()):
            self._apply(event)
        self._know(tenant)
        if not tenant.processes:
            del self.tenants[name]

    def step(self, card: str) -> tuple[TenantTurns, bool] | None:
        """What to switch next on a card: stops first, so that nobody is started beside one who is to be alone."""
        self._decide()
        mine = [tenant for tenant in self.tenants.values() if tenant.joined is not None and card in tenant.joined.cards]
        for wanted in (False, True):
            for tenant in mine:
                if tenant.wanted is wanted and tenant.is_on(card) is not wanted and not (tenant.trouble and not wanted):
                    return tenant, wanted
        return None

    def switched(self, tenant: TenantTurns, card: str, on: bool, status: int, took_s: float) -> None:
        """A switch was made, or failed: then the tenant is on, and stays so until it tells of its channels anew."""
        self.switches += 1
        if status != rm.OK and not on:
            self.switch_failures += 1
            if not tenant.trouble:
                tenant.trouble = f"the driver answered {status:#x} to a suspend"
                _log.error("a tenant cannot be suspended", grant=tenant.name, status=hex(status & 0xFFFFFFFF))
            on = True
        tenant.on[card] = on
        if tenant.name not in self.tenants or tenant.joined is None:
            return
        if all(tenant.is_on(other) is on for other in tenant.joined.cards):
            tenant.page.show_turn(off=not on)
            self._apply(Switched(now_s(), tenant.name, on, took_s))

    @property
    def ask_again_s(self) -> float:
        return self._decision.ask_again_s

    def beat(self, gap: bool) -> None:
        """Say that we live. After a gap nobody knows who went on by himself: all are on, until switched anew."""
        at_ms = int(now_s() * 1000)
        for tenant in self.tenants.values():
            tenant.page.beat(at_ms)
            if gap and not tenant.wanted:
                self._resume_first(tenant)

    def fail(self) -> None:
        """A thread of ours failed: start everybody, and let a fresh arbiter take over."""
        self._release_all()
        self._failed()

    def _apply(self, event: Event) -> None:
        self.trace.append(event)
        self.share.apply(event)

    def _know(self, tenant: TenantTurns) -> None:
        """Bring what the policy knows of a tenant in step with what it is."""
        terms, at_s = tenant.terms(), now_s()
        if terms == tenant.joined:
            return
        fresh = tenant.joined is None
        tenant.joined = terms
        if terms is None:
            tenant.on.clear()
            self._apply(Leave(at_s, tenant.name))
            return
        self._apply(Join(at_s, tenant.name, terms))
        if fresh:
            self._apply(Work(at_s, tenant.name) if tenant.working() else Idle(at_s, tenant.name))
        for uuid in terms.cards:
            self._card(uuid)

    def _resume_first(self, tenant: TenantTurns) -> None:
        """Some of its channels may be on and others off: start all, and let it be stopped anew where that is wanted."""
        for card in list(tenant.on):
            if not tenant.on[card]:
                tenant.switch(card, True)
                tenant.on[card] = True

    def _decide(self) -> None:
        before = {name: tenant.wanted for name, tenant in self.tenants.items()}
        self._decision = self.share.decide(now_s())
        for name, tenant in self.tenants.items():
            tenant.wanted = tenant.joined is None or name in self._decision.on
            if tenant.wanted != before[name] and tenant.joined is not None:
                for uuid in tenant.joined.cards:
                    self._cards[uuid].wake()
        for card in self._cards.values():
            card.ask_again(self._decision.ask_again_s)

    def _card(self, uuid: str) -> _Card:
        if uuid not in self._cards:
            self._cards[uuid] = _Card(uuid, self, self._spin)
        return self._cards[uuid]

    def _release_all(self) -> None:
        for tenant in list(self.tenants.values()):
            for card in tenant.joined.cards if tenant.joined is not None else ():
                tenant.switch(card, True)


class _Card:
    """The thread of one card."""

    def __init__(self, uuid: str, turns: Turns, spin: bool) -> None:
        self.uuid = uuid
        self._turns, self._spin = turns, spin
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timer = Timer()
        self._connections: dict[int, tuple[str, Connection]] = {}
        self._stopping = False
        self._beat_at_s = now_s()
        for fd in (self._bell, self._timer.fd):
            self._epoll.register(fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=f"turns {uuid}", daemon=True)
        self._thread.start()

    def take(self, name: str, connection: Connection) -> None:
        """Under the lock."""
        self._connections[connection.sock.fileno()] = (name, connection)
        self._epoll.register(connection.sock.fileno(), select.EPOLLIN)

    def hang_up(self, name: str) -> None:
        """Under the lock. The thread sees the hang-up and does the rest."""
        for owner, connection in self._connections.values():
            if owner == name:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def wake(self) -> None:
        """From any thread."""
        if threading.current_thread() is not self._thread:
            os.eventfd_write(self._bell, 1)

    def ask_again(self, at_s: float) -> None:
        """Under the lock."""
        self._timer.set(min(at_s, self._beat_at_s + BEAT_S))

    def stop(self) -> None:
        self._stopping = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        with self._turns.lock:
            for _, connection in self._connections.values():
                connection.sock.close()
            self._connections.clear()
        self._epoll.close()
        self._timer.close()
        os.close(self._bell)

    def _run(self) -> None:
        try:
            while not self._stopping:
                for fd, _ in self._epoll.poll(0 if self._spin else None):
                    self._ready(fd)
                self._turn()
        except BaseException:
            _log.critical(
                "the thread of a card failed: everybody runs, and the arbiter ends", card=self.uuid, exc_info=True
            )
            self._turns.fail()
            raise

    def _ready(self, fd: int) -> None:
        if fd == self._bell:
            with suppress(BlockingIOError):
                os.eventfd_read(fd)
        elif fd == self._timer.fd:
            self._timer.rang()
        else:
            with self._turns.lock:
                self._read(fd)

    def _read(self, fd: int) -> None:
        if fd not in self._connections:
            return
        name, connection = self._connections[fd]
        try:
            for _ in range(PACKETS_A_TURN):
                received = connection.receive_with_fd()
                if received is None:
                    return
                fd_passed, message = received
                self._hear(name, connection, message, fd_passed)
        except (Gone, BadDocument) as error:
            if isinstance(error, BadDocument):
                _log.warning("bad packet on a connection for turns", grant=name, pid=connection.pid, reason=str(error))
                with suppress(Gone):
                    connection.send(0, wire.Error(1, str(error)))
            self._epoll.unregister(fd)
            del self._connections[fd]
            self._turns.lose(name, connection)
            connection.sock.close()

    def _hear(self, name: str, connection: Connection, message: wire.Message, fd: int | None) -> None:
        taken = isinstance(message, wire.Channels) and bool(message.compute)
        if fd is not None and not taken:
            os.close(fd)
            fd = None
        self._turns.hear(name, connection, message, fd)

    def _turn(self) -> None:
        turns = self._turns
        while True:
            with turns.lock:
                self._beat()
                step = turns.step(self.uuid)
            if step is None:
                return
            tenant, on = step
            began_s = now_s()
            status = tenant.switch(self.uuid, on)
            with turns.lock:
                turns.switched(tenant, self.uuid, on, status, now_s() - began_s)

    def _beat(self) -> None:
        at_s = now_s()
        if at_s - self._beat_at_s >= BEAT_S:
            gap = at_s - self._beat_at_s > GAP_S
            self._beat_at_s = at_s
            self._turns.beat(gap)
