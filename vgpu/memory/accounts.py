"""The sums of one GPU of a ledger: how much of its limit is used, free, and reserved beside contexts.

Decides how much can be granted; the ledger decides to which process (`vgpu.memory.ledger`). Code that a process loads later, kernel by kernel, makes its
context grow when the container may be full already. So the ledger reserves memory beside each context for its growth (the context room); together
at most a sixteenth of the limit. Bytes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from vgpu.memory.records import LeaseRequest, ProcessRecord, Promise
from vgpu.memory.shared import Shared

ROOM_SHARE: Final = 16
"""The context room of all contexts of a GPU is at most this part of the limit. Guessed: a container of 1 GiB reserves 64 MiB."""


@dataclass(slots=True)
class GpuAccounts:
    """The sums of one GPU. A record's context changes between `take_out` and `put_back` only."""

    limit_bytes: int
    room_each_bytes: int = 0
    """Reserved beside each context."""
    records: dict[int, ProcessRecord] = field(default_factory=dict)
    requests: deque[LeaseRequest] = field(default_factory=deque)
    shared: Shared = field(default_factory=Shared)
    leased_bytes: int = 0
    context_bytes: int = 0
    room_bytes: int = 0
    """Sum of the context room of all contexts, before its upper bound applies."""
    unconnected_bytes: int = 0
    """Memory of the container's processes that are not connected."""
    promises: dict[int, Promise] = field(default_factory=dict)
    """By process."""

    @property
    def promised_bytes(self) -> int:
        """Promised to all processes together."""
        return sum(promise.bytes for promise in self.promises.values())

    @property
    def unleased_bytes(self) -> int:
        """Bytes that no process has leased for allocations or contexts, and that are not reserved beside a context."""
        return max(0, self.limit_bytes - self._taken_bytes(self.room_bytes))

    @property
    def free_bytes(self) -> int:
        """Bytes that can be leased: neither used nor promised."""
        return max(0, self.limit_bytes - self._taken_bytes(self.room_bytes) - self.promised_bytes)

    def has_room(self, record: ProcessRecord, bound_bytes: int) -> bool:
        """Whether its contexts may grow by `bound_bytes`. The context room is used first."""
        taken_bytes = self._taken_bytes(self.room_bytes - min(bound_bytes, self._room_of(record)))
        return taken_bytes + bound_bytes + self.promised_bytes <= self.limit_bytes

    def lose(self, process: int) -> bool:
        """A process disconnected: remove its bytes from the sums. Returns whether it had any on this GPU."""
        record = self.records.pop(process, None)
        if record is None:
            return False
        self.shared.leave(process)
        self.heirs_moved()
        self.leased_bytes -= record.leased_bytes
        self.take_out(record)
        self.promises.pop(process, None)
        return True

    def shrink(self, record: ProcessRecord, amount_bytes: int) -> None:
        """A part of its lease ends."""
        record.context.moved(record.leased_bytes)
        record.leased_bytes -= amount_bytes
        self.leased_bytes -= amount_bytes

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

    def take_out(self, record: ProcessRecord) -> None:
        """Remove its contexts and their room from the sums until `put_back`."""
        self.context_bytes -= record.context.bytes
        self.room_bytes -= self._room_of(record)

    def put_back(self, record: ProcessRecord) -> None:
        """See `take_out`."""
        self.context_bytes += record.context.bytes
        self.room_bytes += self._room_of(record)

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
