"""The sums of one GPU of a ledger: how much of its limit is used, free, and reserved beside contexts.

Decides how much can be granted; the ledger decides to which process (`vgpu.memory.ledger`). Code that a process loads later, kernel by kernel, makes its
context grow when the container may be full already. So the ledger reserves memory beside each context for its growth (the context room); together
at most a sixteenth of the limit.

A container that may burst has two limits: its guarantee for resident memory, and a higher one for all, elastic leases included. Bytes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from vgpu.api.errors import BadDocument
from vgpu.memory.ceiling import Ceiling, Refusal
from vgpu.memory.records import Granted, LeaseRequest, ProcessRecord, Promise
from vgpu.memory.shared import Shared

ROOM_SHARE: Final = 16
"""The context room of all contexts of a GPU is at most this part of the limit. Guessed: a container of 1 GiB reserves 64 MiB."""


SHARE_OF_REST: Final = 4
"""Beyond its need a request gets at most this part of the free memory, so that chunks shrink near the limit. Guessed."""


@dataclass(slots=True)
class GpuAccounts:
    """The sums of one GPU. A record's context changes between `take_out` and `put_back` only."""

    limit_bytes: int
    """Of resident memory, and of all memory if the container may not burst."""
    room_each_bytes: int = 0
    """Reserved beside each context."""
    records: dict[int, ProcessRecord] = field(default_factory=dict)
    requests: deque[LeaseRequest] = field(default_factory=deque)
    shared: Shared = field(default_factory=Shared)
    burst_bytes: int = 0
    """Of all memory, if that is more; smaller values have no effect."""
    highest_bytes: int = 2**63 - 1
    """Of leases and shared memory, what counts for the GPU at most: processes state them after a restart of the arbiter, and may state anything."""
    leased_bytes: int = 0
    elastic_bytes: int = 0
    """The elastic part of all leases."""
    context_bytes: int = 0
    room_bytes: int = 0
    """Sum of the context room of all contexts, before its upper bound applies."""
    unconnected_bytes: int = 0
    """Memory of the container's processes that are not connected."""
    promises: dict[int, Promise] = field(default_factory=dict)
    """By process."""
    ceiling: Ceiling | None = None
    """What the host pool and the GPU can ever give, as the node stated it last."""
    at_node: list[LeaseRequest] = field(default_factory=list)
    """Requests that fit into the limits and wait for memory of the GPU itself."""

    @property
    def promised_bytes(self) -> int:
        """Promised to all processes together, and requested of the GPU."""
        elastic_bytes = sum(request.need_bytes for request in self.at_node if request.elastic)
        return self._promised_resident_bytes + elastic_bytes

    @property
    def claimed_bytes(self) -> tuple[int, int]:
        """Memory that cannot be swapped, with the room beside contexts, and elastic leases."""
        elastic_bytes = min(self.elastic_bytes, self.highest_bytes)
        stated_bytes = self.leased_bytes + self.shared.charged_bytes - self.elastic_bytes
        beyond_bytes = max(0, stated_bytes - (self.highest_bytes - elastic_bytes))
        return self._taken_bytes(self.room_bytes) - self.elastic_bytes - beyond_bytes, elastic_bytes

    @property
    def unleased_bytes(self) -> int:
        """Bytes that no process has leased for allocations or contexts, and that are not reserved beside a context."""
        return max(0, self.most_bytes(elastic=True) - self._taken_bytes(self.room_bytes))

    @property
    def free_bytes(self) -> int:
        """Bytes that can be leased for resident memory: neither used nor promised."""
        return self.left_bytes(elastic=False, promised=True)

    def most_bytes(self, *, elastic: bool) -> int:
        """The limit of resident memory, or of all."""
        return max(self.limit_bytes, self.burst_bytes) if elastic else self.limit_bytes

    def is_hopeless(self, request: LeaseRequest) -> bool:
        """Whether a request does not fit, whatever the container's processes return."""
        most_bytes = self.most_bytes(elastic=request.elastic)
        if self.ceiling is not None:
            most_bytes = min(most_bytes, self.ceiling.bytes)
        return self.shared.missing_bytes(request.key, request.need_bytes) > most_bytes

    def left_bytes(self, *, elastic: bool, promised: bool = False) -> int:
        """Bytes that can be leased for memory of this kind, beside what is promised if `promised`. Resident memory needs room below both limits."""
        left_bytes = self._left_of_limits(elastic=elastic, promised=promised)
        if self.ceiling is not None:
            left_bytes = min(
                left_bytes, self.ceiling.bytes - self._taken_bytes(self.room_bytes) - self.promised_bytes * promised
            )
        return max(0, left_bytes)

    def refusal(self, request: LeaseRequest) -> Refusal | None:
        """Why a request fails that the limits allow; None: it is within the ceiling, or above a limit."""
        missing_bytes = self.shared.missing_bytes(request.key, request.need_bytes)
        if self.ceiling is None or missing_bytes > self._left_of_limits(elastic=request.elastic, promised=False):
            return None
        used_bytes = self._taken_bytes(self.room_bytes)
        if used_bytes + missing_bytes <= self.ceiling.bytes:
            return None
        return Refusal(missing_bytes, used_bytes, self.limit_bytes, self.ceiling)

    def _left_of_limits(self, *, elastic: bool, promised: bool) -> int:
        taken_bytes = self._taken_bytes(self.room_bytes)
        left_bytes = self.most_bytes(elastic=True) - taken_bytes - self.promised_bytes * promised
        if not elastic:
            resident_bytes = taken_bytes - self.elastic_bytes + self._promised_resident_bytes * promised
            left_bytes = min(left_bytes, self.limit_bytes - resident_bytes)
        return left_bytes

    def may_fit(self, missing_bytes: int, *, elastic: bool) -> bool:
        """Whether some limit above the guarantee has room for this. That of resident memory is the guarantee, whatever the other one is. Of what processes
        stated without the kind, all may be elastic."""
        unsorted_bytes = sum(record.unsorted_bytes for record in self.records.values())
        resident_bytes = self._taken_bytes(self.room_bytes) - self.elastic_bytes - unsorted_bytes
        return elastic or missing_bytes <= self.limit_bytes - resident_bytes - self._promised_resident_bytes

    def has_room(self, record: ProcessRecord, bound_bytes: int) -> bool:
        """Whether its contexts may grow by `bound_bytes`. The context room is used first."""
        taken_bytes = self._taken_bytes(self.room_bytes - min(bound_bytes, self._room_of(record)))
        after_bytes = taken_bytes + bound_bytes
        resident_bytes = after_bytes - self.elastic_bytes + self._promised_resident_bytes
        return resident_bytes <= self.limit_bytes and after_bytes + self.promised_bytes <= self.most_bytes(elastic=True)

    def lose(self, process: int) -> bool:
        """A process disconnected: remove its bytes from the sums. Returns whether it had any on this GPU."""
        record = self.records.pop(process, None)
        if record is None:
            return False
        self.shared.leave(process)
        self.heirs_moved()
        self.leased_bytes -= record.leased_bytes
        self.elastic_bytes -= record.elastic_bytes
        self.take_out(record)
        self.promises.pop(process, None)
        return True

    def set_limits(self, limit_bytes: int, burst_bytes: int, highest_bytes: int) -> None:
        """For resident memory, for all, and the highest until now. What waited until the limits are known may fit by a recall now."""
        self.limit_bytes, self.burst_bytes, self.highest_bytes = limit_bytes, burst_bytes, highest_bytes
        for request in self.requests:
            request.recalled &= not request.awaits_limits

    def queue(self, number: int, request: LeaseRequest) -> None:
        """Add a request. It ends the promise of its process. Raises BadDocument if an earlier one of this process and kind is not answered."""
        unanswered = (*self.requests, *self.at_node)
        if any(other.process == request.process and other.kind == request.kind for other in unanswered):
            raise BadDocument(f"{request.kind} of GPU {number} while an earlier one is not answered: one at a time")
        self.promises.pop(request.process, None)
        self.requests.append(request)

    def grant(self, number: int, request: LeaseRequest, free_bytes: int) -> Granted:
        """Grant a request of GPU `number`, and of the `free_bytes` a part in advance unless it needed a recall."""
        record = self.records[request.process]
        if request.key:
            self.shared.open(request.key, request.process, request.need_bytes)
            return Granted(request.process, number, request.seq, request.need_bytes)
        if request.bound:
            self.bound(record, request.need_bytes)
            return Granted(request.process, number, request.seq, request.need_bytes)
        spare_bytes = 0 if request.recalled else (free_bytes - request.need_bytes) // SHARE_OF_REST
        granted_bytes = min(request.want_bytes, request.need_bytes + spare_bytes)
        if request.context:
            self.charge(record, record.context.bytes + granted_bytes, made_bytes=record.made_bytes)
            return Granted(request.process, number, request.seq, record.context.bytes)
        record.leased_bytes += granted_bytes
        record.context.moved(record.leased_bytes)
        self.leased_bytes += granted_bytes
        self._set_elastic(record, record.elastic_bytes + granted_bytes * request.elastic)
        return Granted(request.process, number, request.seq, granted_bytes)

    def shrink(self, record: ProcessRecord, amount_bytes: int, *, elastic: bool = False) -> None:
        """A part of its lease ends. A process that states its lease to a new arbiter does not state the elastic part: what is missing of one kind is of the
        other."""
        record.context.moved(record.leased_bytes)
        record.leased_bytes -= amount_bytes
        self.leased_bytes -= amount_bytes
        self._set_elastic(record, min(record.leased_bytes, max(0, record.elastic_bytes - amount_bytes * elastic)))
        record.unsorted_bytes = min(record.unsorted_bytes, record.leased_bytes - record.elastic_bytes)

    def sort(self, record: ProcessRecord, elastic_bytes: int) -> int:
        """The process has so much elastic memory. What is missing of its elastic lease is part of what it stated without the kind. Returns how much that is."""
        more_bytes = min(record.unsorted_bytes, max(0, elastic_bytes - record.elastic_bytes))
        record.unsorted_bytes -= more_bytes
        self._set_elastic(record, record.elastic_bytes + more_bytes)
        return more_bytes

    def convert(self, record: ProcessRecord, amount_bytes: int) -> bool:
        """A part of its elastic lease becomes resident, if the limit of resident memory has room for it. What it has less of elastic lease, as after a restart,
        is resident already. Raises BadDocument."""
        if amount_bytes > record.leased_bytes:
            raise BadDocument(f"CONVERT of {amount_bytes} bytes: 0 to {record.leased_bytes} are leased")
        unsorted_bytes = min(record.unsorted_bytes, max(0, amount_bytes - record.elastic_bytes))
        amount_bytes = min(amount_bytes, record.elastic_bytes)
        resident_bytes = self._taken_bytes(self.room_bytes) - self.elastic_bytes + self._promised_resident_bytes
        if amount_bytes > max(0, self.limit_bytes - resident_bytes):
            return False
        record.unsorted_bytes -= unsorted_bytes
        self._set_elastic(record, record.elastic_bytes - amount_bytes)
        return True

    def _set_elastic(self, record: ProcessRecord, elastic_bytes: int) -> None:
        self.elastic_bytes += elastic_bytes - record.elastic_bytes
        record.elastic_bytes = elastic_bytes

    def charge(self, record: ProcessRecord, context_bytes: int, *, made_bytes: int) -> None:
        """Its contexts use `context_bytes`."""
        self.take_out(record)
        record.context.bytes, record.made_bytes = context_bytes, made_bytes
        self.put_back(record)

    def bound(self, record: ProcessRecord, bound_bytes: int) -> None:
        """Its contexts may grow by `bound_bytes`."""
        self.take_out(record)
        record.context.bound(bound_bytes)
        self.put_back(record)

    def unbound(self, record: ProcessRecord, unneeded_bytes: int) -> None:
        """For so much of that no call was made."""
        self.take_out(record)
        record.context.unbound(unneeded_bytes)
        self.put_back(record)

    def take_out(self, record: ProcessRecord) -> None:
        """Remove its contexts and their room from the sums until `put_back`."""
        self.context_bytes -= record.context.bytes
        self.room_bytes -= self._room_of(record)

    def put_back(self, record: ProcessRecord) -> None:
        """See `take_out`."""
        self.context_bytes += record.context.bytes
        self.room_bytes += self._room_of(record)

    @property
    def _promised_resident_bytes(self) -> int:
        """A context is resident."""
        resident_bytes = sum(request.need_bytes for request in self.at_node if not request.elastic)
        return sum(promise.bytes for promise in self.promises.values()) + resident_bytes

    def measure(self, process: int, measured_bytes: int, away_bytes: int, at_s: float, *, exact: bool) -> None:
        """NVML counted `measured_bytes` for a process, beside `away_bytes` of its lease that are in host memory. If that has changed since the last
        reading, this one may be of before or after."""
        record, context = self.records[process], self.records[process].context
        if away_bytes != record.away_bytes:
            record.away_bytes, context.measured_bytes = away_bytes, measured_bytes
            context.moved(record.leased_bytes)
            return
        self.take_out(record)
        opened_bytes, orphaned_bytes = self.shared.opened_bytes(process)
        context.read(
            measured_bytes + away_bytes, record.used_bytes - record.managed_bytes, record.leased_bytes, at_s,
            exact=exact, opened_bytes=opened_bytes, orphaned_bytes=orphaned_bytes, made_bytes=record.made_bytes,
        )  # fmt: skip
        context.measured_bytes = measured_bytes
        # one that did not wait for its measure is known once its records rest
        if (exact or context.still) and record.made_bytes == 0:
            record.made_bytes = context.bytes
        elif 0 < measured_bytes < record.made_bytes and at_s >= context.counts_from_s:
            record.made_bytes = measured_bytes  # other processes' contexts were larger: that was an estimate
        self.put_back(record)

    def heirs_moved(self) -> None:
        """NVML may now count shared memory for the processes that have it open, instead of for the process before."""
        for process in self.shared.openers():
            self.records[process].context.moved(self.records[process].leased_bytes)

    def _room_of(self, record: ProcessRecord) -> int:
        if record.made_bytes == 0 or record.context.bytes == 0:
            return 0
        return max(0, record.made_bytes + self.room_each_bytes - record.context.bytes)

    def _taken_bytes(self, room_bytes: int) -> int:
        """Bytes in use with this much context room, before its upper bound applies."""
        held_bytes = self.leased_bytes + self.context_bytes + self.shared.charged_bytes + self.unconnected_bytes
        return held_bytes + min(room_bytes, self.limit_bytes // ROOM_SHARE)
