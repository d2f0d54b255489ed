"""The sums of one GPU of a ledger: what is taken of its limit, what is free, and what is kept beside contexts.

Decides how much can be given away; to which process is the ledger's business (`vgpu.memory.ledger`). Code that a process loads later, kernel by kernel, makes its
context grow when the container may be full already. So beside each context some room is kept, which its growth uses up; together at most a
sixteenth of the limit. Bytes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from vgpu.memory.records import Holding, LeaseRequest, Promise
from vgpu.memory.shared import Shared

ROOM_SHARE: Final = 16
"""The room beside all contexts of a GPU is at most this part of the limit. Guessed: a container of 1 GiB keeps 64 MiB."""


@dataclass(slots=True)
class GpuAccounts:
    """Of one GPU. A holding's context changes between `take_out` and `put_back` only."""

    limit_bytes: int
    room_each_bytes: int = 0
    """Kept beside each context."""
    holdings: dict[int, Holding] = field(default_factory=dict)
    requests: deque[LeaseRequest] = field(default_factory=deque)
    shared: Shared = field(default_factory=Shared)
    leased_bytes: int = 0
    context_bytes: int = 0
    room_bytes: int = 0
    """Beside the contexts, were there no bound to it."""
    unconnected_bytes: int = 0
    """Of processes of the container that are not connected."""
    promises: dict[int, Promise] = field(default_factory=dict)
    """By process."""

    @property
    def promised_bytes(self) -> int:
        """To all processes together."""
        return sum(promise.bytes for promise in self.promises.values())

    @property
    def unleased_bytes(self) -> int:
        """What no process has leased, for allocations or contexts, and is not kept beside a context."""
        return max(0, self.limit_bytes - self._taken_bytes(self.room_bytes))

    @property
    def free_bytes(self) -> int:
        """What can be given away: neither held nor promised."""
        return max(0, self.limit_bytes - self._taken_bytes(self.room_bytes) - self.promised_bytes)

    def has_room(self, holding: Holding, bound_bytes: int) -> bool:
        """May its contexts grow by so much? The room beside them pays first."""
        taken_bytes = self._taken_bytes(self.room_bytes - min(bound_bytes, self._room_of(holding)))
        return taken_bytes + bound_bytes + self.promised_bytes <= self.limit_bytes

    def lose(self, process: int) -> bool:
        """A process hung up: all that it held is out of the sums. Whether it held anything here."""
        holding = self.holdings.pop(process, None)
        if holding is None:
            return False
        self.shared.leave(process)
        self.heirs_moved()
        self.leased_bytes -= holding.leased_bytes
        self.take_out(holding)
        self.promises.pop(process, None)
        return True

    def shrink(self, holding: Holding, amount_bytes: int) -> None:
        """A part of its lease ends."""
        holding.context.moved(holding.leased_bytes)
        holding.leased_bytes -= amount_bytes
        self.leased_bytes -= amount_bytes

    def charge(self, holding: Holding, context_bytes: int, *, made_bytes: int) -> None:
        """Its contexts take so much."""
        self.take_out(holding)
        holding.context.bytes, holding.made_bytes = context_bytes, made_bytes
        self.put_back(holding)

    def bound(self, holding: Holding, bound_bytes: int) -> None:
        """They may grow by so much."""
        self.take_out(holding)
        holding.context.bound(bound_bytes)
        self.put_back(holding)

    def take_out(self, holding: Holding) -> None:
        """Its contexts and their room, out of the sums until `put_back`."""
        self.context_bytes -= holding.context.bytes
        self.room_bytes -= self._room_of(holding)

    def put_back(self, holding: Holding) -> None:
        """See `take_out`."""
        self.context_bytes += holding.context.bytes
        self.room_bytes += self._room_of(holding)

    def heirs_moved(self) -> None:
        """NVML may count for those who have memory open now what it counted for somebody else."""
        for process in self.shared.openers():
            self.holdings[process].context.moved(self.holdings[process].leased_bytes)

    def _room_of(self, holding: Holding) -> int:
        if holding.made_bytes == 0 or holding.context.bytes == 0:
            return 0
        return max(0, holding.made_bytes + self.room_each_bytes - holding.context.bytes)

    def _taken_bytes(self, room_bytes: int) -> int:
        """With so much room beside all contexts, were there no bound to it."""
        held_bytes = self.leased_bytes + self.context_bytes + self.shared.charged_bytes + self.unconnected_bytes
        return held_bytes + min(room_bytes, self.limit_bytes // ROOM_SHARE)
