"""The memory of one container: what its processes lease, share and make contexts with, on each GPU of its grant.

The ledger (`vgpu.memory.ledger`) decides what a process gets, and `arbiter.memory.contexts` what a reading of NVML says of it. This module moves
packets to the two and their answers back, and keeps the page in step with every answer. It knows neither files nor which processes may connect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from arbiter import host
from arbiter.connection import Connection
from arbiter.identity import Identity, named
from arbiter.memory.connections import Connections
from arbiter.memory.contexts import Contexts, Measuring, Waiting
from arbiter.memory.meter import Reading
from arbiter.page import Page
from vgpu.api.errors import BadDocument
from vgpu.api.grant import GrantGpu
from vgpu.memory.ledger import RECALLS, Ledger
from vgpu.memory.over_limit import Held
from vgpu.memory.records import Denied, Event, Granted, Wanted
from vgpu.protocol import wire

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
        self._gpus: tuple[GrantGpu, ...] = ()
        self._key, self._connections, self._page = key, connections, page
        self._measuring, self._clock = measuring, clock
        self._opens_at_s, self._recall_wait_s = opens_at_s, recall_wait_s
        self._context_room_bytes = context_room_bytes
        self._leaving: deque[int] = deque()
        self._settling = False
        self._contexts_moved = False

    def begin(self, gpus: tuple[GrantGpu, ...]) -> None:
        """Another container has the grant directory: nothing is leased. The processes of the one before have left."""
        self._gpus = gpus
        self.ledger = Ledger(
            [gpu.mib * MIB for gpu in gpus],
            self._opens_at_s,
            self._recall_wait_s,
            self._may_answer,
            self._context_room_bytes,
        )
        self.contexts = Contexts()

    def change(self, gpus: tuple[GrantGpu, ...]) -> None:
        """The same GPUs with other limits."""
        self._gpus = gpus
        self._report(self.ledger.set_limits([gpu.mib * MIB for gpu in gpus], self._clock()))

    def join(self, connection: Connection) -> int:
        """A process is welcomed. Returns the MiB that are promised to it for a context."""
        self.ledger.join(connection.number)
        if self.contexts.met(connection.pid):
            self._charge_unconnected()
        promised_mib = self._promise(connection) if connection.for_context and len(self._gpus) == 1 else 0
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
                self._report(self.ledger.leave(self._leaving.popleft(), self._clock()))
        finally:
            self._settling = False

    def handle(self, connection: Connection, seq: int, message: wire.Message) -> None:
        """A packet of a process that was welcomed. Raises BadDocument."""
        now_s, process = self._clock(), connection.number
        match message:
            case wire.Lease(gpu, need, want):
                self._report(self.ledger.request(process, gpu, seq, need, want, now_s))
            case wire.Return(gpu, amount):
                given = self.ledger.give_back(process, gpu, amount, seq, now_s)
                self._report(given if seq & RECALLS else [*given, Granted(process, gpu, seq, 0)])
            case wire.Usage(gpu, used, leased, managed_mib):
                self.ledger.state(process, gpu, used, leased, managed_mib * MIB)
            case wire.Context(gpu, step, estimate):
                self._context(connection, gpu, step, estimate, seq)
            case wire.Hold():
                self._hold(process, seq, message)
            case wire.Drop(gpu, held, space, amount, key):
                made = held == wire.Held.MADE
                events = self.ledger.drop(process, gpu, bytes((space,)) + key, amount, now_s, made=made)
                self._report([*events, Granted(process, gpu, seq, 0)])
            case wire.Processes(gpu):
                listed = self.contexts.listed(self.ledger, gpu, self._uuid(gpu), self._connections.welcomed())
                connection.send(seq, wire.ProcessList(gpu, tuple(listed[: wire.PROCESSES_LIMIT])))
            case _:
                raise BadDocument(f"{type(message).__name__.upper()} is sent by the arbiter only")

    def lease_exactly(self, connection: Connection, *, exact: bool) -> None:
        """The process cannot return memory on recall, or can again."""
        self._report(self.ledger.leases_exactly(connection.number, self._clock(), exact=exact))

    def expire(self, now_s: float) -> None:
        """Time passed."""
        self._report(self.ledger.expire(now_s))

    def measure(self, reading: Reading) -> dict[str, list[Held]]:
        """NVML was read: charge contexts and answer the processes that wait for it. Returns, by GPU, what the guard judges."""
        uuids = self.uuids
        self._report(self.contexts.measure(self.ledger, uuids, self._connections.welcomed(), reading, self._clock()))
        for waiting in self.contexts.answered(reading):
            self._measured(waiting, uuids[waiting.gpu] in reading.gpus)
        held = self.contexts.held(self._key, self.ledger, uuids, self._connections.welcomed(), reading)
        self._charge_unconnected()
        return held

    @property
    def uuids(self) -> list[str]:
        """The GPUs of the grant."""
        return [gpu.uuid for gpu in self._gpus]

    def begun_contexts(self) -> dict[tuple[Identity, int], float] | None:
        """Since when each process has had a context on each GPU, where that is otherwise than when this was called last."""
        if not self._contexts_moved:
            return None
        self._contexts_moved = False
        return {
            (named(c.pid, c.pid_in_container), gpu): since
            for c in self._connections.values()
            for gpu, since in c.contexts_s.items()
        }

    def show(self) -> None:
        """On the page: what is not leased."""
        for gpu in range(len(self._gpus)):
            self._page.show(gpu, self.ledger.unleased_bytes(gpu))

    def _charge_unconnected(self) -> None:
        """The memory of processes that cannot come back, or that go around the library, is lent to no other process."""
        for gpu, of in enumerate(self._gpus):
            self._report(self.ledger.charge_unconnected(gpu, self.contexts.unconnected_bytes(of.uuid), self._clock()))

    def _promise(self, connection: Connection) -> int:
        """MiB. Where there are several GPUs, it is unknown on which a context will be."""
        cost_mib = -(-self._measuring.costs.get(self._uuid(0), 0) // MIB)
        return self.ledger.promise(connection.number, 0, cost_mib * MIB, self._clock()) // MIB

    def _hold(self, process: int, seq: int, said: wire.Hold) -> None:
        key = bytes((said.space,)) + said.key
        match said.held:
            case wire.Held.MADE:
                self.ledger.make(process, said.gpu, key, said.amount)
            case wire.Held.OPENED:
                self._report(self.ledger.hold(process, said.gpu, seq, key, said.amount, self._clock()))
            case wire.Held.STILL_OPEN:
                self.ledger.restate_hold(process, said.gpu, key, said.amount)

    def _context(self, connection: Connection, gpu: int, step: wire.Step, estimate_bytes: int, seq: int) -> None:
        now_s, process = self._clock(), connection.number
        if step == wire.Step.BEGIN:
            cost = self._measuring.costs.get(self._uuid(gpu), 0)
            events = self.ledger.begin_context(process, gpu, seq, cost, now_s)
            if cost == 0 and self.ledger.part_of(process, gpu).context_bytes == 0:
                connection.unheld.add(gpu)
            self._report(events)
            return
        if step == wire.Step.GROW:
            self._grow(process, gpu, estimate_bytes, seq)
            return
        if step == wire.Step.GROWN:
            self.ledger.settle_bound(process, gpu, now_s)
            return
        made = step == wire.Step.DONE
        if made:
            connection.contexts_s.setdefault(gpu, now_s)
        else:
            connection.contexts_s.pop(gpu, None)
        self._contexts_moved = True
        self.ledger.end_context(process, gpu, now_s, made=made)
        if made:
            self.ledger.restate_context(process, gpu, estimate_bytes)
        waiting = Waiting(process, gpu, seq, now_s, exact=made and gpu in connection.unheld, made=made)
        connection.unheld.discard(gpu)
        if self._measuring.awaitable and self._measuring.meter is not None:
            self.contexts.wait(waiting)
            self._measuring.meter.hurry()
        else:
            self._measured(waiting, known=False)

    def _grow(self, process: int, gpu: int, bound_bytes: int, seq: int) -> None:
        """Where nothing is measured, no bound would ever be settled."""
        self._uuid(gpu)
        if self._measuring.awaitable:
            self._report(self.ledger.bound_context(process, gpu, seq, bound_bytes, self._clock()))
        else:
            self._report([Granted(process, gpu, seq, bound_bytes)])

    def _measured(self, waiting: Waiting, known: bool) -> None:
        connection = self._connections.get(waiting.process)
        if connection is None:
            return
        part = self.ledger.part_of(waiting.process, waiting.gpu)
        known = known and part.measured_bytes is not None
        if known and waiting.made and part.context_bytes > 0:  # 0: it died before it was looked at
            self._measuring.learn(self._uuid(waiting.gpu), part.context_bytes)
        unleased = self.ledger.unleased_bytes(waiting.gpu)
        self._page.show(waiting.gpu, unleased)
        answer = wire.Measured(waiting.gpu, known, part.context_bytes, unleased)
        self._connections.attempt(connection, lambda: connection.send(waiting.seq, answer))

    def _uuid(self, gpu: int) -> str:
        if gpu >= len(self._gpus):
            raise BadDocument(f"packet names GPU {gpu}: this container has {len(self._gpus)}, from 0")
        return self._gpus[gpu].uuid

    def _may_answer(self, process: int) -> bool:
        connection = self._connections.get(process)
        return connection is not None and connection.pid != 0 and host.runs(connection.pid)

    def _report(self, events: list[Event]) -> None:
        for event in events:
            connection = self._connections.get(event.process)
            if connection is not None:
                self._connections.attempt(connection, lambda c=connection, e=event: self._report_one(c, e))  # type: ignore[misc]

    def _report_one(self, connection: Connection, event: Event) -> None:
        unleased = self.ledger.unleased_bytes(event.gpu)
        self._page.show(event.gpu, unleased)  # before the answer: who has read it sees the page in step
        match event:
            case Granted(_, gpu, seq, granted):
                connection.send(seq, wire.Leased(gpu, False, granted, unleased))
            case Denied(_, gpu, seq):
                connection.send(seq, wire.Leased(gpu, True, 0, unleased))
            case Wanted(_, gpu, recall, missing):
                connection.send(recall, wire.Recall(gpu, missing))
