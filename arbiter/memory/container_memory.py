"""The memory of one container: leases, shared memory and contexts of its processes, on each GPU of its grant.

The ledger (`vgpu.memory.ledger`) decides on leases, and `arbiter.memory.contexts` evaluates readings of NVML. This module passes packets to the two,
returns their answers, and updates the page with every answer. It handles neither files nor the question which processes may connect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Final

import structlog

from arbiter import host
from arbiter.connection import Connection
from arbiter.identity import Identity, named
from arbiter.memory.connections import Connections
from arbiter.memory.contexts import Contexts, MeasureRequest, NodeMemory
from arbiter.memory.meter import MemoryReading
from arbiter.memory.node_share import NodeShare, RequestId
from arbiter.memory.passing import Member
from arbiter.page import ContainerPage
from vgpu.api.burst import BurstLimits
from vgpu.api.errors import BadDocument
from vgpu.api.grant import Grant, GrantGpu
from vgpu.memory.ceiling import Refusal, RefusedBy
from vgpu.memory.ledger import Ledger
from vgpu.memory.over_limit import MeasuredProcess
from vgpu.memory.recalls import RECALLS
from vgpu.memory.records import Denied, Event, Granted, Recalled, Waiting
from vgpu.protocol import wire

MIB: Final = 2**20
LOGGED_EVERY_S: Final = 60.0
"""Between two refusals of one container in the log that nothing could grant. Guessed."""
_log = structlog.get_logger()


class ContainerMemory:
    """See the module. Without a GPU until `begin`; the three settings are the ledger's."""

    def __init__(
        self,
        key: str,
        connections: Connections,
        page: ContainerPage,
        node_memory: NodeMemory,
        clock: Callable[[], float],
        *,
        opens_at_s: float,
        recall_wait_s: float,
        context_room_bytes: int,
        share: NodeShare,
    ) -> None:
        self.ledger, self.contexts = Ledger([]), Contexts()
        self.limits_bytes: list[int] = []
        """In all, on each GPU: above the guarantee where the container may burst."""
        self._gpus: tuple[GrantGpu, ...] = ()
        self._key, self._connections, self._page = key, connections, page
        self._node_memory, self._clock = node_memory, clock
        self._opens_at_s, self._recall_wait_s = opens_at_s, recall_wait_s
        self._context_room_bytes, self._share = context_room_bytes, share
        self._leaving: deque[int] = deque()
        self._settling = False
        self._contexts_moved = False
        self._logs_from_s = -inf
        """When a refusal is logged again."""
        self._passing, self._member = node_memory.passing, Member(key, connections, self._maker)
        self._passing.add(self._member)

    def begin(self, grant: Grant, burst: BurstLimits | None) -> None:
        """The grant directory now belongs to another container: start without leases. The processes of the one before have left."""
        self._gpus = grant.gpus
        self._member.uid, self._member.uuids = grant.uid, tuple(self.uuids)
        self._share.begin(grant, burst)
        self.ledger = Ledger(
            [gpu.mib * MIB for gpu in grant.gpus],
            self._opens_at_s,
            self._recall_wait_s,
            self._may_answer,
            self._context_room_bytes,
            self._share,
        )
        self._set_limits(grant, burst)
        self.contexts = Contexts()

    def change(self, grant: Grant, burst: BurstLimits | None) -> None:
        """The same GPUs with other limits."""
        self._gpus = grant.gpus
        self._share.change(grant, burst)
        self._set_limits(grant, burst)

    def end(self) -> None:
        """The grant directory is gone."""
        self._passing.remove(self._key)
        self._share.end()

    def _set_limits(self, grant: Grant, burst: BurstLimits | None) -> None:
        guarantees = [gpu.mib * MIB for gpu in grant.gpus]
        self.limits_bytes = self._share.limits_bytes(grant, burst)
        highest = self._share.highest_bytes(grant, burst)
        self._report(self.ledger.set_limits(guarantees, self._clock(), self.limits_bytes, highest))

    def recall(self, uuid: str, missing_bytes: int) -> None:
        """Others lack memory of a GPU: recall it from what no process here uses."""
        self._report(self.ledger.recall(self.uuids.index(uuid), missing_bytes, self._clock()))

    def owes(self, uuid: str) -> bool:
        """Whether a process has yet to answer that."""
        return self.ledger.owes(self.uuids.index(uuid))

    def states_elastic(self, pid: int, uuid: str, elastic_bytes: int) -> None:
        """A process, by its host pid, has so much elastic memory of a GPU."""
        if uuid not in self.uuids:
            return
        gpu = self.uuids.index(uuid)
        before = self.ledger.claimed_bytes(gpu)
        for connection in self._connections.welcomed():
            if connection.pid == pid:
                self._sort(connection, gpu, elastic_bytes)
        if self.ledger.claimed_bytes(gpu) != before:
            self.show()

    def lawful_bytes(self, grant: Grant, burst: BurstLimits | None) -> dict[str, int]:
        """By GPU, what NVML may count before the container is over its limit: `NodeShare.lawful_bytes`."""
        claimed = [self.ledger.claimed_bytes(gpu) for gpu in range(len(self._gpus))]
        return dict(zip(self.uuids, self._share.lawful_bytes(grant, burst, claimed), strict=True))

    def renew(self, grant: Grant, burst: BurstLimits | None) -> None:
        """Limits above the guarantee may apply to a GPU now: `NodeShare.limits_bytes`."""
        self.change(grant, burst)
        self.show()

    def _sort(self, connection: Connection, gpu: int, elastic_bytes: int) -> None:
        self._report(self.ledger.states_elastic(connection.number, gpu, elastic_bytes, self._clock()))

    def node_decided(self, request: RequestId, *, granted: bool) -> None:
        """The node has, or will not have, the memory for a request that waited."""
        decided = self.ledger.node_decided(request.process, request.gpu, request.seq, self._clock(), granted=granted)
        self._report(decided)
        self.show()

    def join(self, connection: Connection) -> int:
        """A process gets its WELCOME. Returns the MiB that are promised to it for a context."""
        self.ledger.join(connection.number)
        if self.contexts.met(connection.pid):
            self._charge_unconnected()
        promised_mib = self._promise(connection) if connection.for_context and len(self._gpus) == 1 else 0
        self.show()
        return promised_mib

    def leave(self, connection: Connection) -> None:
        """Its connection ended. Its memory is leased to others, which may be gone too; the loop handles any number of them without recursion."""
        self._contexts_moved |= bool(connection.contexts_s)
        self.contexts.forget(connection.number, connection.pid)
        self._passing.left(self._member, connection)
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
        """Handle a packet of a process after its WELCOME. Raises BadDocument."""
        now_s, process = self._clock(), connection.number
        match message:
            case wire.Lease(gpu, need, want, kind, waited_ms):
                elastic, waited_s = kind is wire.LeaseKind.ELASTIC, waited_ms / 1000
                self.contexts.allocates(process, gpu)
                self._report(
                    self.ledger.request(process, gpu, seq, need, want, now_s, elastic=elastic, waited_s=waited_s)
                )
            case wire.Return(gpu, amount, kind):
                elastic = kind is wire.LeaseKind.ELASTIC
                given = self.ledger.give_back(process, gpu, amount, seq, now_s, elastic=elastic)
                self._report(given if seq & RECALLS else [*given, Granted(process, gpu, seq, 0)])
            case wire.Usage(gpu, used, leased, managed_mib):
                self.ledger.state(process, gpu, used, leased, managed_mib * MIB)
                self._sort(connection, gpu, self._share.elastic_bytes(connection.pid, gpu))
            case wire.Context(gpu, step, estimate):
                self._context(connection, gpu, step, estimate, seq)
            case wire.Hold():
                self._hold(process, seq, message)
            case wire.Drop(gpu, held, space, amount, key):
                made = held == wire.HoldState.MADE
                events = self.ledger.drop(process, gpu, bytes((space,)) + key, amount, now_s, made=made)
                self._report([*events, Granted(process, gpu, seq, 0)])
            case wire.Convert(gpu, amount):
                self._report([self.ledger.convert(process, gpu, seq, amount)])
            case wire.Open(handle):
                self._passing.open(self._member, connection, seq, handle, now_s, self._opens_at_s)
            case wire.Exported():
                self._passing.exported(self._member, connection, seq, message)
            case wire.Processes(gpu):
                listed = self.contexts.listed(self.ledger, gpu, self._uuid(gpu), self._connections.welcomed())
                connection.send(seq, wire.ProcessList(gpu, tuple(listed[: wire.PROCESSES_LIMIT])))
            case _:
                raise BadDocument(f"{type(message).__name__.upper()} is invalid on a connection for memory")

    def lease_exactly(self, connection: Connection, *, exact: bool) -> None:
        """The process cannot return memory on recall, or can again."""
        self._report(self.ledger.leases_exactly(connection.number, self._clock(), exact=exact))

    def expire(self, now_s: float) -> None:
        """Handle time-outs up to `now_s`."""
        self._report(self.ledger.expire(now_s))
        self._passing.expire(now_s)

    def deadline_s(self) -> float | None:
        """When `expire` is to be called next, or None."""
        due_s = (self.ledger.deadline_s(), self._passing.due_s())
        return min((at_s for at_s in due_s if at_s is not None), default=None)

    def _maker(self, key: bytes) -> tuple[int, int] | None:
        """GPU and number of the process that stated first that it has the memory of this key."""
        key = bytes((wire.Space.IPC,)) + key
        makers = ((gpu, self.ledger.maker(gpu, key)) for gpu in range(len(self._gpus)))
        return next(((gpu, process) for gpu, process in makers if process is not None), None)

    def measure(self, reading: MemoryReading) -> dict[str, list[MeasuredProcess]]:
        """Evaluate a reading: charge contexts and answer the processes that wait for it. Returns, by GPU, the memory to compare with the limit."""
        uuids = self.uuids
        measured = self.contexts.measure(
            self.ledger, uuids, self._connections.welcomed(), reading, self._clock(), self._share.away_bytes
        )
        self._report(measured)
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
        """Since when each process has had a context on each GPU; None if that is the same as at the last call."""
        if not self._contexts_moved:
            return None
        self._contexts_moved = False
        return {
            (named(c.pid, c.pid_in_container), gpu): since
            for c in self._connections.values()
            for gpu, since in c.contexts_s.items()
        }

    def show(self) -> None:
        """Publish the limits in effect and their unleased bytes on the page, and to the node what the container has."""
        for gpu in range(len(self._gpus)):
            self._unleased(gpu)
            self._share.use(gpu, self.ledger.claimed_bytes(gpu))

    def _unleased(self, gpu: int) -> int:
        """Unleased bytes of the limit in effect, after they are on the page."""
        unleased = self.ledger.unleased_bytes(gpu)
        self._page.show(gpu, self.limits_bytes[gpu], unleased)
        return unleased

    def _charge_unconnected(self) -> None:
        """Charge the memory of processes that are not connected, so that it is leased to no other process."""
        for gpu, of in enumerate(self._gpus):
            self._report(self.ledger.charge_unconnected(gpu, self.contexts.unconnected_bytes(of.uuid), self._clock()))

    def _promise(self, connection: Connection) -> int:
        """The promised MiB. With several GPUs, the GPU of the context is unknown."""
        cost_mib = -(-self._node_memory.costs.get(self._uuid(0), 0) // MIB)
        return self.ledger.promise(connection.number, 0, cost_mib * MIB, self._clock()) // MIB

    def _hold(self, process: int, seq: int, message: wire.Hold) -> None:
        key = bytes((message.space,)) + message.key
        match message.held:
            case wire.HoldState.MADE:
                self.ledger.make(process, message.gpu, key, message.amount)
            case wire.HoldState.OPENED:
                self._report(self.ledger.hold(process, message.gpu, seq, key, message.amount, self._clock()))
            case wire.HoldState.STILL_OPEN:
                self.ledger.restate_hold(process, message.gpu, key, message.amount)

    def _context(self, connection: Connection, gpu: int, step: wire.Step, estimate_bytes: int, seq: int) -> None:
        now_s, process = self._clock(), connection.number
        if step == wire.Step.BEGIN:
            cost = self._node_memory.costs.get(self._uuid(gpu), 0)
            events = self.ledger.begin_context(process, gpu, seq, cost, now_s)
            if cost == 0 and self.ledger.part_of(process, gpu).context_bytes == 0:
                connection.unheld.add(gpu)
            self._report(events)
            return
        if step == wire.Step.GROW:
            self._grow(process, gpu, estimate_bytes, seq)
            return
        if step == wire.Step.GROWN:
            self._report(self.ledger.settle_bound(process, gpu, now_s, estimate_bytes))
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
        waiting = MeasureRequest(process, gpu, seq, now_s, exact=made and gpu in connection.unheld, made=made)
        connection.unheld.discard(gpu)
        if self._node_memory.awaitable and self._node_memory.meter is not None:
            self.contexts.wait(waiting)
            self._node_memory.meter.hurry()
        else:
            self._measured(waiting, known=False)

    def _grow(self, process: int, gpu: int, bound_bytes: int, seq: int) -> None:
        """Without measurements, no bound would ever be settled."""
        self._uuid(gpu)
        if self._node_memory.awaitable:
            self._report(self.ledger.bound_context(process, gpu, seq, bound_bytes, self._clock()))
        else:
            self._report([Granted(process, gpu, seq, bound_bytes)])

    def _measured(self, waiting: MeasureRequest, known: bool) -> None:
        connection = self._connections.get(waiting.process)
        if connection is None:
            return
        part = self.ledger.part_of(waiting.process, waiting.gpu)
        known = known and part.measured_bytes is not None
        if (
            known and waiting.made and not waiting.gave_up and part.context_bytes > 0
        ):  # 0: it ended before the measurement
            self._node_memory.learn(self._uuid(waiting.gpu), part.context_bytes)
        answer = wire.Measured(waiting.gpu, known, part.context_bytes, self._unleased(waiting.gpu))
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

    def _log_refusal(self, gpu: int, refusal: Refusal | None) -> tuple[RefusedBy, int]:
        """Not each of a program that tries again and again. Returns what the process is told: the reason, and the size that is too small."""
        if refusal is None:
            return RefusedBy.LIMIT, 0
        if self._clock() >= self._logs_from_s:
            self._logs_from_s = self._clock() + LOGGED_EVERY_S
            _log.warning(
                "memory refused", grant=self._key, gpu=self._uuid(gpu), bytes=refusal.need_bytes, reason=refusal.text
            )
        return refusal.ceiling.by, refusal.ceiling.size_bytes

    def _report_one(self, connection: Connection, event: Event) -> None:
        unleased = self._unleased(event.gpu)  # before the answer: a process that has read it reads an updated page
        match event:
            case Granted(_, gpu, seq, granted):
                connection.send(seq, wire.Leased(gpu, False, granted, unleased))
            case Denied(_, gpu, seq, refusal):
                by, size_bytes = self._log_refusal(gpu, refusal)
                connection.send(seq, wire.Leased(gpu, by, size_bytes, unleased))
            case Recalled(_, gpu, recall, missing):
                connection.send(recall, wire.Recall(gpu, missing))
            case Waiting(_, gpu, seq, missing):
                connection.send(seq, wire.Pending(gpu, missing))
