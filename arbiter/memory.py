"""The memory of one container: what its processes lease, share and make contexts with, on each GPU of its grant.

The ledger (`vgpu.ledger`) decides what a process gets, and `arbiter.contexts` what a reading of NVML says of it. This module moves
packets to the two and their answers back, and keeps the page in step with every answer. It knows neither files nor who may connect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from arbiter import host
from arbiter.connection import Connection
from arbiter.connections import Connections
from arbiter.contexts import Contexts, Measuring, Waiting
from arbiter.identity import Identity, named
from arbiter.meter import Reading
from arbiter.page import Page
from vgpu import wire
from vgpu.errors import BadDocument
from vgpu.grant import GrantCard
from vgpu.guard import Held
from vgpu.holding import Denied, Event, Granted, Wanted
from vgpu.ledger import RECALLS, Ledger

MIB: Final = 2**20


class Memory:
    """See the module. Without a GPU until `begin`; the three settings are the ledger's."""

    def __init__(
        self,
        key: str,
        connections: Connections,
        page: Page,
        measuring: Measuring,
        clock: Callable[[], float],
        *,
        opens_at_s: float,
        recall_wait_s: float,
        context_room_bytes: int,
    ) -> None:
        self.ledger, self.contexts = Ledger([]), Contexts()
        self._cards: tuple[GrantCard, ...] = ()
        self._key, self._connections, self._page = key, connections, page
        self._measuring, self._clock = measuring, clock
        self._opens_at_s, self._recall_wait_s = opens_at_s, recall_wait_s
        self._context_room_bytes = context_room_bytes
        self._leaving: deque[int] = deque()
        self._settling = False
        self._contexts_moved = False

    def begin(self, cards: tuple[GrantCard, ...]) -> None:
        """Another container has the grant directory: nothing is leased. The processes of the one before have left."""
        self._cards = cards
        self.ledger = Ledger(
            [card.mib * MIB for card in cards],
            self._opens_at_s,
            self._recall_wait_s,
            self._may_answer,
            self._context_room_bytes,
        )
        self.contexts = Contexts()

    def change(self, cards: tuple[GrantCard, ...]) -> None:
        """The same GPUs with other limits."""
        self._cards = cards
        self._tell(self.ledger.set_limits([card.mib * MIB for card in cards], self._clock()))

    def join(self, connection: Connection) -> int:
        """A process is welcomed. Returns the MiB that are promised to it for a context."""
        self.ledger.join(connection.number)
        if self.contexts.met(connection.pid):
            self._charge_unconnected()
        promised_mib = self._promise(connection) if connection.for_context and len(self._cards) == 1 else 0
        self.show()
        return promised_mib

    def leave(self, connection: Connection) -> None:
        """It hung up, or is hung up on. What it leaves is lent to others, who may be gone too: no call within the call, however many there are."""
        self._contexts_moved |= bool(connection.contexts_s)
        self.contexts.forget(connection.number, connection.pid)
        if connection.welcomed:
            self._leaving.append(connection.number)
        if self._settling:
            return
        self._settling = True
        try:
            while self._leaving:
                self._tell(self.ledger.leave(self._leaving.popleft(), self._clock()))
        finally:
            self._settling = False

    def handle(self, connection: Connection, seq: int, message: wire.Message) -> None:
        """A packet of a process that was welcomed. Raises BadDocument."""
        now_s, process = self._clock(), connection.number
        match message:
            case wire.Lease(card, need, want):
                self._tell(self.ledger.ask(process, card, seq, need, want, now_s))
            case wire.Return(card, amount):
                given = self.ledger.give_back(process, card, amount, seq, now_s)
                self._tell(given if seq & RECALLS else [*given, Granted(process, card, seq, 0)])
            case wire.Usage(card, used, leased, managed_mib):
                self.ledger.state(process, card, used, leased, managed_mib * MIB)
            case wire.Context(card, step, estimate):
                self._context(connection, card, step, estimate, seq)
            case wire.Hold():
                self._hold(process, seq, message)
            case wire.Drop(card, held, space, amount, key):
                made = held == wire.Held.MADE
                events = self.ledger.drop(process, card, bytes((space,)) + key, amount, now_s, made=made)
                self._tell([*events, Granted(process, card, seq, 0)])
            case wire.Processes(card):
                listed = self.contexts.listed(self.ledger, card, self._uuid(card), self._connections.welcomed())
                connection.send(seq, wire.ProcessList(card, tuple(listed[: wire.PROCESSES_LIMIT])))
            case _:
                raise BadDocument(f"{type(message).__name__.upper()} is sent by the arbiter only")

    def lease_exactly(self, connection: Connection, *, exact: bool) -> None:
        """It can return nothing that it is asked for, or can again."""
        self._tell(self.ledger.leases_exactly(connection.number, self._clock(), exact=exact))

    def expire(self, now_s: float) -> None:
        """Time passed."""
        self._tell(self.ledger.expire(now_s))

    def measure(self, reading: Reading) -> dict[str, list[Held]]:
        """NVML was read: charge contexts and answer the processes that wait for it. Returns, by GPU, what the guard judges."""
        uuids = self.uuids
        self._tell(self.contexts.measure(self.ledger, uuids, self._connections.welcomed(), reading, self._clock()))
        for waiting in self.contexts.answered(reading):
            self._measured(waiting, uuids[waiting.card] in reading.cards)
        held = self.contexts.held(self._key, self.ledger, uuids, self._connections.welcomed(), reading)
        self._charge_unconnected()
        return held

    @property
    def uuids(self) -> list[str]:
        """The GPUs of the grant."""
        return [card.uuid for card in self._cards]

    def begun_contexts(self) -> dict[tuple[Identity, int], float] | None:
        """Since when each process has had a context on each GPU, where that is otherwise than when this was asked last."""
        if not self._contexts_moved:
            return None
        self._contexts_moved = False
        return {
            (named(c.pid, c.pid_in_container), card): since
            for c in self._connections.values()
            for card, since in c.contexts_s.items()
        }

    def show(self) -> None:
        """On the page: what is not leased."""
        for card in range(len(self._cards)):
            self._page.show(card, self.ledger.unleased_bytes(card))

    def _charge_unconnected(self) -> None:
        """What processes hold that cannot come back, or that go around the library, is lent to nobody else."""
        for card, of in enumerate(self._cards):
            self._tell(self.ledger.charge_unconnected(card, self.contexts.unconnected_bytes(of.uuid), self._clock()))

    def _promise(self, connection: Connection) -> int:
        """MiB. Where there are several GPUs, nobody knows on which a context will be."""
        cost_mib = -(-self._measuring.costs.get(self._uuid(0), 0) // MIB)
        return self.ledger.promise(connection.number, 0, cost_mib * MIB, self._clock()) // MIB

    def _hold(self, process: int, seq: int, said: wire.Hold) -> None:
        key = bytes((said.space,)) + said.key
        match said.held:
            case wire.Held.MADE:
                self.ledger.make(process, said.card, key, said.amount)
            case wire.Held.OPENED:
                self._tell(self.ledger.hold(process, said.card, seq, key, said.amount, self._clock()))
            case wire.Held.STILL_OPEN:
                self.ledger.restate_hold(process, said.card, key, said.amount)

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
        connection = self._connections.get(waiting.process)
        if connection is None:
            return
        part = self.ledger.part_of(waiting.process, waiting.card)
        known = known and part.measured_bytes is not None
        if known and waiting.made and part.context_bytes > 0:  # 0: it died before it was looked at
            self._measuring.learn(self._uuid(waiting.card), part.context_bytes)
        unleased = self.ledger.unleased_bytes(waiting.card)
        self._page.show(waiting.card, unleased)
        answer = wire.Measured(waiting.card, known, part.context_bytes, unleased)
        self._connections.attempt(connection, lambda: connection.send(waiting.seq, answer))

    def _uuid(self, card: int) -> str:
        if card >= len(self._cards):
            raise BadDocument(f"packet names card {card}: this container has {len(self._cards)}, from 0")
        return self._cards[card].uuid

    def _may_answer(self, process: int) -> bool:
        connection = self._connections.get(process)
        return connection is not None and connection.pid != 0 and host.runs(connection.pid)

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            connection = self._connections.get(event.process)
            if connection is not None:
                self._connections.attempt(connection, lambda c=connection, e=event: self._tell_one(c, e))  # type: ignore[misc]

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
